// The page: which view the address asks for, the way from one to the next, and what goes wrong in plain words.
import { get, go, link, parse } from "./api.js";
import { h, put } from "./dom.js";
import { showEvaluation } from "./evaluation.js";
import { isFrozen } from "./frozen.js";
import { showGroups } from "./groups.js";
import { showLeaderboard } from "./leaderboard.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { showAttempt } from "./trajectory.js";

const OF_ALL = ["runs", "leaderboard"]; // views of no single run
const VIEWS = { runs: showRuns, run: showRun, groups: showGroups, attempt: showAttempt, evaluation: showEvaluation, leaderboard: showLeaderboard };
const main = document.getElementById("main"), nav = document.getElementById("nav");
const select = document.getElementById("run-select"), which = document.getElementById("which");
let leave = () => {}, shown = "", known = [];

async function show() {
  const at = parse(location.hash);
  const view = VIEWS[at.view] ? at.view : "runs";
  leave();
  const aborted = new AbortController(), closing = [() => aborted.abort()];
  leave = () => closing.splice(0).forEach((close) => close());
  try {
    if (!known.length || (at.id && !known.some((one) => one.id === at.id))) known = (await get("runs", {}, aborted.signal)).runs;
    if (!at.id && !OF_ALL.includes(view) && known.length) at.id = known[0].id;
    steer(view, at);
    await VIEWS[view](main, { ...at, runs: known, signal: aborted.signal, closing: (close) => closing.push(close), live });
    if (shown && shown !== view + at.id) { main.focus({ preventScroll: true }); window.scrollTo(0, 0); }
    shown = view + at.id;
  } catch (error) {
    if (error.name !== "AbortError") failed(error);
  }
}

function failed(error) {
  put(main, h("div", { class: "card problem-card", role: "alert" }, h("h2", null, "This cannot be shown"), h("p", null, error.message),
    h("p", null, h("button", { type: "button", onclick: show }, "Try again"), " ", h("a", { href: link("runs") }, "All runs"))));
}

function steer(view, at) {
  const id = at.id || (known[0] && known[0].id) || "", current = view === "attempt" ? "groups" : view;
  const tabs = [["runs", "Runs", ""], ["run", "Curves", id], ["groups", "Attempts", id], ["evaluation", "Evaluation", id], ["leaderboard", "Leaderboard", ""]];
  put(nav, tabs.filter(([name]) => (OF_ALL.includes(name) ? !isFrozen || known.length > 1 : id)).map(([name, title, of]) => h("a", { href: link(name, of), "aria-current": name === current ? "page" : null }, title)));
  which.hidden = OF_ALL.includes(view) || known.length < 2;
  put(select, known.map((run) => h("option", { value: run.id, selected: run.id === id }, run.id)));
  document.title = `${view === "runs" ? "Runs" : view === "leaderboard" ? "Leaderboard" : id} · ${isFrozen ? "rlhf report" : "rlhf view"}`;
  live("");
}

// Whether the stream of a run is open, in the corner of the page.
function live(words) {
  const corner = document.getElementById("live");
  corner.textContent = words;
  corner.classList.toggle("on", words === "live");
}

select.addEventListener("change", () => {
  const at = parse(location.hash);
  go(at.view === "attempt" ? "groups" : at.view, select.value, {});
});
addEventListener("hashchange", show);
show();
