// Attempts of a step by task: one cell an attempt. Filters go through one step, or through all of them from the newest.
import { get, go, link, run as of } from "./api.js";
import { duration, h, number, outcomeClass, outcomeSign, outcomeWords, OUTCOMES, percent, put, table } from "./dom.js";
import { isFrozen } from "./frozen.js";

const FILTERS = ["outcome", "task", "least", "most", "text"];

export async function showGroups(main, at) {
  const { stored } = await get(`${of(at.id)}/steps`, {}, at.signal);
  if (!stored.length) {
    put(main, h("h1", null, "Attempts"), h("p", { class: "card" }, "No attempts are stored yet. The first ones come with the first evaluation or step."));
    if (isFrozen) return;
    const timer = setTimeout(() => dispatchEvent(new HashChangeEvent("hashchange")), 3000);
    at.closing(() => clearTimeout(timer));
    return;
  }
  const params = { ...at.params };
  let place = stored.find((one) => one.stage === params.stage && one.phase === params.phase);
  if (!place) { place = [...stored].reverse().find((one) => one.phase === "train") || stored[stored.length - 1]; }
  const steps = place.steps, step = steps.includes(Number(params.step)) ? Number(params.step) : steps[steps.length - 1];
  const filters = Object.fromEntries(FILTERS.map((name) => [name, params[name] || ""]));
  const where = { stage: place.stage, phase: place.phase, step };
  const isSearch = params.all === "1";
  const to = (changes) => link("groups", at.id, { ...where, ...filters, all: params.all, ...changes });
  const result = h("div", { class: "result", role: "region", ariaLabel: "Attempts", "aria-live": "polite" });
  put(main,
    h("div", { class: "heading" }, h("h1", null, "Attempts"), h("p", { class: "soft" }, "Each cell is one attempt at the task. Open it to read every token.")),
    stepper(at, stored, place, steps, step, filters, params.all),
    filterForm(at, where, filters, isSearch),
    legend(), result);
  if (isSearch) await search(result, at, filters);
  else await page(result, at, where, filters, Number(params.offset) || 0, to);
}

function stepper(at, stored, place, steps, step, filters, all) {
  const i = steps.indexOf(step), to = (stage, phase, n) => link("groups", at.id, { stage, phase, step: n, ...filters, all });
  const stage = h("select", { ariaLabel: "Stage", onchange: (e) => { const one = stored[Number(e.target.value)]; location.hash = to(one.stage, one.phase, one.steps[one.steps.length - 1]); } },
    stored.map((one, k) => h("option", { value: k, selected: one === place }, `${one.phase === "eval" ? "evaluation" : "training"}, ${one.stage}`)));
  const move = (n, words) => (steps[n] === undefined ? h("span", { class: "button off", "aria-disabled": "true" }, words) : h("a", { class: "button", href: to(place.stage, place.phase, steps[n]), ariaLabel: words === "‹" ? "Previous step" : "Next step" }, words));
  const range = h("input", { type: "range", min: 0, max: steps.length - 1, value: i, ariaLabel: "Step", "aria-valuetext": `step ${step}`,
    oninput: (e) => { shown.textContent = `step ${steps[e.target.value]}`; }, onchange: (e) => { location.hash = to(place.stage, place.phase, steps[e.target.value]); } });
  const shown = h("output", null, `step ${step}`);
  return h("div", { class: "stepper card" }, stage, steps.length > 1 ? [move(i - 1, "‹"), range, move(i + 1, "›")] : null, shown);
}

function filterForm(at, where, filters, isSearch) {
  const field = (name, title, props) => h("label", null, h("span", null, title), h("input", { name, value: filters[name], ...props }));
  const form = h("form", { class: "filters card", role: "search", onsubmit: (event) => {
    event.preventDefault();
    const asked = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value).trim()]));
    const all = event.submitter && event.submitter.value === "all" ? "1" : "";
    location.hash = link("groups", at.id, { ...where, ...asked, all });
  } },
    h("label", null, h("span", null, "Outcome"), h("select", { name: "outcome" }, h("option", { value: "" }, "any"), Object.keys(OUTCOMES).map((name) => h("option", { value: name, selected: filters.outcome === name }, outcomeWords(name))))),
    field("task", "Task", { type: "search", placeholder: "part of its id" }),
    field("least", "Score from", { type: "number", step: "any" }),
    field("most", "to", { type: "number", step: "any" }),
    field("text", "Text", { type: "search", placeholder: "what was said or read" }),
    h("span", { class: "buttons" },
      h("button", { type: "submit", class: isSearch ? "" : "strong", value: "step" }, "This step"),
      h("button", { type: "submit", class: isSearch ? "strong" : "", value: "all" }, "All steps"),
      FILTERS.some((name) => filters[name]) || isSearch ? h("a", { class: "button", href: link("groups", at.id, where) }, "Clear") : null));
  return form;
}

function legend() {
  const seen = [["solved", "solved"], ["failed", "not solved"], ["turn_limit", "turn limit reached"], ["token_limit", "context full"], ["env_error", "error"]];
  return h("p", { class: "legend cells-legend" }, seen.map(([name, words]) => h("span", null, h("span", { class: `cell ${outcomeClass(name)}`, "aria-hidden": "true" }, outcomeSign(name)), words)));
}

async function page(box, at, where, filters, offset, to) {
  const found = await get(`${of(at.id)}/groups`, { ...where, ...filters, offset }, at.signal);
  const rows = found.groups.map((group) => h("tr", null,
    h("th", { scope: "row", class: "task" }, h("bdi", null, group.task_id)),
    h("td", { class: "cells", "data-title": "Attempts" }, group.attempts.map((attempt) => cell(at, where, attempt))),
    h("td", { class: "n", "data-title": "Solved" }, percent(group.solved)),
    h("td", { class: "n", "data-title": "Mean score" }, number(group.mean)),
    h("td", { class: "n", "data-title": "Spread" }, spread(group.spread)),
    h("td", { class: "n", "data-title": "Turns" }, number(group.turns)),
    h("td", { class: "n", "data-title": "Seconds" }, number(group.seconds))));
  const count = `${found.n_found.toLocaleString("en")} of ${found.n_attempts.toLocaleString("en")} attempts, ${found.n_groups.toLocaleString("en")} tasks`;
  put(box, h("p", { class: "soft count" }, count),
    rows.length ? table("Attempts by task", [{ title: "Task" }, { title: "Attempts" }, { title: "Solved", n: true }, { title: "Mean score", n: true }, { title: "Spread", n: true }, { title: "Turns", n: true }, { title: "Seconds", n: true }], rows, { class: "groups cards" })
      : h("p", { class: "card" }, "No attempt of this step matches. ", h("a", { href: to({ all: "1" }) }, "Search all steps")),
    found.n_groups > found.page ? h("nav", { class: "pager", ariaLabel: "Pages" },
      offset ? h("a", { class: "button", href: to({ offset: Math.max(0, offset - found.page) || "" }) }, "‹ previous") : null,
      h("span", { class: "soft" }, `tasks ${offset + 1} to ${Math.min(offset + found.page, found.n_groups)} of ${found.n_groups}`),
      offset + found.page < found.n_groups ? h("a", { class: "button", href: to({ offset: offset + found.page }) }, "next ›") : null) : null);
  arrows(box);
}

// A group without spread teaches nothing: said in words, not by colour alone.
function spread(value) {
  return value === 0 ? h("span", { class: "soft", title: "All attempts scored the same: comparing them teaches nothing." }, "none") : number(value);
}

function cell(at, where, attempt) {
  const words = `attempt ${attempt.attempt}: ${outcomeWords(attempt.outcome)}${attempt.score === null ? "" : `, score ${number(attempt.score)}`}, ${attempt.n_turns} turns, ${duration(attempt.duration_s)}`;
  return h("a", { class: `cell ${outcomeClass(attempt.outcome)}${attempt.found ? "" : " other"}`, href: link("attempt", at.id, { ...where, row: attempt.row }), title: words, ariaLabel: words }, outcomeSign(attempt.outcome));
}

// Arrow keys walk over the cells.
function arrows(box) {
  const cells = [...box.querySelectorAll("a.cell")];
  box.addEventListener("keydown", (event) => {
    const i = cells.indexOf(document.activeElement);
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (i < 0 || !move || !cells[i + move]) return;
    event.preventDefault();
    cells[i + move].focus();
  });
}

async function search(box, at, filters, cursor = -1, rows = []) {
  const enough = rows.length + 60;
  let left = cursor, total = 0;
  put(box, h("p", { class: "soft" }, "Searching…"));
  do {
    const found = await get(`${of(at.id)}/search`, { ...filters, cursor: left }, at.signal);
    rows.push(...found.hits.map((hit) => hitRow(at, hit)), ...found.problems.map((problem) => h("tr", { class: "problem" }, h("td", { colSpan: 6 }, problem))));
    [left, total] = [found.cursor, found.n_files];
    const more = left === null ? null : rows.length < enough ? "Searching…" : h("button", { type: "button", onclick: () => search(box, at, filters, left, rows).catch(() => {}) }, "Search older steps");
    put(box, h("p", { class: "soft count" }, `${rows.length} found in ${total - (left || 0)} of ${total} files, newest first. `, more),
      rows.length ? hits(rows) : left === null ? h("p", { class: "card" }, "No stored attempt matches.") : null);
  } while (left !== null && rows.length < enough);
}

function hits(rows) {
  return table("Attempts found", [{ title: "Attempt" }, { title: "Where" }, { title: "Score", n: true }, { title: "Turns", n: true }, { title: "Task" }, { title: "Found" }], rows, { class: "groups cards" });
}

export function hitRow(at, hit) {
  return h("tr", null,
    h("td", { "data-title": "Attempt", class: "cells" }, cell(at, { stage: hit.stage, phase: hit.phase, step: hit.step }, { ...hit, found: true })),
    h("td", { "data-title": "Where" }, `${hit.phase === "eval" ? hit.stage : `step ${hit.step}`}`),
    h("td", { class: "n", "data-title": "Score" }, number(hit.score)), h("td", { class: "n", "data-title": "Turns" }, hit.n_turns),
    h("th", { scope: "row", class: "task" }, h("bdi", null, hit.task_id)), h("td", { class: "around", "data-title": "Found" }, h("bdi", null, hit.around || hit.detail)));
}
