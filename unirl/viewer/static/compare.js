// Several runs: curves over steps, samples or time, settings, held-out scores with intervals, the same prompts.
import { get, sampleLink } from "./api.js";
import { chart, colour } from "./charts.js";
import { badge, duration, el, field, number, select, table } from "./dom.js";
import { differenceTable } from "./config.js";
import { medium } from "./gallery.js";
import { list, put } from "./head.js";
import { outcomeTable } from "./run.js";

const AXES = { steps: "step", samples: "samples", seconds: "seconds" };

export async function show({ main, signal, wanted }) {
  const ids = (wanted.runs ?? "").split(",").filter(Boolean);
  if (ids.length < 2) return put(main, el("h1", {}, "Compare"), el("p", { class: "notice" }, "Select two or more runs in the list of runs."));
  const found = await get("/api/compare", { runs: ids.join(",") }, signal);
  const pages = await Promise.all(ids.map((id) => get(`/api/runs/${id}`, {}, signal)));
  const names = [...new Set(pages.flatMap((page) => Object.keys(page.names)))].sort();
  let axis = "steps", chosen = names.filter((name) => /(^|\/)rollout\/reward_mean$|^reward\/.*_mean$|^train\/(kl|entropy|grad_norm)$|^time\/step$/.test(name)).slice(0, 9);
  const curves = el("div", { class: "charts" }), prompts = el("div", {});
  const draw = async () => curves.replaceChildren(...await overlays(ids, chosen, axis, found.runs, signal));
  put(main, el("h1", {}, "Compare"), list(found.problems), found.notes.map((note) => el("p", { class: "notice" }, note)),
    table(["", "Run", "State", "Steps", "Time", "Samples/s", "Memory (GiB)"], found.runs.map((run, i) => [letter(i), el("a", { href: `#/run/${run.id}` }, run.name), badge(run.status.state, run.status.code),
      run.count, duration(run.cost.total_s), number(run.cost.samples_per_s, 1), number(run.cost.device_gib ?? run.cost.host_gib, 2)]), [3, 4, 5, 6]),
    el("div", { class: "bar" }, field("Curves over", select(Object.entries(AXES), axis, (event) => { axis = event.target.value; draw(); })),
      field("Add a metric", select([["", "..."], ...names.map((name) => [name, name])], "", (event) => { if (event.target.value) chosen = [event.target.value, ...chosen]; event.target.value = ""; draw(); }))),
    curves, el("h2", {}, "Held-out scores"), outcomes(found), el("h2", {}, "Settings that differ"), differenceTable(found), el("h2", {}, "The same prompts"), prompts);
  await draw();
  await samePrompts(prompts, ids, found.runs, signal);
}

const letter = (i) => String.fromCharCode(65 + i);

function outcomes(found) {
  const made = found.progress.map((one, i) => (one ? [el("h3", {}, `${letter(i)} ${found.runs[i].name}: step ${one.steps[0]} to ${one.steps[1]}`), outcomeTable(one.differences, found.level)] : null));
  const between = found.outcomes.map((one, i) => (one ? [el("h3", {}, `A to ${letter(i + 1)}: step ${one.steps[0]} of ${found.runs[0].name}, step ${one.steps[1]} of ${found.runs[i + 1].name}`),
    one.differences.length ? outcomeTable(one.differences, found.level) : el("p", { class: "soft" }, "They have no common prompt.")] : null));
  const all = [...between, ...made].filter(Boolean);
  return all.length ? all : el("p", { class: "soft" }, "No run has two evaluations.");
}

async function overlays(ids, names, axis, runs, signal) {
  const all = await Promise.all(ids.map((id) => get(`/api/runs/${id}/curves`, { names: names.join(",") }, signal)));
  const x = [...new Set(all.flatMap((one) => one[axis]))].sort((a, b) => a - b);
  return names.filter((name) => all.some((one) => one.columns[name]?.some((value) => value !== null))).map((name) => {
    const lines = all.map((one, i) => {
      const at = new Map(one[axis].map((value, row) => [value, one.columns[name][row]]));
      return { label: `${letter(i)} ${runs[i].name}`, values: x.map((value) => at.get(value) ?? null), colour: colour(i) };
    });
    return chart({ title: name, x, xLabel: AXES[axis], lines });
  });
}

async function samePrompts(place, ids, runs, signal) {
  let shown = 0;
  const more = el("button", { type: "button", onclick: () => add() }, "More prompts");
  async function add() {
    const found = await get("/api/compare/samples", { runs: ids.join(","), offset: shown }, signal);
    shown += found.rows.length;
    more.remove();
    if (!found.total) place.append(el("p", { class: "soft" }, "The last evaluations have no common prompt."));
    place.append(...found.rows.map((row) => el("section", { "data-item": true, tabindex: -1 }, el("h3", { dir: "auto" }, row.prompt), row.samples.map((samples, i) =>
      el("div", {}, el("p", {}, `${letter(i)} ${runs[i].name}: mean reward ${number(row.rewards[i])}`), el("div", { class: "row" }, samples.map((each) =>
        el("a", { class: each.has_file ? "side" : "side words", href: sampleLink(ids[i], each) }, el("div", { class: each.has_file ? "view" : null }, medium(ids[i], each)), el("p", {}, number(each.reward)))))))))); 
    if (shown < found.total && found.rows.length) place.append(more);
  }
  await add();
}
