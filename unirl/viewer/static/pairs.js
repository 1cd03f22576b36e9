// Two evaluations side by side: the same prompts with the same noise, one over the other behind a slider.
import { get, sampleLink } from "./api.js";
import { el, field, number, select } from "./dom.js";
import { medium } from "./gallery.js";
import { head, list, put } from "./head.js";

const PART = 12;

export async function show(context) {
  const { main, id, signal, wanted, keys } = context;
  const asked = { before: wanted.before ?? "", after: wanted.after ?? "", limit: PART };
  const [run, first] = await Promise.all([get(`/api/runs/${id}`, {}, signal), get(`/api/runs/${id}/pairs`, asked, signal)]);
  const top = [head(context, run, "Before and after"), list(first.problems)];
  if (!first.steps.length) return put(main, top, el("p", { class: "notice" }, "This run has stored no evaluation yet."));
  if (first.steps.length === 1) return put(main, top, el("p", { class: "notice" }, `There is only one evaluation, after step ${first.before}, and so nothing to compare. `,
    el("a", { href: `#/run/${id}/gallery?kind=eval` }, "Its samples")));
  const rows = el("div", {}), slider = el("input", { type: "range", min: 0, max: 100, value: 50, "aria-label": "Share that shows the later evaluation" });
  const go = (name) => (event) => { location.hash = `#/run/${id}/pairs?${new URLSearchParams({ before: first.before, after: first.after, [name]: event.target.value })}`; };
  const steps = first.steps.map((step) => [step, `step ${step}`]);
  const clip = () => rows.querySelectorAll(".over").forEach((over) => { over.style.clipPath = `inset(0 0 0 ${100 - slider.value}%)`; });
  slider.addEventListener("input", clip);
  const slides = first.rows.some((row) => row.pairs.some(isOverlaid));
  put(main, top,
    el("div", { class: "bar" }, field("Before", select(steps, first.before, go("before"))), field("After", select(steps, first.after, go("after"))),
      slides ? field("Before <-> after", slider) : null), el("p", { class: "soft" }, `${first.total} prompts are in both evaluations.`), rows);
  let shown = 0;
  const more = el("button", { type: "button", onclick: async () => add(await get(`/api/runs/${id}/pairs`, { ...asked, offset: shown }, signal)) }, "More prompts");
  function add(part) {
    shown += part.rows.length;
    rows.append(...part.rows.map((row) => prompt(id, row)));
    more.remove();
    if (shown < part.total && part.rows.length) rows.append(more);
    clip();
  }
  add(first);
  keys((event) => {
    if (event.key !== " " || !slides || event.target.matches("button, a, summary, video")) return false;
    slider.value = Number(slider.value) < 50 ? 100 : 0;
    clip();
    return true;
  });
}

function prompt(id, row) {
  const change = row.rewards[1] - row.rewards[0];
  return el("section", { "data-item": true, tabindex: -1 }, el("h3", { dir: "auto" }, row.prompt),
    el("p", {}, `mean reward ${number(row.rewards[0])} -> ${number(row.rewards[1])} `, el("span", { class: change > 0 ? "good" : change < 0 ? "bad" : "soft" }, `(${change >= 0 ? "+" : ""}${number(change)})`)),
    el("div", { class: "row" }, row.pairs.map((pair) => (isOverlaid(pair) ? overlaid : words)(id, ...pair))));
}

const isOverlaid = ([before, after]) => before.has_file && after.has_file;

const caption = (id, before, after) => el("p", {}, el("a", { href: sampleLink(id, before) }, number(before.reward)), " -> ", el("a", { href: sampleLink(id, after) }, number(after.reward)));

function overlaid(id, before, after) {
  return el("div", { class: "side" }, el("div", { class: "view" }, medium(id, before), el("div", { class: "over" }, medium(id, after))), caption(id, before, after));
}

function words(id, before, after) {
  return el("div", { class: "side words" }, el("h4", { class: "soft" }, "before"), medium(id, before), el("h4", { class: "soft" }, "after"), medium(id, after), caption(id, before, after));
}
