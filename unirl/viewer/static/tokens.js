// The tokens of a sample, coloured by a value of each. A line below says the same as the colour: solid above 0, dotted below.
import { el, field, number, select, table } from "./dom.js";

const LEVELS = 4;
const VALUES = [
  ["advantage", "advantage", "above 0, training makes the token likelier"],
  ["log_ratio", "log-ratio", "log-probability in the update that trained the sample, before its step, minus that of the policy that sampled, nats"],
  ["logp", "log-probability", "under the policy that sampled, nats; the farther below 0, the less likely the token was"],
];

// The section about the tokens of a sample, or what the run lacks for it. None for a sample that is no text.
export function tokens(found) {
  const row = found.sample, { pieces, context, has_secret: hasSecret } = found.tokens;
  if (row.medium !== "text") return null;
  const head = el("h2", {}, "Tokens");
  if (!pieces.length) return [head, el("p", { class: "soft", "data-lacks": "tokens" }, lack(row, hasSecret))];
  const read = new Set(context), own = pieces.map((_, n) => n).filter((n) => !read.has(n));
  const columns = new Map(VALUES.map(([name]) => [name, column(name, row, found.series, own, pieces.length)]).filter(([, values]) => values));
  const absent = VALUES.filter(([name]) => !columns.has(name)).map(([, label]) => label);
  const place = el("div", {});
  const ofPrompt = Math.max(...found.siblings.map((each) => Math.abs(each.advantage ?? 0)));
  const draw = (name) => place.replaceChildren(...coloured(pieces, read, columns.get(name), name === "advantage" ? ofPrompt : 0, VALUES.find(([each]) => each === name)));
  const choice = select(VALUES.filter(([name]) => columns.has(name)).map(([name, label]) => [name, label]), "", (event) => draw(event.target.value));
  if (columns.size) draw([...columns.keys()][0]);
  return [head, columns.size ? el("div", { class: "bar" }, field("Colour by", choice)) : null, place,
    absent.length ? el("p", { class: "soft", "data-lacks": "values" }, `This run did not record: ${absent.join(", ")} of its tokens.`) : null,
    el("details", {}, el("summary", {}, `Table of the ${pieces.length} tokens`), table(["Token", "Text", ...VALUES.filter(([name]) => columns.has(name)).map(([, label]) => label)],
      pieces.map((piece, n) => [n + 1, el("code", { dir: "auto" }, visible(piece)), ...[...columns.values()].map((values) => number(values[n]))]), [0, 2, 3, 4]))];
}

function lack(row, hasSecret) {
  if (hasSecret) return "The tokens are not shown, since the text has what looks like a secret.";
  return row.kind === "eval" ? "Evaluations record no tokens. Samples of training steps have them." : "This run did not record the tokens of this sample.";
}

// A value for each piece, null for one without. The advantage of a sample is that of all its tokens, unless each has its own.
function column(name, row, series, own, count) {
  const values = series[name] ?? (name === "advantage" && row.advantage !== null ? own.map(() => row.advantage) : null);
  if (!values) return null;
  const all = new Array(count).fill(null);
  own.forEach((n, i) => { all[n] = values[i] ?? null; });
  return all;
}

// The darkest colour is for the largest value of the tokens, or for `least` if that is larger.
function coloured(pieces, read, values, least, [, label, meaning]) {
  const known = values.filter((value) => value !== null), largest = Math.max(...known.map(Math.abs), least);
  const level = (value) => (value === null || largest === 0 ? 0 : Math.round((LEVELS * Math.abs(value)) / largest));
  const marks = pieces.map((piece, n) => {
    const value = values[n], says = read.has(n) ? "read, not written" : `${label} ${number(value)}`;
    return el("span", { class: read.has(n) ? "token read" : `token ${value > 0 ? "above" : "below"}-${level(value)}`, title: `token ${n + 1}: ${says}` }, visible(piece));
  });
  return [el("p", { class: "soft" }, `${label}: ${meaning}. `, ...scale(known, largest), " Point at a token for its value."), el("div", { class: "tokens", dir: "auto" }, marks)];
}

function scale(known, largest) {
  const mark = (sign, text) => el("span", { class: `token ${sign}-${LEVELS}` }, text);
  return [known.some((value) => value < 0) ? mark("below", `-${number(largest)}`) : null, " ", known.some((value) => value > 0) ? mark("above", `+${number(largest)}`) : null].filter(Boolean);
}

// A token of white space, or of a part of a character, has a sign that can be seen.
function visible(piece) {
  return piece === "" ? "\u00b7" : piece.replaceAll("\n", "\u21b5\n");
}
