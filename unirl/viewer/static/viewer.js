// The frame of all pages: which one an address shows, keys, theme.
import { el, say } from "./dom.js";
import { redraw } from "./charts.js";
import * as runs from "./runs.js";
import * as run from "./run.js";
import * as gallery from "./gallery.js";
import * as pairs from "./pairs.js";
import * as sample from "./sample.js";
import * as episodes from "./episodes.js";
import * as config from "./config.js";
import * as compare from "./compare.js";
import * as system from "./system.js";

const OF_RUN = { "": run, gallery, pairs, sample, episodes, config, system };
const NAMES = [["", "Run"], ["gallery", "Gallery"], ["pairs", "Before and after"], ["config", "Settings"], ["system", "System"]];
const main = document.getElementById("main");
let leave = new AbortController();
let onKey = null;

function route() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const [first = "", id = "", page = ""] = path.split("/").slice(1).map(decodeURIComponent);
  const wanted = Object.fromEntries(new URLSearchParams(query));
  if (first === "run" && id && Object.hasOwn(OF_RUN, page)) return { view: OF_RUN[page], id, page, wanted };
  if (first === "compare") return { view: compare, id: "", page: "compare", wanted };
  return { view: runs, id: "", page: "runs", wanted };
}

function navigation({ id, page, wanted }) {
  const link = (href, text, here) => el("a", { href, "aria-current": here ? "page" : null }, text);
  const parts = [link("#/", "Runs", page === "runs")];
  if (id) parts.push(...NAMES.map(([name, text]) => link(`#/run/${id}${name ? `/${name}` : ""}`, text, page === name)));
  if (page === "episodes") parts.push(link(`#/run/${id}/episodes`, "Episodes", true));
  if (page === "compare") parts.push(link(`#/compare?runs=${wanted.runs ?? ""}`, "Compare", true));
  document.getElementById("pages").replaceChildren(...parts);
}

async function show() {
  leave.abort();
  leave = new AbortController();
  const signal = leave.signal, here = route();
  onKey = null;
  navigation(here);
  main.replaceChildren(el("p", { class: "soft" }, "Loading ..."));
  main.setAttribute("aria-busy", "true");
  const context = { main, signal, id: here.id, wanted: here.wanted, keys: (handler) => { onKey = handler; }, poll: (body, ms) => poll(body, ms, signal) };
  try {
    await here.view.show(context);
  } catch (error) {
    if (!signal.aborted) main.replaceChildren(el("p", { class: "notice bad", role: "alert" }, error.message));
  }
  if (!signal.aborted) main.removeAttribute("aria-busy");
}

// Calls `body` again and again until the page is left. A hidden page waits.
async function poll(body, ms, signal) {
  while (!signal.aborted) {
    await new Promise((resolve) => setTimeout(resolve, ms));
    if (signal.aborted || document.hidden) continue;
    try {
      if ((await body()) === false) return;
    } catch (error) {
      if (!signal.aborted) say(`The viewer does not answer: ${error.message}`);
    }
  }
}

function step(direction) {
  const items = [...main.querySelectorAll("[data-item]")];
  if (!items.length) return;
  const at = items.indexOf(document.activeElement.closest?.("[data-item]"));
  items[Math.min(Math.max(at + direction, 0), items.length - 1)].focus();
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "Escape" && typing) return event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    const search = main.querySelector("input[type=search]");
    if (search) {
      event.preventDefault();
      search.focus();
    }
  } else if (event.key === "?") document.getElementById("help").showModal();
  else if (onKey?.(event)) event.preventDefault();
  else if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
  else if (event.key === " " && !event.target.matches("button, summary, video")) {
    const within = event.target.closest("[data-item]") ?? (event.target.matches("a") ? null : main);
    const video = within?.querySelector("video");
    if (!video) return;
    event.preventDefault();
    if (video.paused) video.play();
    else video.pause();
  }
});

const THEMES = ["system", "light", "dark"];
const button = document.getElementById("theme");

function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  button.textContent = `Theme: ${name}`;
  localStorage.setItem("theme", name);
  redraw();
}

theme(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "system");
button.addEventListener("click", () => theme(THEMES[(THEMES.indexOf(localStorage.getItem("theme")) + 1) % THEMES.length]));
document.getElementById("keys").addEventListener("click", () => document.getElementById("help").showModal());
document.getElementById("close-help").addEventListener("click", () => document.getElementById("help").close());
window.addEventListener("hashchange", show);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
show();
