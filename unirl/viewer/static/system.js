// What a run costs and where it waits: memory, throughput, queues, phases, weight sync, and the machine.
import { get } from "./api.js";
import { chart } from "./charts.js";
import { duration, el, facts, number, table } from "./dom.js";
import { follow, head, list, put, reload } from "./head.js";

const GROUPS = [["mem/", "Memory", "GiB"], ["throughput/", "Throughput", "per second"], ["queue/", "Queues", ""], ["sync/", "Weight sync", ""], ["time/", "Time", "seconds"]];

export async function show(context) {
  const { main, id, signal } = context;
  let run = await get(`/api/runs/${id}`, {}, signal);
  while (!run.complete && !run.count && !signal.aborted) run = await get(`/api/runs/${id}`, {}, signal);
  const names = Object.keys(run.names).filter((name) => GROUPS.some(([start]) => name.startsWith(start) || name.includes(`/${start}`)));
  const curves = el("div", {});
  const cost = run.cost, total = Math.max(cost.total_s, 1e-9);
  put(main, head(context, run, "System"), list(run.problems),
    facts([["time", duration(cost.total_s)], ["of steps", duration(cost.step_s)], ["samples per second", number(cost.samples_per_s, 1)],
      ["peak memory of a process", cost.host_gib === null ? "" : `${number(cost.host_gib, 2)} GiB`], ["peak memory of a device", cost.device_gib === null ? "" : `${number(cost.device_gib, 2)} GiB`]]),
    el("h2", {}, "Time by phase"), table(["Phase", "Seconds", "Share", ""], Object.entries(cost.phases).sort((a, b) => b[1] - a[1]).map(([name, seconds]) =>
      [name, number(seconds, 2), `${(100 * seconds / total).toFixed(1)} %`, el("meter", { class: "meter", min: 0, max: total, value: seconds, "aria-label": `share of ${name}` })]), [1, 2]),
    curves, el("h2", {}, "Environment"), environment(run.environment));
  await follow(context, names.slice(0, 64), async (content) => {
    if (content.count && !run.count) return reload();
    const parts = GROUPS.flatMap(([start, title, unit]) => {
      const own = names.filter((name) => (name.startsWith(start) || name.includes(`/${start}`)) && content.columns[name]?.some((value) => value !== null));
      if (!own.length) return [];
      return [el("h2", {}, title), el("div", { class: "charts" }, own.map((name) => chart({ title: name, meaning: run.names[name] || unit, x: content.steps,
        lines: [{ label: name.split("/").pop(), values: content.columns[name] }] })))];
    });
    curves.replaceChildren(...parts);
  });
}

function environment(blocks) {
  const names = Object.keys(blocks);
  if (!names.length) return el("p", { class: "soft" }, "Not recorded.");
  return names.map((name) => [el("h3", {}, name), table(["Name", "Value"], Object.entries(blocks[name]))]);
}
