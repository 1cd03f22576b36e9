// The episodes of a policy that acts: returns, lengths and success by step and by task, and the newest episodes.
import { get, sampleLink } from "./api.js";
import { chart } from "./charts.js";
import { el, number, table } from "./dom.js";
import { medium } from "./gallery.js";
import { follow, head, list, put } from "./head.js";

const WHERE = { eval: "held out", samples: "training" };

export async function show(context) {
  const { main, id, signal } = context;
  const [run, found] = await Promise.all([get(`/api/runs/${id}`, {}, signal), get(`/api/runs/${id}/episodes`, {}, signal)]);
  const names = Object.keys(run.names).filter((name) => name.startsWith("env/") || name.includes("/env/"));
  const curves = el("div", { class: "charts" });
  put(main, head(context, run, "Episodes"), list(found.problems), curves,
    found.total ? null : el("p", { class: "notice" }, "This run has stored no episodes."),
    found.total ? [el("h2", {}, "Stored episodes by step"), means("Step", found.steps), el("h2", {}, "Stored episodes by task, of the newest step of each"), means("Task", found.tasks),
      el("h2", {}, `Newest episodes (${found.rows.length} of ${found.total})`),
      el("div", { class: "row" }, found.rows.map((row) => el("a", { class: row.has_file ? "side" : "side words", href: sampleLink(id, row), "data-item": true },
        el("div", { class: row.has_file ? "view" : null }, medium(id, row)),
        el("p", {}, `${WHERE[row.kind]}, step ${row.step}: ${succeeded(row.facts.success)}, reward ${number(row.reward)}, ${number(row.facts.steps)} steps`))))] : null);
  if (names.length) {
    await follow(context, names, async (content) => {
      curves.replaceChildren(...names.filter((name) => content.columns[name]?.some((value) => value !== null)).map((name) => chart({
        title: name, meaning: run.names[name], x: content.steps, lines: [{ label: name.split("/").pop(), values: content.columns[name] }] })));
    });
  }
}

function succeeded(share) {
  if (share === undefined) return "success not reported";
  return share === true || share === 1 ? "success" : share === false || share === 0 ? "no success" : `success ${(100 * share).toFixed(0)} %`;
}

function means(title, rows) {
  return table([title, "From", "Episodes", "Reward", "Steps", "Success"], rows.map((row) =>
    [row.name, row.name === row.step ? WHERE[row.kind] : `${WHERE[row.kind]}, step ${row.step}`, row.count, number(row.reward), number(row.length, 1), row.success === null ? "" : `${(100 * row.success).toFixed(0)} %`]), [2, 3, 4, 5]);
}
