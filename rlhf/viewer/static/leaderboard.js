// Evaluations ranked among those that had the same tasks, each with its interval.
import { get, link } from "./api.js";
import { h, number, percent, put, table } from "./dom.js";
import { whisker } from "./evaluation.js";

export async function showLeaderboard(main, at) {
  put(main, h("h1", null, "Leaderboard"), h("p", { class: "soft" }, "Reading evaluations…"));
  const found = await get("leaderboard", {}, at.signal);
  put(main, h("div", { class: "heading" }, h("h1", null, "Leaderboard"), h("p", { class: "soft" }, "One board for each set of tasks. 95% intervals, clustered by task.")),
    found.problems.length ? h("ul", { class: "problems", role: "alert" }, found.problems.map((says) => h("li", null, says))) : null,
    found.boards.length ? found.boards.map(boardOf) : h("p", { class: "card" }, "Nothing has been evaluated yet."));
}

function boardOf(board) {
  const k = Math.max(1, ...board.rows.flatMap((row) => Object.keys(row.pass).map(Number))), passes = k > 1 ? [`pass@${k}`] : [];
  const columns = [{ title: "#", n: true }, { title: "Policy" }, { title: "Success", n: true }, { title: "95% interval" }, ...passes.map((title) => ({ title, n: true })), { title: "Score", n: true }, { title: "Turns", n: true }, { title: "Errors", n: true }, { title: "Against the best" }];
  const first = board.rows[0];
  const rows = board.rows.map((row, i) => h("tr", null,
    h("td", { class: "n", "data-title": "Rank" }, i + 1),
    h("th", { scope: "row", class: "task" }, h("a", { href: link("evaluation", row.run) }, h("bdi", null, row.policy))),
    h("td", { class: "n big", "data-title": "Success" }, percent(row.success)),
    h("td", { class: "interval", "data-title": "95% interval" }, whisker(row.success, row.interval[0], row.interval[1])),
    passes.map((title) => h("td", { class: "n", "data-title": title }, percent(row.pass[k]?.at.value))),
    h("td", { class: "n", "data-title": "Score" }, number(row.score)), h("td", { class: "n", "data-title": "Turns" }, number(row.turns_mean)),
    h("td", { class: "n", "data-title": "Errors" }, row.n_errors),
    h("td", null, i ? h("a", { href: link("evaluation", row.run, { other: first.run }) }, "task by task") : null)));
  return h("section", { class: "board" }, table(board.title, columns, rows, { showCaption: true, class: "cards" }));
}
