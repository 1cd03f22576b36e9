// The settings of a run with the origin of each, and their differences from another run.
import { get } from "./api.js";
import { el, field, select, table } from "./dom.js";
import { head, list, put } from "./head.js";

export async function show(context) {
  const { main, id, signal, wanted } = context;
  const [run, own, all] = await Promise.all([get(`/api/runs/${id}`, {}, signal), get(`/api/runs/${id}/settings`, {}, signal), get("/api/runs", {}, signal)]);
  let search = "", onlySet = false;
  const rows = el("div", {}), others = all.runs.filter((each) => each.id !== id);
  const go = (event) => { location.hash = `#/run/${id}/config${event.target.value ? `?with=${event.target.value}` : ""}`; };
  const draw = () => {
    const found = own.settings.filter((each) => `${each.key} ${each.shown} ${each.source}`.toLowerCase().includes(search) && !(onlySet && each.source === "default"));
    put(rows, el("p", { class: "soft" }, `${found.length} of ${own.settings.length} settings`),
      table(["Setting", "Value", "Set by"], found.map((each) => [each.key, el("span", { class: each.source === "default" ? "origin-default" : null }, each.shown),
        el("span", { class: each.source === "default" ? "origin-default" : null }, [each.source, each.place].filter(Boolean).join(" "))])));
  };
  put(main, head(context, run, "Settings"), list(own.problems),
    el("div", { class: "bar" }, field("Search", el("input", { type: "search", oninput: (event) => { search = event.target.value.toLowerCase(); draw(); } })),
      el("label", { class: "check" }, el("input", { type: "checkbox", onchange: (event) => { onlySet = event.target.checked; draw(); } }), "only what was set"),
      field("Compare with", select([["", "no other run"], ...others.map((each) => [each.id, `${each.name} (${each.recipe})`])], wanted.with ?? "", go))),
    wanted.with ? await differences(id, wanted.with, signal) : null,
    el("h2", {}, "All settings"), rows, chosen(own.chosen),
    el("details", {}, el("summary", {}, "The recipe as it was written"), el("pre", {}, own.recipe)));
  draw();
}

async function differences(id, other, signal) {
  const found = await get("/api/compare", { runs: `${id},${other}` }, signal);
  return [el("h2", {}, "Differences"), differenceTable(found)];
}

export function differenceTable(found) {
  if (!found.differences.length) return el("p", { class: "soft" }, "All settings are equal, apart from where the runs are and who watches them.");
  return table(["Setting", ...found.runs.map((run) => run.name)], found.differences.map((each) => [each.key, ...each.shown.map((value, i) =>
    [value, each.sources[i] ? el("div", { class: "soft" }, each.sources[i]) : null])]));
}

function chosen(choices) {
  const rows = Object.entries(choices).map(([key, choice]) => [key, String(choice.value ?? ""), String(choice.why ?? "")]);
  return rows.length ? [el("h2", {}, "Chosen by the run"), table(["Setting", "Value", "Why"], rows)] : null;
}
