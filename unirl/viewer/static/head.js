// The top of a page about one run, and the curves of a run that is still being read or written.
import { get } from "./api.js";
import { badge, el, problems } from "./dom.js";

const EVERY_MS = 2000;

export const ALIVE = ["running", "stalled"];

// Name, state and remark of a run. The state follows the run while it lives.
export function head({ signal, poll }, run, title = "") {
  const place = el("div", {}, state(run));
  const read = async () => {
    const now = await get(`/api/runs/${run.id}/state`, {}, signal);
    put(place, state(now));
    return ALIVE.includes(now.status.state);
  };
  if (ALIVE.includes(run.status.state)) poll(read, EVERY_MS);
  return [el("h1", {}, title ? `${title}: ` : "", run.name), place, run.remark ? el("p", { class: "notice" }, run.remark) : null,
  title !== "Episodes" && run.names?.["env/return"] !== undefined ? el("p", {}, el("a", { href: `#/run/${run.id}/episodes` }, "Episodes")) : null];
}

function state(run) {
  const step = run.step === null ? "no step yet" : `step ${run.step}${run.total_steps ? ` of ${run.total_steps}` : ""}`;
  return [el("p", {}, badge(run.status.state, run.status.code), " ", el("span", { class: "soft" }, [run.recipe, step, run.path].filter(Boolean).join(" - "))),
    run.status.reason ? el("p", { class: "notice bad" }, run.status.reason) : null].filter(Boolean);
}

export function put(main, ...parts) {
  main.replaceChildren(...parts.flat(Infinity).filter(Boolean));
}

// Shows the page again, for example because the run has metrics that it did not have.
export const reload = () => window.dispatchEvent(new HashChangeEvent("hashchange"));

export const list = (text) => problems(text);

// Shows curves now, and again whenever the run has more steps or the server has read more of them.
export async function follow({ id, signal, poll }, names, draw) {
  let last = null, quiet = 0;
  const read = async () => {
    const curves = await get(`/api/runs/${id}/curves`, { names: names.join(",") }, signal);
    const mark = JSON.stringify([curves.count, curves.complete, curves.status, curves.evaluation_steps.length]);
    if (mark !== last) draw(curves);
    last = mark;
    quiet = curves.complete && !ALIVE.includes(curves.status.state) ? quiet + 1 : 0;
    return curves;
  };
  let curves = await read();
  while (!curves.complete && !signal.aborted) curves = await read();
  if (quiet === 0) poll(async () => { await read(); return quiet < 3; }, EVERY_MS);
}
