// One run: outcome, reward with its spread, components, phases, the metrics that tell most, ledger, alarms.
import { get } from "./api.js";
import { chart, colour } from "./charts.js";
import { counted, duration, el, facts, number, select, field, table } from "./dom.js";
import { follow, head, list, put, reload } from "./head.js";

const TELLING = ["train/ratio_mean", "train/clip_fraction", "train/kl", "train/approx_kl", "train/entropy", "train/policy_entropy", "train/grad_norm",
  "train/loss", "rollout/zero_std_group_ratio", "rollout/response_len_mean", "rollout/truncated_fraction", "env/return", "env/success_once",
  "train/explained_variance"];

export async function show(context) {
  const { main, id, signal } = context;
  let run = await get(`/api/runs/${id}`, {}, signal);
  while (!run.complete && !run.count && !signal.aborted) run = await get(`/api/runs/${id}`, {}, signal);
  const names = Object.keys(run.names), known = names.length + run.evaluation_names.length;
  const ends = (wanted) => names.filter((name) => name === wanted || name.endsWith(`/${wanted}`));
  const components = names.filter((name) => /^(.+\/)?reward\/.+_mean$/.test(name) && !name.includes("rollout/"));
  const phases = names.filter((name) => name.startsWith("time/") && name !== "time/step");
  const telling = TELLING.flatMap(ends);
  const asked = [...ends("rollout/reward_mean"), ...ends("rollout/reward_std"), ...components, ...components.map((name) => name.replace(/_mean$/, "_std")),
    ...phases, ...telling, ...run.evaluation_names.filter((name) => name.endsWith("_mean") || name === "eval/reward_stderr")];
  const problems = el("div", {}), raised = el("div", {}), curves = el("div", { class: "charts" }), other = el("div", { class: "charts" }), below = el("div", {}), outcome = el("div", {});
  const wanted = new Set();
  const more = select([["", "Add a metric ..."], ...names.map((name) => [name, name])], "", async (event) => {
    if (!event.target.value) return;
    wanted.add(event.target.value);
    other.replaceChildren(...await extra(id, [...wanted], run.names, signal));
    event.target.value = "";
  }, { "aria-label": "Add a metric" });
  put(main, head(context, run), problems, raised, outcome, el("h2", {}, "Curves"), curves, el("div", { class: "bar" }, field("Other metrics", more)), other, below);
  const refresh = () => {
    put(problems, list(run.problems));
    const isOpen = raised.querySelector("details")?.open;
    put(raised, alarms(run, isOpen));
    put(below, ledger(run), otherEvents(run), origin(run));
  };
  refresh();
  showOutcome(outcome, id, signal).catch((error) => { if (!signal.aborted) throw error; });
  await follow(context, [...new Set(asked)].slice(0, 64), async (content) => {
    curves.replaceChildren(...rewards(content, run, components), ...stack(content, phases), ...rest(content, telling, run.names), ...constants(content, telling));
    if (!curves.childElementCount) curves.append(el("p", { class: "soft" }, "No step was logged yet."));
    if (content.count !== run.count || content.status.state !== run.status.state) {
      run = await get(`/api/runs/${id}`, {}, signal);
      if (Object.keys(run.names).length + run.evaluation_names.length !== known) return reload();
      refresh();
    }
  });
}

async function showOutcome(place, id, signal) {
  const { outcome, level } = await get(`/api/runs/${id}/outcome`, {}, signal);
  if (!outcome || signal.aborted) return;
  put(place, el("h2", {}, `Held-out scores, step ${outcome.steps[0]} to ${outcome.steps[1]}`), outcomeTable(outcome.differences, level));
}

export function outcomeTable(differences, level) {
  return table(["Score", "Before", "After", `Difference [${Math.round(level * 100)}% interval]`, "Prompts"], differences.map((one) => {
    const low = one.interval?.low ?? 0, high = one.interval?.high ?? 0;
    const tone = one.interval && (low > 0 || high < 0) ? (low > 0 ? "good" : "bad") : "soft";
    const change = one.after - one.before, sign = change >= 0 ? "+" : "";
    const range = one.interval ? ` [${number(low)}, ${number(high)}]` : " (too few prompts for an interval)";
    return [one.name, number(one.before), number(one.after), el("span", { class: tone }, `${sign}${number(change)}${range}`), one.num_prompts];
  }), [1, 2, 3, 4]);
}

function rewards(content, run, components) {
  const measured = Object.keys(content.columns).filter((name) => name.endsWith("rollout/reward_mean"));
  const groups = [["Reward", measured, "eval/reward_mean", content.evaluations["eval/reward_stderr"]],
    ...[...new Set(components.map(shortName))].map((short) => [short, components.filter((name) => shortName(name) === short), `eval/${short}_mean`])];
  return groups.filter(([, names, held]) => names.length || content.evaluations[held]).map(([title, names, held, spread]) => {
    const lines = byTrack(names).map(([track, name]) => ({ label: track || "training", values: content.columns[name], spread: content.columns[name.replace(/_mean$/, "_std")] }));
    const meaning = title === "Reward" ? "mean of the step's samples and their standard deviation; held out: mean and standard error" : run.names[names[0]];
    return chart({ title, meaning, ...withHeldOut(content, lines, content.evaluations[held], spread), large: title === "Reward" });
  });
}

const shortName = (name) => name.replace(/^(.+\/)?reward\//, "").replace(/_mean$/, "");

// A metric of a run of several tracks stands once for each track, and once for the run: the same as that of its last track.
function byTrack(names) {
  const tracks = names.filter((name) => !/^(rollout|reward)\//.test(name));
  return (tracks.length ? tracks : names).map((name) => [tracks.length ? name.split("/")[0] : "", name]);
}

// The evaluations as one more line over the steps of both.
function withHeldOut(content, lines, values, spread) {
  if (!values) return { x: content.steps, lines };
  const x = [...new Set([...content.steps, ...content.evaluation_steps])].sort((a, b) => a - b);
  const at = (steps, column) => {
    const found = new Map(steps.map((step, i) => [step, column?.[i] ?? null]));
    return x.map((step) => found.get(step) ?? null);
  };
  const training = lines.map((line) => ({ ...line, values: at(content.steps, line.values), spread: line.spread && at(content.steps, line.spread) }));
  return { x, lines: [...training, { label: "held out", values: at(content.evaluation_steps, values), spread: spread && at(content.evaluation_steps, spread), colour: colour(lines.length) }] };
}

function stack(content, phases) {
  const inside = phases.filter((name) => content.columns[name].some((value) => value > 0));
  if (!inside.length) return [];
  const lines = inside.map((name) => ({ label: name.slice(5), values: content.columns[name] }));
  return [chart({ title: "Time of a step by phase", meaning: "seconds, stacked", x: content.steps, lines, stacked: true, large: true })];
}

const varies = (values) => new Set(values?.filter((value) => value !== null)).size > 1 || values?.length === 1;

// Metrics that have one value throughout, as text.
function constants(content, names) {
  const same = names.filter((name) => !varies(content.columns[name]) && content.columns[name]?.some((value) => value !== null));
  if (!same.length) return [];
  return [el("figure", {}, el("figcaption", {}, "Constant"), facts(same.map((name) => [name, number(content.columns[name].find((value) => value !== null))])))];
}

function rest(content, names, meanings) {
  return names.filter((name) => varies(content.columns[name]))
    .map((name) => chart({ title: name, meaning: meanings[name] ?? "", x: content.steps, lines: [{ label: name.split("/").pop(), values: content.columns[name] }] }));
}

async function extra(id, names, meanings, signal) {
  const content = await get(`/api/runs/${id}/curves`, { names: names.join(",") }, signal);
  return [...rest(content, names, meanings), ...constants(content, names)];
}

function ledger(run) {
  const { generated, scored, dropped, reasons } = run.ledger;
  const why = Object.entries(reasons).map(([reason, count]) => `${reason}: ${count}`).join("; ");
  return [el("h2", {}, "Samples"), facts([["generated", generated], ["scored", scored], ["dropped", dropped], ["why", why]])];
}

const RAISED = { "alarm.raise": "alarm", "alarm.clear": "alarm ended", warning: "warning", "reward.error": "reward failed" };
const ENOUGH = 3;

const eventTable = (events) => table(["Time", "Event", "What"], events.map((event) => [event.time.slice(0, 19).replace("T", " "), RAISED[event.name] ?? event.name, event.text]));

// The newest alarms and warnings, and the earlier ones below a fold.
function alarms(run, isOpen) {
  const raised = run.events.filter((event) => event.name in RAISED).toReversed(), earlier = raised.slice(ENOUGH);
  if (!raised.length) return null;
  return el("section", { class: "notice" }, el("h2", {}, "Alarms and warnings"), eventTable(raised.slice(0, ENOUGH)),
    earlier.length ? el("details", { open: isOpen }, el("summary", {}, `${earlier.length} earlier`), eventTable(earlier)) : null);
}

function otherEvents(run) {
  const others = run.events.filter((event) => !(event.name in RAISED)).toReversed();
  return others.length ? [el("h2", {}, "Other events"), el("details", {}, el("summary", {}, counted(others.length, "event")), eventTable(others))] : null;
}

function origin(run) {
  const made = run.facts;
  if (!made) return null;
  const commit = made.git ? `${made.git.commit.slice(0, 12)}${made.git.changed ? " (changed files)" : ""}` : "";
  return [el("h2", {}, "Origin"), facts([["id", made.id], ["created", made.created], ["seed", made.seed], ["determinism", made.determinism], ["commit", commit],
    ["time", duration(run.cost.total_s)], ["samples per second", number(run.cost.samples_per_s, 1)]]),
  table(["Started", "Host", "Command"], made.sessions.map((each) => [each.started, each.host, ["unirl", ...each.argv].join(" ")]))];
}
