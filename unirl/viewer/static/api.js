// Asks the server that served this page. Nothing here can ask another one: the policy of the page forbids it.

export async function get(path, parameters = {}, signal = undefined) {
  const wanted = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(wanted).toString();
  const answer = await fetch(query ? `${path}?${query}` : path, { signal, credentials: "same-origin" });
  if (answer.headers.get("content-type")?.startsWith("application/json")) {
    const content = await answer.json();
    if (!answer.ok) throw new Error(content.error);
    return content;
  }
  throw new Error(`${answer.status}: ${(await answer.text()).slice(0, 500)}`);
}

export function mediaAddress(run, sample, form = "file") {
  const place = new URLSearchParams({ kind: sample.kind, step: sample.step, row: sample.row });
  return `/media/${encodeURIComponent(run)}/${form}?${place}`;
}

export function sampleLink(run, sample) {
  return `#/run/${encodeURIComponent(run)}/sample?${new URLSearchParams({ kind: sample.kind, step: sample.step, row: sample.row })}`;
}
