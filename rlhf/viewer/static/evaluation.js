// Evaluations with their intervals, and two of them task by task.
import { get, link, run as of } from "./api.js";
import { h, number, percent, put, s, table, within } from "./dom.js";

export async function showEvaluation(main, at) {
  const found = await get(of(at.id), {}, at.signal);
  const points = found.evaluations.filter((one) => typeof one.success === "number");
  const sides = found.stored.map((name) => ({ run: at.id, name, words: `${at.id}, ${name}` }));
  for (const other of at.runs.filter((run) => run.id !== at.id).slice(0, 12)) {
    const told = await get(`${of(other.id)}/steps`, {}, at.signal).catch(() => null);
    const names = told ? told.stored.filter((one) => one.phase === "eval").map((one) => one.stage) : [];
    sides.push(...names.map((name) => ({ run: other.id, name, words: `${other.id}, ${name}` })));
  }
  const result = h("section", { "aria-live": "polite" });
  put(main, h("div", { class: "heading" }, h("h1", null, "Evaluation"), h("p", { class: "soft" }, "Success on unseen tasks, with 95% intervals.")),
    points.length ? bars(points) : h("p", { class: "card" }, "This run has not been evaluated yet."),
    sides.length > 1 ? chooser(at, sides) : null, result);
  if (sides.length < 2) return;
  put(result, h("p", { class: "soft" }, "Comparing…"));
  const { first, second } = chosen(at, sides);
  const told = await get("compare", { first: `${first.run}:${first.name}`, second: `${second.run}:${second.name}` }, at.signal);
  comparison(result, at, first, second, told);
}

function chosen(at, sides) {
  const own = sides.filter((one) => one.run === at.id), pick = (text, fallback) => sides.find((one) => `${one.run}:${one.name}` === text) || fallback;
  const other = at.params.other ? sides.filter((one) => one.run === at.params.other).pop() : null;
  const first = pick(at.params.first, other ? own[own.length - 1] || sides[0] : own[0] || sides[0]);
  return { first, second: pick(at.params.second, other || (own.length > 1 ? own[own.length - 1] : sides.find((one) => one !== first))) };
}

function chooser(at, sides) {
  const { first, second } = chosen(at, sides);
  const select = (name, value, words) => h("label", null, h("span", null, words), h("select", { name, onchange: (e) => {
    const next = { first: `${first.run}:${first.name}`, second: `${second.run}:${second.name}` };
    next[name] = e.target.value;
    location.hash = link("evaluation", at.id, next);
  } }, sides.map((one) => h("option", { value: `${one.run}:${one.name}`, selected: one === value }, one.words))));
  return h("div", { class: "filters card" }, h("h2", null, "Task by task"), select("first", first, "From"), select("second", second, "to"));
}

function bars(points) {
  return table("Evaluations", [{ title: "Evaluation" }, { title: "Success", n: true }, { title: "95% interval" }, { title: "Episodes", n: true }, { title: "Failed parts", n: true }],
    points.map((one) => h("tr", null, h("th", { scope: "row" }, one.name), h("td", { class: "n big", "data-title": "Success" }, percent(one.success)), h("td", { "data-title": "95% interval", class: "interval" }, interval(one)), h("td", { class: "n", "data-title": "Episodes" }, number(one.n, 9)), h("td", { class: "n", "data-title": "Failed parts" }, number(one.n_errors, 9)))), { class: "evaluations cards" });
}

function interval(one) {
  if (typeof one.low !== "number") return "–";
  const x = (v) => 4 + 292 * v;
  return [s("svg", { viewBox: "0 0 300 22", class: "whisker", role: "img", "aria-label": within(one.low, one.high) },
    s("line", { x1: 4, x2: 296, y1: 11, y2: 11, class: "rail" }), s("line", { x1: x(one.low), x2: x(one.high), y1: 11, y2: 11, class: "reach" }), s("circle", { cx: x(one.success), cy: 11, r: 5.5, class: "point" })),
  h("span", { class: "soft" }, `${percent(one.low)} to ${percent(one.high)}`)];
}

function comparison(box, at, first, second, told) {
  if (told.problem) { put(box, h("p", { class: "card" }, told.problem)); return; }
  const points = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${(100 * Math.abs(value)).toFixed(1)}`;
  const isClear = told.low > 0 || told.high < 0;
  const tile = (title, figure, words) => h("div", { class: "card tile" }, h("h3", null, title), h("p", { class: "figure" }, figure), h("div", { class: "words" }, words));
  put(box, h("div", { class: "tiles" },
    tile("Difference", `${points(told.difference)} points`, `95% interval ${points(told.low)} to ${points(told.high)}`),
    tile("Is it chance?", isClear ? "Hardly" : "It may be", `p ${told.p_value < 0.001 ? "< 0.001" : number(told.p_value, 2)}, ${told.test === "mcnemar" ? "McNemar's test" : "permutation test"} on ${told.n} tasks`),
    tile("Better", String(told.n_better), "tasks"), tile("Worse", String(told.n_worse), told.n_unpaired ? `tasks; ${told.n_unpaired} were in one evaluation alone` : "tasks")),
  told.flipped.length ? table("Tasks that flipped", [{ title: "Task" }, { title: `${first.words}`, n: true }, { title: `${second.words}`, n: true }, { title: "Read" }], told.flipped.map((one) => h("tr", null,
    h("th", { scope: "row", class: "task" }, h("bdi", null, one.task)), h("td", { class: `n ${one.first > one.second ? "better" : "worse"}`, "data-title": first.words }, percent(one.first)), h("td", { class: `n ${one.second > one.first ? "better" : "worse"}`, "data-title": second.words }, percent(one.second)),
    h("td", null, h("a", { href: link("groups", first.run, { stage: first.name, phase: "eval", task: one.task }) }, "first"), " · ", h("a", { href: link("groups", second.run, { stage: second.name, phase: "eval", task: one.task }) }, "second")))), { showCaption: true, class: "flips cards" }) : h("p", { class: "soft" }, "No task flipped."));
}
