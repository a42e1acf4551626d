// Evaluations: figures with their intervals, the hardest tasks, two of them task by task, and how far judges can be believed.
import { get, link, run as of } from "./api.js";
import { Chart, COLOURS } from "./charts.js";
import { h, number, percent, put, s, table, within } from "./dom.js";

export async function showEvaluation(main, at) {
  const found = await get(of(at.id), {}, at.signal);
  const points = found.evaluations.filter((one) => typeof one.success === "number");
  const sides = found.stored.map((name) => side(at.id, name));
  const asked = [at.params.other, ...[at.params.first, at.params.second].map((text) => (text || "").split(":")[0])];
  const others = at.runs.filter((run) => run.id !== at.id).sort((a, b) => asked.includes(b.id) - asked.includes(a.id));
  for (const other of others.slice(0, 12)) {
    const told = await get(of(other.id), {}, at.signal).catch(() => null);
    sides.push(...(told ? told.stored : []).map((name) => side(other.id, name)));
  }
  const figures = h("section", { class: "figures" }), result = h("section", { "aria-live": "polite" }), judges = h("section");
  put(main, h("div", { class: "heading" }, h("h1", null, "Evaluation"), h("p", { class: "soft" }, "Success on unseen tasks, with 95% intervals.")),
    points.length ? bars(at, found.stored, points) : found.stored.length ? null : h("p", { class: "card" }, "This run has not been evaluated yet."),
    figures, sides.length > 1 ? chooser(at, sides) : null, result, judges);
  if (sides.length > 1) {
    put(result, h("p", { class: "soft" }, "Comparing…"));
    const { first, second } = chosen(at, sides);
    const pair = { first: `${first.run}:${first.name}`, second: `${second.run}:${second.name}` };
    const told = await get("compare", pair, at.signal).catch((error) => ({ problem: error.message }));
    comparison(result, at, first, second, told);
  }
  if (found.stored.length) drawFigures(figures, at, await get(`${of(at.id)}/evaluation`, { name: at.params.name || "" }, at.signal), found.stored);
  drawJudges(judges, at, await get(`${of(at.id)}/judges`, {}, at.signal));
}

const side = (run, name) => ({ run, name, words: name ? `${run}, ${name}` : run });

function chosen(at, sides) {
  const own = sides.filter((one) => one.run === at.id), pick = (text, fallback) => sides.find((one) => `${one.run}:${one.name}` === text) || fallback;
  const other = at.params.other ? sides.filter((one) => one.run === at.params.other).pop() : null;
  const first = pick(at.params.first, other ? own[own.length - 1] || sides[0] : own[0] || sides[0]);
  return { first, second: pick(at.params.second, other || (own.length > 1 ? own[own.length - 1] : sides.find((one) => one !== first))) };
}

function chooser(at, sides) {
  const { first, second } = chosen(at, sides);
  const select = (name, value, words) => h("label", null, h("span", null, words), h("select", { name, onchange: (e) => {
    const next = { name: at.params.name, first: `${first.run}:${first.name}`, second: `${second.run}:${second.name}` };
    next[name] = e.target.value;
    location.hash = link("evaluation", at.id, next);
  } }, sides.map((one) => h("option", { value: `${one.run}:${one.name}`, selected: one === value }, one.words))));
  return h("div", { class: "filters card" }, h("h2", null, "Paired by task"), select("first", first, "Baseline"), select("second", second, "Candidate"));
}

function bars(at, stored, points) {
  return table("Evaluations", [{ title: "Evaluation" }, { title: "Success", n: true }, { title: "95% interval" }, { title: "Episodes", n: true }, { title: "Errors", n: true }],
    points.map((one) => h("tr", null, h("th", { scope: "row" }, stored.includes(one.name) ? h("a", { href: link("evaluation", at.id, { ...at.params, name: one.name }) }, one.name) : one.name),
      h("td", { class: "n big", "data-title": "Success" }, percent(one.success)), h("td", { "data-title": "95% interval", class: "interval" }, whisker(one.success, one.low, one.high)), h("td", { class: "n", "data-title": "Episodes" }, number(one.n, 9)), h("td", { class: "n", "data-title": "Errors" }, number(one.n_errors, 9)))), { class: "evaluations cards" });
}

// A share with its interval, drawn from 0 to 1.
export function whisker(value, low, high) {
  if (typeof low !== "number" || typeof value !== "number") return "–";
  const x = (v) => 8 + 284 * v;
  return [s("svg", { viewBox: "0 0 300 22", class: "whisker", role: "img", "aria-label": `${percent(value)}, ${within(low, high)}` },
    s("line", { x1: 8, x2: 292, y1: 11, y2: 11, class: "rail" }), s("line", { x1: x(low), x2: x(high), y1: 11, y2: 11, class: "reach" }), s("circle", { cx: x(value), cy: 11, r: 5.5, class: "point" })),
  h("span", { class: "soft" }, `${percent(low)} to ${percent(high)}`)];
}

// A row for each group of tasks; rewards have columns where there are several.
function groupTable(caption, title, groups) {
  const named = [...new Set(groups.flatMap(([, one]) => Object.keys(one.rewards || {})))], rewards = named.length > 1 ? named : [];
  const columns = [{ title }, { title: "Success", n: true }, { title: "95% interval" }, ...["Tasks", "Attempts", ...rewards, "Turns", "Errors"].map((one) => ({ title: one, n: true }))];
  const cell = (name, value, kind = "n") => h("td", { class: kind, "data-title": name }, value);
  return table(caption, columns, groups.map(([name, one]) => h("tr", null, h("th", { scope: "row", class: "task" }, h("bdi", null, name)),
    cell("Success", percent(one.success.value)), cell("95% interval", whisker(one.success.value, one.success.low, one.success.high), "interval"), cell("Tasks", one.n_tasks), cell("Attempts", one.success.n),
    rewards.map((reward) => cell(reward, number(one.rewards?.[reward]?.value))), cell("Turns", number(one.turns_mean)), cell("Errors", one.n_errors))), { showCaption: true, class: "cards", most: 20 });
}

function drawFigures(box, at, told, stored) {
  if (told.problem) { put(box, h("p", { class: "card" }, told.problem)); return; }
  const { success } = told, types = Object.entries(told.types).sort((a, b) => (a[1].success.value ?? 0) - (b[1].success.value ?? 0));
  const turns = new Chart({ title: "Solved within n actions", unit: "share of the attempts", share: true, wide: told.passes.length < 2, over: "actions", key: "actions" });
  const passes = new Chart({ title: "pass@k and pass^k", unit: "share of the tasks solved in one, or in all, of k attempts; 95% intervals", share: true, over: "k", key: "passes" });
  at.closing(() => { turns.close(); passes.close(); });
  put(box, h("div", { class: "heading" }, h("h2", null, [told.policy && `${told.policy} on ${told.suite}`, stored.length > 1 || told.name ? told.name : ""].filter(Boolean).join(", ") || "Figures"),
    h("p", { class: "soft" }, `success in ${told.success.n} attempts at ${told.n_tasks} tasks${told.n_errors ? `; ${told.n_errors} attempts ended in an error and are not counted` : ""}`)),
  told.name ? null : h("p", { class: "card hero" }, h("b", null, percent(success.value)), " ", whisker(success.value, success.low, success.high)),
  h("div", { class: "charts" }, turns.element, passes.element),
  types.length > 1 ? groupTable("By task type, hardest first", "Task type", types) : null,
  Object.entries(told.by).map(([column, groups]) => groupTable(`By ${column}`, column, Object.entries(groups))),
  told.hardest.length ? table("Hardest tasks", [{ title: "Task" }, { title: "Solved", n: true }, { title: "Attempts", n: true }, { title: "Score", n: true }, { title: "Turns", n: true }, { title: "Attempt" }],
    told.hardest.map((one) => h("tr", null, h("th", { scope: "row", class: "task" }, h("bdi", null, one.task_id)), h("td", { class: "n", "data-title": "Solved" }, percent(one.solved)), h("td", { class: "n", "data-title": "Attempts" }, one.n), h("td", { class: "n", "data-title": "Score" }, number(one.score)), h("td", { class: "n", "data-title": "Turns" }, number(one.turns)), h("td", { class: "whole" }, one.place ? h("a", { href: link("attempt", at.id, one.place) }, "open attempt") : null))), { showCaption: true, class: "cards" }) : h("p", { class: "card" }, "No attempt was completed."),
  h("details", { class: "card fold" }, h("summary", null, "All figures"), table("Figures", [{ title: "Figure" }, { title: "Value" }], told.figures.map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name), h("td", null, value))))));
  turns.update(told.within.map((one, i) => ({ label: one.label, xs: one.share.map((_, k) => k + 1), values: one.share, colour: COLOURS[i % COLOURS.length] })));
  const ks = told.passes.map((one) => one.k), column = (name, key) => told.passes.map((one) => one[name][key]);
  passes.update(told.passes.length > 1 ? [["pass@k", "at"], ["pass^k", "all"]].map(([label, name], i) => ({ label, xs: ks, values: column(name, "value"), band: [column(name, "low"), column(name, "high")], colour: COLOURS[i] })) : []);
}

// On the line a model is calibrated; below it, overconfident.
function drawJudges(box, at, told) {
  if (!told.models.length && !told.audits.length && !told.problems.length) return;
  const charts = h("div", { class: "charts" });
  put(box, h("div", { class: "heading" }, h("h2", null, "Reward models and judges"), h("p", { class: "soft" }, "Dots below the line: it happens less often than the model says.")),
    told.problems.length ? h("ul", { class: "problems", role: "alert" }, told.problems.map((says) => h("li", null, says))) : null, charts);
  const draw = (spec, lines) => { const chart = new Chart({ share: true, ...spec }); at.closing(() => chart.close()); charts.append(chart.element); chart.update(lines); };
  for (const one of told.models) {
    const of_ = { pairwise: "held-out pairs", outcome: "held-out attempts", process: "steps of held-out attempts", pairs: "held-out pairs", steps: "steps of held-out attempts" }[one.of] || one.of, low = one.of === "pairs" ? 0.5 : 0;
    draw({ title: one.title, unit: `observed share over predicted probability; accuracy ${percent(one.accuracy)} on ${of_}`, over: "probability", key: one.title, real: true }, [
      { label: "calibrated", xs: [low, 1], values: [low, 1], dash: true, colour: "--s6" },
      { label: of_, xs: one.bins.map((b) => b.said), values: one.bins.map((b) => b.share), band: [one.bins.map((b) => b.low), one.bins.map((b) => b.high)], points: true, colour: "--s1" }]);
  }
  for (const one of told.audits) draw({ title: one.title, unit: `accuracy, with 95% intervals; ${one.stage}`, key: "steps" }, [{ label: "accuracy", xs: one.steps, values: one.values, band: one.low.length ? [one.low, one.high] : null, points: one.steps.length < 3 }]);
}

function comparison(box, at, first, second, told) {
  if (told.problem) { put(box, h("p", { class: "card" }, told.problem)); return; }
  const tile = (title, figure, words) => h("div", { class: "card tile" }, h("h3", null, title), h("p", { class: "figure" }, figure), h("div", { class: "words" }, words));
  put(box, h("div", { class: "tiles" },
    tile("Difference", `${points(told.difference)} points`, `95% interval ${points(told.low)} to ${points(told.high)}`),
    tile("Significant", significant(told), `${test(told)}, ${told.n} tasks`),
    tile("Better", String(told.n_better), "tasks"), tile("Worse", String(told.n_worse), "tasks")),
  told.cautions.length ? h("ul", { class: "card findings" }, told.cautions.map((says) => h("li", { class: "look" }, h("p", null, says)))) : null,
  told.flipped.length ? table("Tasks that flipped", [{ title: "Task" }, { title: `${first.words}`, n: true }, { title: `${second.words}`, n: true }, { title: "Attempts" }], told.flipped.map((one) => h("tr", null,
    h("th", { scope: "row", class: "task" }, h("bdi", null, one.task)), h("td", { class: `n ${one.first > one.second ? "better" : "worse"}`, "data-title": first.words }, percent(one.first)), h("td", { class: `n ${one.second > one.first ? "better" : "worse"}`, "data-title": second.words }, percent(one.second)),
    h("td", null, h("a", { href: attempts(first, one.task) }, "baseline"), " · ", h("a", { href: attempts(second, one.task) }, "candidate")))), { showCaption: true, class: "flips cards", most: 20 }) : h("p", { class: "soft" }, "No task flipped."));
}

// Interval and p are of two methods, which may disagree at the border.
const significant = (told) => {
  const clear = told.low > 0 || told.high < 0;
  return clear === told.p_value < 0.05 ? (clear ? "yes" : "no") : "borderline";
};

// A task of a whole evaluation may be in any of its files.
const attempts = (one, task) => link("groups", one.run, one.name ? { stage: one.name, phase: "eval", task } : { task, all: "1" });

export const points = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${(100 * Math.abs(value)).toFixed(1)}`;
export const test = (told) => `p ${told.p_value < 0.0001 ? "< 0.0001" : `= ${number(told.p_value, 2)}`}, ${told.test === "mcnemar" ? "McNemar's test" : "permutation test"}, mid-p`;
