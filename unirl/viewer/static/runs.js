// The list of runs: search, state, reward; several can be chosen to be compared.
import { get } from "./api.js";
import { badge, counted, duration, el, field, number } from "./dom.js";

export async function show({ main, signal, poll, wanted }) {
  const chosen = new Set();
  let search = wanted.search ?? "", content = await get("/api/runs", {}, signal);
  const body = el("tbody", {});
  const compare = el("button", { type: "button", disabled: true, onclick: () => { location.hash = `#/compare?runs=${[...chosen].join(",")}`; } }, "Compare");
  const count = el("p", { class: "soft" });
  const input = el("input", { type: "search", value: search, placeholder: "name, recipe or state", oninput: (event) => { search = event.target.value; draw(); } });

  function choose(id, box) {
    if (chosen.has(id)) chosen.delete(id);
    else chosen.add(id);
    box.checked = chosen.has(id);
    box.closest("tr").classList.toggle("selected", box.checked);
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
  }

  function row(run) {
    const open = `#/run/${run.id}`;
    const box = el("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, checked: chosen.has(run.id), onchange: () => choose(run.id, box) });
    const change = run.first_reward === null ? "" : `${number(run.first_reward)} -> ${number(run.last_reward)}`;
    const made = el("tr", { "data-item": true, "data-run": run.id, tabindex: 0, class: chosen.has(run.id) ? "selected" : null },
      el("td", {}, box), el("td", { class: "name" }, el("a", { href: open }, run.name), el("div", { class: "soft" }, run.recipe, run.scale === "toy" ? " (toy)" : "")),
      el("td", {}, badge(run.status, run.code), run.alarms ? el("div", { class: "warn", title: "The page of the run lists its alarms." }, counted(run.alarms, "alarm")) : null), el("td", { class: "number" }, `${run.steps}/${run.total_steps ?? "?"}`),
      el("td", { class: "number" }, change), el("td", { class: "number phone-hidden" }, duration(run.age_s)));
    made.addEventListener("keydown", (event) => {
      if (event.target !== made) return;
      if (event.key === "Enter") location.hash = open;
      if (event.key === " ") {
        event.preventDefault();
        choose(run.id, box);
      }
    });
    return made;
  }

  function draw() {
    const words = search.toLowerCase().split(/\s+/);
    const found = content.runs.filter((run) => words.every((word) => `${run.path} ${run.recipe} ${run.status}`.toLowerCase().includes(word)));
    const focused = document.activeElement?.dataset?.run;
    body.replaceChildren(...found.map(row));
    if (focused) body.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
    count.textContent = `${found.length} of ${content.runs.length} runs in ${content.folders.join(", ")}`;
  }

  main.replaceChildren(...[el("h1", {}, "Runs"), el("div", { class: "bar" }, field("Search", input), compare), count,
    content.runs.length ? null : el("p", { class: "notice" }, "No run yet. Start one: unirl quickstart"),
    el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {},
      el("th", { scope: "col" }, "Compare"), el("th", { scope: "col" }, "Run"), el("th", { scope: "col" }, "State"),
      el("th", { scope: "col", class: "number" }, "Steps"), el("th", { scope: "col", class: "number" }, "Reward"),
      el("th", { scope: "col", class: "number phone-hidden" }, "Age"))), body))].filter(Boolean));
  draw();
  poll(async () => {
    const newer = await get("/api/runs", {}, signal);
    if (JSON.stringify(newer.runs.map(({ age_s, ...rest }) => rest)) !== JSON.stringify(content.runs.map(({ age_s, ...rest }) => rest))) {
      content = newer;
      draw();
    }
  }, 5000);
}
