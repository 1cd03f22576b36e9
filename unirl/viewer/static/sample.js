// One sample: prompt, rewrite, medium, reward by component, the others of its prompt, and what it was made from.
import { get, mediaAddress, sampleLink } from "./api.js";
import { chart } from "./charts.js";
import { el, facts, number, table } from "./dom.js";
import { medium } from "./gallery.js";
import { list, put } from "./head.js";
import { tokens } from "./tokens.js";

const MEANINGS = { logp: "log-probability under the policy that sampled, nats", log_ratio: "log-probability in the update that trained the sample, before its step, minus that of the policy that sampled, nats", advantage: "of each token, action or step", sigma: "noise level at which the step began" };

export async function show({ main, id, signal, wanted, keys }) {
  const found = await get(`/api/runs/${id}/sample`, { kind: wanted.kind, step: wanted.step, row: wanted.row }, signal);
  const row = found.sample, group = row.prompt ? "prompt" : "group";
  const others = found.siblings.filter((each) => each.row !== row.row);
  put(main, el("h1", {}, `Sample ${row.sample_id}`), list(found.problems),
    el("p", {}, el("a", { href: `#/run/${id}/gallery?${new URLSearchParams({ kind: row.kind, first_step: row.step, last_step: row.step })}` }, row.kind === "eval" ? `Evaluation after step ${row.step}` : `Training step ${row.step}`),
      el("span", { class: "soft" }, ` - j and k: other samples of this ${group}`)),
    el("div", { class: "shown" },
      el("div", {}, medium(id, row, { large: true }),
        row.has_file ? el("p", { class: "soft" }, found.folder, "/", found.file, " - ", el("a", { href: mediaAddress(id, row, row.has_mp4 ? "mp4" : "file"), download: true }, "download")) : null),
      el("div", {}, row.prompt ? [el("h2", {}, "Prompt"), el("pre", { dir: "auto" }, row.prompt)] : null,
        row.rewrite ? [el("h2", {}, "Rewrite that it was drawn from"), el("pre", { dir: "auto" }, row.rewrite)] : null,
        row.images.length ? [el("h2", {}, "Images in the prompt"), el("ul", {}, row.images.map((name) => el("li", {}, name)))] : null,
        row.has_file && row.text ? [el("h2", {}, "Text"), el("pre", { dir: "auto" }, row.text)] : null,
        el("h2", {}, "Reward"), breakdown(row, found.siblings),
        el("h2", {}, "Facts"), facts([["advantage", row.advantage === null ? "" : number(row.advantage), "How much training favours the sample. Below 0, it becomes less likely."],
          ["weight in the loss", number(row.weight), "Training multiplies the loss of the sample by it. Training ignores a sample of weight 0."],
          ["sampled after update", row.weight_version, "Number of optimizer updates after which the weights that made the sample were published."],
          ["track", row.track, "The part of the model that made the sample. A run can train several, such as a prompt enhancer and an image model."], ["medium", row.medium], ["group", row.group_id], ...Object.entries(row.facts).map(([name, value]) => [name, String(value)])]),
        el("h2", {}, "Lineage"), el("ul", { class: "tree" }, found.lineage.map((node) => el("li", { "data-depth": Math.min(node.depth, 4), class: node.row === row.row ? "here" : null },
          el("span", { class: "soft" }, `${node.label}: `), node.row === null ? node.text : el("a", { href: sampleLink(id, { ...row, row: node.row }) }, node.text)))))),
    tokens(found),
    Object.keys(found.series).length ? [el("h2", {}, "Along the sample"), el("div", { class: "charts" }, Object.entries(found.series).map(([name, values]) => chart({
      title: name, meaning: MEANINGS[name] ?? "", x: values.map((_, n) => n + 1), xLabel: found.series.sigma ? "stochastic step" : "token or action",
      lines: [{ label: name, values }] })))] : null,
    found.history.length > 1 ? [el("h2", {}, "The same prompt and noise in other evaluations"), strip(id, found.history, (each) => `step ${each.step}: `)] : null,
    others.length ? [el("h2", {}, `Other samples of this ${group} (${others.length})`), strip(id, others, () => "")] : null);
  keys((event) => {
    if (event.key !== "j" && event.key !== "k") return false;
    const at = found.siblings.findIndex((each) => each.row === row.row) + (event.key === "j" ? 1 : -1);
    if (found.siblings[at]) location.hash = sampleLink(id, found.siblings[at]);
    return true;
  });
}

function breakdown(row, siblings) {
  const all = [["reward", row.reward], ...Object.entries(row.rewards)];
  const values = (name) => siblings.map((each) => (name === "reward" ? each.reward : each.rewards[name])).filter((value) => value !== null && value !== undefined);
  return table(["Score", "Value", "Mean of the stored samples", "Rank among them"], all.map(([name, value]) => {
    const group = values(name), mean = group.length ? group.reduce((a, b) => a + b, 0) / group.length : null;
    return [name, number(value), number(mean), value === null ? "-" : `${group.filter((other) => other > value).length + 1} of ${group.length}`];
  }), [1, 2, 3]);
}

function strip(id, rows, label) {
  return el("div", { class: "row" }, rows.map((each) => el("a", { class: each.has_file ? "side" : "side words", href: sampleLink(id, each), "data-item": true },
    el("div", { class: each.has_file ? "view" : null }, medium(id, each)), el("p", {}, label(each), number(each.reward)))));
}
