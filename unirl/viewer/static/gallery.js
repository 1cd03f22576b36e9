// The stored samples of a run. Only tiles near the window exist, and only their parts of the list are asked for.
import { get, mediaAddress, sampleLink } from "./api.js";
import { el, field, number, say, select } from "./dom.js";
import { head, list, put, reload } from "./head.js";

const PART = 60, MOST_ASKED = 3, GAP = 10, SMALLEST = 170, KEPT_PARTS = 40, TYPING_MS = 300;
const FILTERS = ["kind", "first_step", "last_step", "prompt", "score", "low", "high", "order"];

export async function show(context) {
  const { main, id, signal, wanted, keys } = context;
  const filter = Object.fromEntries(FILTERS.map((name) => [name, wanted[name] ?? ""]));
  const ask = (own) => get(`/api/runs/${id}/samples`, { ...filter, limit: PART }, own);
  const [run, first] = await Promise.all([get(`/api/runs/${id}`, {}, signal), ask(signal)]);
  const results = el("div", {}), count = el("p", { class: "soft", "data-count": true });
  let found = first, view = null, leave = new AbortController();
  // Shows what the filter finds. The controls stay as they are, so that typing goes on.
  async function fill(answer) {
    leave.abort();
    leave = new AbortController();
    const own = AbortSignal.any([signal, leave.signal]), place = el("div", { class: "gallery", role: "list", "aria-label": "Samples" });
    const tell = () => { count.textContent = `${found.total} of ${found.indexed} stored samples${found.complete ? "" : ", reading on ..."}`; };
    try {
      found = answer ?? await ask(own);
      results.replaceChildren(place);
      view = new Tiles(place, id, { ...filter }, found, own);
      tell();
      view.draw();
      while (!found.complete) {  // The server reads the newest steps first.
        found = await ask(own);
        tell();
        view.update(found);
      }
      if (!found.total) place.before(el("p", { class: "notice" }, found.indexed ? "No sample fits this filter." : "This run has stored no samples yet."));
    } catch (error) {
      if (!own.aborted) count.textContent = error.message;
    }
  }
  const apply = () => {
    if (signal.aborted) return;
    history.replaceState(null, "", `#/run/${id}/gallery?${new URLSearchParams(Object.entries(filter).filter(([, value]) => value !== ""))}`);
    fill();
  };
  put(main, head(context, run, "Gallery"), list(first.problems), controls(id, filter, first, apply), count, results);
  let asked = 0;
  const later = () => { asked ||= requestAnimationFrame(() => { asked = 0; view.draw(); }); };
  window.addEventListener("scroll", later, { signal, passive: true });
  window.addEventListener("resize", () => { view.measure(); later(); }, { signal });
  keys((event) => {
    if (event.key === "j" || event.key === "k") view.move(event.key === "j" ? 1 : -1);
    else if (event.key === "Enter" && view.at !== null) view.open();
    else if (event.key === " ") return view.play();
    else return false;
    return true;
  });
  await fill(first);
  context.poll(async () => {
    const shown = view, newer = await get(`/api/runs/${id}/samples`, { ...shown.filter, limit: 0 }, signal);
    if (shown === view && found.complete && newer.total > found.total && !count.querySelector("button")) {
      count.append(" ", el("button", { type: "button", onclick: reload }, "Show newer samples"));
    }
  }, 4000);
}

// The fields of the filter. What is typed counts after a pause.
function controls(id, filter, found, apply) {
  let pending = 0;
  const go = (name, pause = 0) => (event) => {
    filter[name] = event.target.value;
    clearTimeout(pending);
    pending = setTimeout(apply, pause);
  };
  const numeric = (name, label, step) => field(label, el("input", { type: "number", step, value: filter[name], oninput: go(name, TYPING_MS) }));
  const steps = [...new Set([...found.steps.samples, ...found.steps.eval])].sort((a, b) => a - b);
  const options = (any) => [["", any], ...steps.map((step) => [step, step])];
  return el("form", { class: "bar", role: "search", onsubmit: (event) => event.preventDefault() },
    field("Prompt has", el("input", { type: "search", value: filter.prompt, oninput: go("prompt", TYPING_MS) })),
    field("From", select([["", "training and held out"], ["samples", "training"], ["eval", "held out"]], filter.kind, go("kind"))),
    field("First step", select(options("first"), filter.first_step, go("first_step"))),
    field("Last step", select(options("last"), filter.last_step, go("last_step"))),
    field("Score", select([["", "reward"], ...found.scores.map((name) => [name, name])], filter.score, go("score"))),
    numeric("low", "At least", "any"), numeric("high", "At most", "any"),
    field("Order", select([["", "newest first"], ["best", "highest score first"], ["worst", "lowest score first"]], filter.order, go("order"))),
    el("a", { href: `#/run/${id}/gallery` }, "Reset"));
}

class Tiles {
  constructor(place, id, filter, first, signal) {
    Object.assign(this, { place, id, filter, signal, total: first.total, size: first.size, at: null });
    this.parts = new Map([[0, first.rows]]);
    this.asked = new Set();
    this.nodes = new Map();
    this.isText = first.rows.length > 0 && first.rows.every((row) => !row.has_file);
    this.measure();
  }

  measure() {
    const width = this.place.clientWidth;
    this.columns = Math.max(Math.floor((width + GAP) / ((this.isText ? 1.6 * SMALLEST : SMALLEST) + GAP)), width < 380 ? 1 : 2);
    this.width = (width - GAP * (this.columns - 1)) / this.columns;
    this.height = this.isText ? 240 : this.width + 52;
    this.place.style.height = `${Math.ceil(this.total / this.columns) * (this.height + GAP)}px`;
    for (const node of this.nodes.values()) node.remove();
    this.nodes.clear();
  }

  // Takes a longer list. Tiles whose sample is elsewhere in it are made again.
  update(found) {
    const place = (row) => row && `${row.kind} ${row.step} ${row.row}`;
    const before = this.parts.get(0) ?? [];
    const stays = found.rows.every((row, n) => n >= before.length || place(row) === place(before[n]));
    Object.assign(this, { total: found.total, size: found.size, parts: new Map([[0, found.rows]]) });
    if (stays) this.place.style.height = `${Math.ceil(this.total / this.columns) * (this.height + GAP)}px`;
    else this.measure();
    this.draw();
  }

  // Makes the tiles that are in or near the window, and removes the others.
  draw() {
    const top = -this.place.getBoundingClientRect().top, line = this.height + GAP;
    const from = Math.max(Math.floor(top / line) - 2, 0) * this.columns;
    const to = Math.min(Math.ceil((top + window.innerHeight) / line + 2) * this.columns, this.total);
    for (const [n, node] of this.nodes) {
      if (n < from || n >= to) {
        node.remove();
        this.nodes.delete(n);
      }
    }
    const made = document.createDocumentFragment();
    for (let n = from; n < to; n++) {
      if (this.nodes.has(n)) continue;
      const row = this.parts.get(Math.floor(n / PART))?.[n % PART];
      if (!row) this.ask(Math.floor(n / PART));
      else {
        const node = this.tile(row, n);
        this.nodes.set(n, node);
        made.append(node);
      }
    }
    this.place.append(made);
  }

  async ask(part) {
    // Of the parts that fast scrolling passes, few are asked for: after each answer, those that are near the window then.
    if (this.asked.has(part) || this.asked.size >= MOST_ASKED) return;
    this.asked.add(part);
    try {
      const found = await get(`/api/runs/${this.id}/samples`, { ...this.filter, offset: part * PART, limit: PART, size: this.size }, this.signal);
      this.parts.set(part, found.rows);
      while (this.parts.size > KEPT_PARTS) this.parts.delete(this.parts.keys().next().value);
    } catch (error) {
      if (!this.signal.aborted) say(error.message);
      return;
    } finally {
      this.asked.delete(part);
    }
    this.draw();
  }

  tile(row, n) {
    const scores = Object.entries(row.rewards).slice(0, 2).map(([name, value]) => `${name} ${number(value, 2)}`).join(", ");
    const node = el("a", { class: n === this.at ? "tile selected" : "tile", href: sampleLink(this.id, row), role: "listitem", "data-number": n, title: row.rewrite || row.prompt },
      el("div", { class: "frame" }, medium(this.id, row)),
      el("div", { class: "caption" }, el("span", { class: "prompt" }, row.prompt || row.group_id), el("span", { class: "score" }, el("b", {}, number(row.reward)), " ",
        el("span", { class: "soft" }, `${row.kind === "eval" ? "held out" : "step"} ${row.step}${row.weight === 0 ? ", weight 0" : ""}`, scores ? ` - ${scores}` : ""))));
    const column = n % this.columns;
    node.style.width = `${this.width}px`;
    node.style.height = `${this.height}px`;
    node.style.transform = `translate(${column * (this.width + GAP)}px, ${Math.floor(n / this.columns) * (this.height + GAP)}px)`;
    return node;
  }

  move(by) {
    this.at = Math.min(Math.max(this.at === null ? 0 : this.at + by, 0), Math.max(this.total - 1, 0));
    const line = this.height + GAP, top = this.place.getBoundingClientRect().top + window.scrollY + Math.floor(this.at / this.columns) * line;
    if (top < window.scrollY + 70 || top + line > window.scrollY + window.innerHeight) window.scrollTo(0, top - window.innerHeight / 3);
    this.draw();
    for (const [n, node] of this.nodes) node.classList.toggle("selected", n === this.at);
    this.nodes.get(this.at)?.focus({ preventScroll: true });
  }

  open() {
    const row = this.parts.get(Math.floor(this.at / PART))?.[this.at % PART];
    if (row) location.hash = sampleLink(this.id, row);
  }

  play() {
    const video = this.nodes.get(this.at)?.querySelector("video");
    if (!video) return false;
    if (video.paused) video.play();
    else video.pause();
    return true;
  }
}

// The image, the video, or the text of a sample.
export function medium(run, row, { large = false } = {}) {
  if (row.has_mp4) {
    return el("video", { src: mediaAddress(run, row, "mp4"), loop: true, muted: true, autoplay: !large, playsinline: true, controls: large, preload: "metadata",
      "aria-label": `video of: ${row.prompt}` });
  }
  if (row.has_file) {
    const image = el("img", { src: mediaAddress(run, row), alt: `${row.medium} of: ${row.prompt}`, decoding: "async", draggable: "false" });
    image.addEventListener("load", () => image.classList.toggle("large", image.naturalWidth >= 160));
    image.addEventListener("error", () => image.replaceWith(el("span", { class: "soft" }, "cannot be shown")));
    return image;
  }
  return el("div", { class: "text", dir: "auto" }, row.text || (row.medium === "text" ? "(empty)" : "no file was stored"));
}
