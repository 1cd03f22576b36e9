// Builds the page. Every text becomes a text node, so nothing in a prompt, a name or a setting can act as markup.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 10 ** -digits || size >= 1e6) ? value.toExponential(2) : value.toFixed(digits);
}

export const counted = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * size) return `${(seconds / size).toFixed(1)} ${unit}`;
  }
  return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}

// Pairs of name and value, each with a sentence that says what it means if it needs one.
export function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined)
    .map(([name, value, meaning]) => el("div", { title: meaning }, el("dt", {}, name), el("dd", {}, value))));
}

export function table(heads, rows, numeric = []) {
  const kind = (column) => (numeric.includes(column) ? "number" : null);
  return el("div", { class: "wide" }, el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", { scope: "col", class: kind(i) }, head)))),
    el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell, i) => el("td", { class: kind(i) }, cell)))))));
}

const TONES = { running: "good", finished: "good", stalled: "warn", stopped: "warn", failed: "bad", lost: "bad", unknown: "bad" };
const STATES = {
  running: "The run makes progress.",
  stalled: "The process of the run is alive, but it has made no progress for a while.",
  finished: "The run has made all of its steps.",
  stopped: "The run was stopped on request, and can be resumed.",
  failed: "The run ended with an error.",
  lost: "The process of the run is gone, and it left no record of its end: it was killed, or its machine stopped.",
  unknown: "The record of the run (run.json) cannot be read.",
};

export function badge(status, code) {
  return el("span", { class: `badge ${TONES[status] ?? ""}`, title: STATES[status] }, status === "failed" && code !== null ? `failed (${code})` : status);
}

export function problems(list) {
  if (!list.length) return null;
  return el("details", { class: "notice", open: list.length < 4 },
    el("summary", {}, `${list.length} ${list.length === 1 ? "file" : "files"} of this run could not be read whole`),
    el("ul", {}, list.map((text) => el("li", {}, text))));
}

export function say(text) {
  document.getElementById("said").textContent = text;
}

export function field(label, control) {
  return el("label", {}, label, control);
}

export function select(options, chosen, onchange, attributes = {}) {
  return el("select", { ...attributes, onchange }, options.map(([value, text]) =>
    el("option", { value, selected: String(value) === String(chosen) }, text)));
}
