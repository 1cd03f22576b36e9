// Charts of columns over the steps: lines with a band of their spread, and stacked areas.
import uPlot from "./uplot-1.6.32.js";
import { el, number } from "./dom.js";

// Okabe and Ito's palette, in which people with any common colour blindness can tell lines apart.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999"];
const HEIGHT = 220;
const WHOLE = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((first) => first * 10 ** power));
const charts = new Set();

const height = (large) => (large ? HEIGHT * 1.35 : HEIGHT);
export const colour = (index) => COLOURS[index % COLOURS.length];

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name) || "gray";
}

function probe(variable) {
  // light-dark() is computed only on a property that is a colour.
  const spot = el("span", {});
  spot.style.color = `var(${variable})`;
  document.body.append(spot);
  const found = getComputedStyle(spot).color;
  spot.remove();
  return found || ink(variable);
}

function axes(label) {
  const stroke = probe("--soft"), grid = { stroke: probe("--line"), width: 1 };
  return [{ stroke, grid, ticks: grid, label, labelSize: 18, size: 34, incrs: WHOLE },
    { stroke, grid, ticks: grid, size: 62, values: (u, values) => values.map((value) => (value === null ? "" : compact(value))) }];
}

function compact(value) {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(1) : String(Number(value.toPrecision(4)));
}

// A figure that holds a chart. `lines` are {label, values, spread?, colour?}; with `stacked` each lies on the one before.
export function chart({ title, meaning = "", x, xLabel = "step", lines, stacked = false, large = false, dashed = [] }) {
  const place = el("div", {});
  const last = lines.map((line) => `${line.label} ${number(line.values.findLast((value) => value !== null) ?? null)}`);
  const figure = el("figure", { class: large ? "large" : null, "data-chart": title },
    el("figcaption", {}, title, meaning ? el("span", {}, meaning) : null), place);
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", `${title} over ${xLabel}. Last: ${last.join(", ")}`);
  place.style.minHeight = `${height(large)}px`;
  const made = { figure, place, plot: null, draw: null };
  made.draw = () => {
    made.plot?.destroy();
    made.plot = new uPlot(options(place.clientWidth || 400, large, x, xLabel, lines, stacked, dashed), data(x, lines, stacked), place);
  };
  waiting.set(place, made);
  near.observe(place);
  return figure;
}

// Charts are drawn when they come near the window, since a long page has far more of them than it shows.
const waiting = new WeakMap();
const near = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach(({ target }) => show(target)), { rootMargin: "200px" });

function show(place) {
  near.unobserve(place);
  charts.add(waiting.get(place));
  waiting.get(place).draw();
}

// Paper shows the whole page.
window.addEventListener("beforeprint", () => document.querySelectorAll("[data-chart] > [role=img]").forEach((place) => {
  if (waiting.has(place) && !charts.has(waiting.get(place))) show(place);
}));

function data(x, lines, stacked) {
  if (!stacked) {
    return [x, ...lines.flatMap((line) => {
      if (!line.spread) return [line.values];
      const band = (sign) => line.values.map((value, i) => (value === null || line.spread[i] === null ? null : value + sign * line.spread[i]));
      return [line.values, band(1), band(-1)];
    })];
  }
  const sums = x.map(() => 0);
  return [x, ...lines.map((line) => line.values.map((value, i) => (sums[i] += value ?? 0)))];
}

function options(width, large, x, xLabel, lines, stacked, dashed) {
  const series = [{ label: xLabel, value: (u, value) => (value === null ? "-" : number(value)) }], bands = [];
  lines.forEach((line, i) => {
    const stroke = line.colour ?? colour(i);
    const points = { show: !stacked && line.values.length <= 60, size: 5 };
    const own = series.length;
    const value = stacked
      ? (u, _, seriesIndex, at) => number(at === null ? null : line.values[at])
      : (u, shown, _, at) => number(shown) + (line.spread && typeof line.spread[at] === "number" ? ` +- ${number(line.spread[at])}` : "");
    series.push({ label: line.label, stroke, width: stacked ? 1 : 2, points, value, spanGaps: true, dash: dashed.includes(line.label) ? [6, 4] : undefined,
      fill: stacked && i === 0 ? `${stroke}99` : undefined });
    if (stacked && i > 0) bands.push({ series: [own, own - 1], fill: `${stroke}99` });
    if (!stacked && line.spread) {
      const edge = { class: "edge", stroke: "transparent", width: 0, points: { show: false }, spanGaps: true, value: (u, shown) => number(shown) };
      series.push({ ...edge, label: "+ spread" }, { ...edge, label: "- spread" });
      bands.push({ series: [own + 1, own + 2], fill: `${stroke}33` });
    }
  });
  const single = x.length === 1 ? { range: () => [x[0] - 1, x[0] + 1] } : {};
  return { width, height: height(large), series, bands, axes: axes(xLabel), scales: { x: { time: false, ...single }, y: { range: stacked ? (u, low, high) => [0, high || 1] : around } },
    cursor: { drag: { x: true, y: false } }, legend: { live: true } };
}

// The values that an axis shows: a little more than those of the lines, also if these are all equal.
function around(u, low, high) {
  if (low === null) return [0, 1];
  const margin = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [low - margin, high + margin];
}

// Redraws all charts of the page: after its width or its colours changed.
export function redraw() {
  for (const made of charts) {
    if (!made.place.isConnected) charts.delete(made);
    else made.draw();
  }
}

let pending = 0;
window.addEventListener("resize", () => {
  clearTimeout(pending);
  pending = setTimeout(redraw, 150);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
