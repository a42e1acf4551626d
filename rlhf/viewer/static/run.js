// One run, live: its head line, cautions, curves and timeline; others drawn over it.
import { get, link, run as of } from "./api.js";
import { Chart, COLOURS } from "./charts.js";
import { Curves } from "./curves.js";
import { badge, duration, h, number, percent, put, table, within } from "./dom.js";
import { points, test } from "./evaluation.js";
import { isFrozen } from "./frozen.js";
import { progress } from "./runs.js";
import { TIMES, Timeline } from "./timeline.js";

// Each chart: what it shows. `share` draws from 0 to 1; a name that ends in / is a family.
const CHARTS = [
  { title: "Reward", unit: "mean over the episodes", names: { "rollout/return_mean": "total", "reward/": "" } },
  { title: "Loss", names: { "loss/total": "policy gradient", "supervised/loss": "supervised", "preference/loss": "preference", "reward_model/loss": "reward model" } },
  { title: "KL", unit: "nats", names: { "loss/approx_kl": "to the sampling policy", "loss/kl_ref": "to the reference", "loss/kl_teacher": "to the teacher" } },
  { title: "Entropy", unit: "nats", names: { "loss/entropy": "of the next token", "collapse/surprisal": "estimated" } },
  { title: "Trainer–engine gap", unit: "nats", names: { "loss/sampler_logprob_diff_mean": "mean", "loss/sampler_logprob_diff_max": "max", "loss/sampler_kl_k3": "divergence" } },
  { title: "Importance weights", share: true, names: { "loss/sampler_ess": "effective sample size", "loss/sampler_clipped_share": "clipped", "loss/sampler_masked_share": "masked", "loss/sampler_rejected_share": "rejected" } },
  { title: "Gradient norm", names: { "optimizer/grad_norm": "policy", "critic/grad_norm": "critic" } },
  { title: "Monitored rewards", unit: "mean over the attempts, not trained on", names: { "monitor/": "" } },
  { title: "Turns", unit: "per episode", names: { "rollout/n_turns_mean": "mean turns" } },
  { title: "Prompt length", unit: "tokens", names: { "rollout/prompt_tokens_mean": "mean", "rollout/prompt_tokens_max": "longest" } },
  { title: "Sampled tokens", unit: "per step", names: { "rollout/n_tokens": "tokens" } },
  { title: "Truncated and invalid", share: true, names: { truncated: "truncated episodes", "rollout/invalid_share": "invalid actions", "rollout/infra_error_share": "errors" } },
  { title: "Learning rate", names: { "optimizer/lr": "policy", "critic/lr": "critic" } },
  { title: "Throughput", unit: "tokens per second", names: { "rollout/tokens_per_s": "sampled", "train/tokens_per_s": "trained" } },
  { title: "Memory", unit: "GB", names: { "memory/rss_gb": "resident", "memory/gpu_peak_gb": "GPU peak" } },
  { title: "Staleness", unit: "policy versions", names: { "asynchrony/staleness_mean": "mean", "asynchrony/staleness_max": "oldest", "replay/age_mean": "replayed, in steps" } },
  { title: "Staleness of trained tokens", unit: "share by policy versions", share: true, names: { "tokens_by_staleness/": "" } },
  { title: "Tokens by state", unit: "tokens", names: { "asynchrony/tokens_generated": "generated", "asynchrony/tokens_trained": "trained", "asynchrony/tokens_queued": "queued", "asynchrony/tokens_running": "running", "asynchrony/tokens_discarded": "discarded" } },
  { title: "Idle time", unit: "seconds per step", names: { "time/trainer_idle_s": "trainer", "time/rollout_idle_s": "rollouts" } },
];
const CUT = ["rollout/n_turn_limit", "rollout/n_token_limit", "rollout/n_episodes"];
const SUCCESS = ["rollout/success", "rollout/success_low", "rollout/success_high"];
const BASE = [...SUCCESS, "eval/success", "eval/success_low", "eval/success_high", ...CUT, ...TIMES, "time/step_s"];

export async function showRun(main, at) {
  const found = await get(of(at.id), {}, at.signal);
  const others = (at.params.with || "").split(",").filter((id) => id && id !== at.id && at.runs.some((run) => run.id === id)).slice(0, 3);
  const extra = (at.params.also || "").split(",").filter((name) => name in found.metrics);
  const names = [...BASE, ...extra, ...wanted(found.metrics)];
  const curves = [at.id, ...others].map((id) => new Curves(id, names));
  await Promise.all(curves.map((one) => one.load(at.signal)));
  const known = curves[0].stages, stage = at.params.stage === "all" ? "" : known.includes(at.params.stage) ? at.params.stage : "";
  const ofStage = () => stage || (at.params.stage === "all" ? "" : curves[0].stages.at(-1) || "");
  const head = h("section", { class: "head" }), cautions = h("section", { class: "cautions" }), timeline = new Timeline(), paired = h("section");
  const success = new Chart({ title: "Success", unit: "share of episodes, with 95% intervals; dots are evaluations on unseen tasks", wide: true, share: true });
  const charts = CHARTS.map((spec) => ({ spec, chart: new Chart(spec) })).concat(extra.map((name) => {
    const spec = { title: name, unit: found.metrics[name].unit, names: { [name]: "value" } };
    return { spec, chart: new Chart({ ...spec, hint: found.metrics[name].meaning }) };
  }));
  at.closing(() => { success.close(); timeline.close(); charts.forEach(({ chart }) => chart.close()); });
  const picker = h("p", { class: "overlay" });
  let list = metrics(at, found, extra);
  put(main, head, picker, cautions, h("div", { class: "charts" }, success.element, timeline.element, charts.map(({ chart }) => chart.element)), paired, facts(at), list);

  const draw = () => {
    const shown = ofStage();
    if (picker.dataset.stages !== curves[0].stages.join()) put(picker, stages(at, curves[0].stages, shown), overlay(at, others));
    picker.dataset.stages = curves[0].stages.join();
    success.update(successLines(curves, shown));
    for (const { spec, chart } of charts) chart.update(linesOf(spec, curves, shown));
    timeline.update(curves[0].lines);
  };
  let learned = found.learned;
  drawHead(head, found, learned);
  drawCautions(cautions, found.cautions);
  draw();
  pairs(paired, at, others).catch(() => {});
  if (isFrozen) return;
  watch(at, curves[0], (told) => { drawHead(head, told.head, learned); draw(); }, async () => {
    const now = await get(of(at.id), {}, at.signal);
    learned = now.learned;
    drawHead(head, now, learned);
    drawCautions(cautions, now.cautions);
    if (list.dataset.n === String(Object.keys(now.metrics).length) || list.contains(document.activeElement)) return;
    const renewed = metrics(at, now, extra);
    renewed.open = list.open;
    list.replaceWith(renewed);
    list = renewed;
  });
  curves.slice(1).forEach((one) => follow(at, one, draw));
}

// Another run that is drawn over this one grows too: its new lines are asked for.
function follow(at, curves, draw) {
  const timer = setInterval(async () => {
    try {
      const found = await get(`${of(curves.id)}/metrics`, { names: [...curves.names].join(","), since: curves.nLines }, at.signal);
      if (found.epoch !== curves.epoch || found.n_lines < curves.nLines) await curves.load(at.signal);
      else if (found.step.length) curves.take(found);
      else return;
      draw();
    } catch { /* the stream of this run says what is wrong */ }
  }, 1000);
  at.closing(() => clearInterval(timer));
}

// The last evaluations of runs that are drawn over each other, paired by task.
async function pairs(box, at, others) {
  if (!others.length) return;
  const named = await Promise.all([at.id, ...others].map(async (id) => { const told = await get(of(id), {}, at.signal); return { id, last: told.stored.at(-1) }; }));
  const own = named[0], rows = [];
  for (const other of named.slice(1)) {
    if (own.last === undefined || other.last === undefined) continue;
    const told = await get("compare", { first: `${other.id}:${other.last}`, second: `${own.id}:${own.last}` }, at.signal);
    rows.push(h("tr", null, h("th", { scope: "row" }, `${own.id} against ${other.id}`), told.problem ? h("td", { colSpan: 4 }, told.problem) : [
      h("td", { class: "n big", "data-title": "Difference" }, `${points(told.difference)} points`), h("td", { "data-title": "95% interval" }, `${points(told.low)} to ${points(told.high)}`),
      h("td", { "data-title": "Significance" }, `${test(told)}, ${told.n} tasks`), h("td", null, h("a", { href: link("evaluation", at.id, { other: other.id }) }, `${told.n_better} better, ${told.n_worse} worse`), told.cautions.length ? `; ${told.cautions.length} ${told.cautions.length === 1 ? "caution" : "cautions"}` : null)]));
  }
  if (rows.length) put(box, table("Paired by task, last evaluations", [{ title: "Runs" }, { title: "Difference", n: true }, { title: "95% interval" }, { title: "Significance" }, { title: "Tasks" }], rows, { showCaption: true, class: "cards" }));
}

function wanted(metrics) {
  const asked = CHARTS.flatMap((spec) => Object.keys(spec.names));
  return Object.keys(metrics).filter((name) => asked.some((one) => (one.endsWith("/") ? name.startsWith(one) : name === one)));
}

// The stream of a run: what is new is drawn at once, the cautions a moment later.
function watch(at, curves, changed, judged) {
  const stream = new EventSource(`api/${of(at.id)}/events?since=${curves.epoch}:${curves.nLines}`);
  let timer = null;
  stream.addEventListener("open", () => at.live("live"));
  stream.addEventListener("error", () => at.live("waiting for the server"));
  stream.addEventListener("run", (event) => {
    const told = JSON.parse(event.data);
    if (told.is_new) curves.clear();
    if (told.fresh.step.length) curves.take(told.fresh);
    changed(told);
    window.__latest = { step: told.head.step, at: Date.now(), written: told.head.updated };
    timer ??= setTimeout(() => { timer = null; judged().catch(() => {}); }, 2500);
  });
  at.closing(() => { stream.close(); clearTimeout(timer); });
}

function drawHead(box, head, learned) {
  const left = head.left_s === null || head.left_s === undefined ? null : duration(head.left_s);
  const evaluations = head.evaluations.filter((e) => typeof e.success === "number"), first = evaluations[0], last = evaluations[evaluations.length - 1];
  put(box,
    h("div", { class: "title" }, h("h1", null, head.id), badge(head.state), h("span", { class: "soft" }, [head.environment, policyName(head.policy), head.seed === null ? null : `seed ${head.seed}`].filter(Boolean).join(" · "))),
    head.problems.length ? h("ul", { class: "problems", role: "alert" }, head.problems.map((p) => h("li", null, h("b", null, p.file), " ", p.says))) : null,
    h("div", { class: "tiles" },
      tile("Step", head.n_steps ? `${head.step} of ${head.n_steps}` : String(head.step), [head.stage || "not begun", head.n_steps ? progress(head) : null]),
      head.success || head.loss === null ? tile("Success in training", head.success ? percent(head.success.value) : "–", head.success ? within(head.success.low, head.success.high) : "no rollouts yet") : tile("Loss", number(head.loss), "of the last step"),
      tile("On unseen tasks", last ? [first !== last ? h("span", { class: "from" }, `${percent(first.success)} → `) : null, percent(last.success)] : "–", last ? `${last.name}, ${within(last.low, last.high)}` : "not evaluated"),
      tile("Throughput", number(head.tokens_per_s || head.trained_per_s || null), head.tokens_per_s || !head.trained_per_s ? "sampled tokens per second" : "trained tokens per second"),
      tile(head.state !== "running" ? "Time per step" : head.is_last_stage ? "Time left" : "Left of this stage", head.state === "running" ? left || "–" : head.pace_s ? duration(head.pace_s) : "–", head.state === "running" ? (head.pace_s ? `${duration(head.pace_s)} per step` : "known after two steps") : "of the last steps")),
    learned ? h("p", { class: "learned" }, "Learned: ", h("b", null, `${points(learned.difference)} points`), ` on the same ${learned.n} tasks, 95% interval ${points(learned.low)} to ${points(learned.high)}; ${learned.n_better} better, ${learned.n_worse} worse; ${test(learned)}.`) : null,
    head.waits_for ? h("p", { class: "waits" }, h("span", { class: "pulse", "aria-hidden": "true" }), "Waiting for ", head.waits_for, ticking(head)) : null);
}

// A checkpoint by the end of its path.
const policyName = (policy) => (policy && policy.split("/").length > 3 ? `…/${policy.split("/").slice(-3).join("/")}` : policy);

// How long the present step has taken, counted on by the clock of this machine.
function ticking(head) {
  if (!head.updated) return null;
  const began = Date.now() - 1000 * Math.max(0, head.now - head.updated), element = h("span", { class: "soft" });
  const tell = () => { element.textContent = ` · ${duration(Math.floor((Date.now() - began) / 1000) + 0.001)} so far${head.pace_s ? `; the last steps took ${duration(head.pace_s)}` : ""}`; };
  tell();
  const timer = setInterval(() => (element.isConnected ? tell() : clearInterval(timer)), 1000);
  return element;
}

function tile(title, figure, words) {
  return h("div", { class: "card tile" }, h("h2", null, title), h("p", { class: "figure" }, figure), h("div", { class: "words" }, words));
}

function drawCautions(box, found) {
  // Whether trainer and engine agree is shown whatever it says.
  const isShown = (one) => one.level !== "fine" || one.name === "Trainer and engine";
  const bad = found.filter(isShown), good = found.filter((one) => !isShown(one));
  const one = (f) => h("li", { class: f.level }, h("div", { class: "row" }, h("b", null, f.name), h("span", { class: "badge" }, f.level === "problem" ? "problem" : f.level === "look" ? "check" : "ok"), h("span", { class: "value" }, f.value)), h("p", null, f.words, f.hint ? h("span", { class: "hint" }, ` ${f.hint[0].toUpperCase()}${f.hint.slice(1)}.`) : null));
  put(box, bad.length ? h("ul", { class: "card findings" }, bad.map(one)) : null,
    good.length ? h("details", { class: "card fold" }, h("summary", null, `${good.length} ${good.length === 1 ? "check" : "checks"} passed`), h("ul", { class: "findings" }, good.map(one))) : null);
}

function overlay(at, others) {
  if (at.runs.length < 2) return null;
  const rest = at.runs.filter((run) => run.id !== at.id && !others.includes(run.id));
  const without = (id) => others.filter((other) => other !== id).join(",");
  const select = h("select", { ariaLabel: "Overlay another run", onchange: (event) => { if (event.target.value) location.hash = link("run", at.id, { ...at.params, with: [...others, event.target.value].join(",") }); } },
    h("option", { value: "" }, "Overlay another run…"), rest.map((run) => h("option", { value: run.id }, run.id)));
  return [
    others.map((id, i) => h("span", { class: "chip" }, h("i", { class: "swatch", style: { background: `var(${COLOURS[i + 1]})` } }), id, h("a", { href: link("run", at.id, { ...at.params, with: without(id) }), ariaLabel: `Remove ${id}` }, "×"))),
    others.length < 3 && rest.length ? select : null,
    others.length ? h("a", { href: link("evaluation", at.id, { other: others[0] }) }, "Compare evaluations task by task") : null];
}

// The curves of one stage, by default the last one: losses of two stages have nothing to do with each other.
function stages(at, known, shown) {
  if (known.length < 2) return null;
  return h("select", { ariaLabel: "Stage", onchange: (event) => { location.hash = link("run", at.id, { ...at.params, stage: event.target.value }); } },
    known.map((name) => h("option", { value: name, selected: name === shown }, name)), h("option", { value: "all", selected: !shown }, "all stages"));
}

// Of another run the stage of the same kind.
function same(curves, stage) {
  return !stage || curves.stages.includes(stage) ? stage : curves.stages.find((one) => one.replace(/^\d+-/, "") === stage.replace(/^\d+-/, "")) || curves.stages.at(-1) || "";
}

function successLines(curves, stage) {
  const lines = [];
  curves.forEach((one, i) => {
    const found = one.series(SUCCESS, same(one, stage));
    if (found.xs.length) lines.push({ label: curves.length > 1 ? one.id : "training", xs: found.xs, values: found.values[0], band: [found.values[1], found.values[2]], colour: COLOURS[i] });
  });
  const first = curves[0].series(["rollout/success", "eval/success"], stage);
  if (first.values[1].some((v) => v !== null)) lines.push({ label: "evaluation", xs: first.xs, values: first.values[1], points: true, colour: curves.length > 1 ? COLOURS[0] : "--s3" });
  return lines;
}

function linesOf(spec, curves, stage) {
  const lines = [];
  const names = Object.entries(spec.names).flatMap(([name, label]) => (name.endsWith("/") ? curves[0].matching(name).map((full) => [full, full.slice(name.length)]) : [[name, label]]));
  const columns = [...names.map(([name]) => name), ...CUT];
  curves.forEach((one, i) => {
    let n = 0;
    const found = one.series(columns, same(one, stage));
    names.forEach(([name, label], k) => {
      const [turns, tokens, all] = found.values.slice(names.length);
      const values = name === "truncated" ? found.xs.map((x, j) => (all[j] ? ((turns[j] || 0) + (tokens[j] || 0)) / all[j] : null)) : found.values[k];
      if (!values.some((value) => value !== null) || (curves.length > 1 && n++ > 0)) return; // of several runs the first line of each chart
      lines.push({ label: curves.length > 1 ? `${one.id}${names.length > 1 ? `, ${label}` : ""}` : label, xs: found.xs, values, colour: COLOURS[curves.length > 1 ? i : lines.length % COLOURS.length] });
    });
  });
  return lines;
}

// What was asked and run, where the time went and what failed; asked for when it is opened.
function facts(at) {
  const body = h("div", { class: "facts" }, h("p", { class: "soft" }, "Reading…"));
  const rows = (caption, found) => (found.length ? table(caption, [{ title: "Name" }, { title: "Value" }], found.map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name), h("td", null, value))), { showCaption: true }) : null);
  const box = h("details", { class: "card fold", ontoggle: async () => {
    if (!box.open || body.dataset.done) return;
    body.dataset.done = "1";
    const told = await get(`${of(at.id)}/facts`, {}, at.signal).catch((error) => ({ problem: error.message }));
    if (told.problem) { put(body, h("p", null, told.problem)); return; }
    put(body, told.failures.length ? table("Failed attempts by message", [{ title: "Attempts", n: true }, { title: "Outcome" }, { title: "Message" }], told.failures.map((one) => h("tr", null, h("td", { class: "n" }, one.n), h("td", null, one.outcome), h("td", null, h("bdi", null, one.message)))), { showCaption: true }) : null,
      told.n_looked < told.n_files ? h("p", { class: "soft" }, `Failures are those of the newest ${told.n_looked} of ${told.n_files} files.`) : null,
      rows("Where the time went", told.times), rows("Result", told.result), rows("Data and their hashes", told.data), rows("Versions and hardware", told.versions),
      told.recipe ? [h("h3", null, "Recipe"), h("pre", { tabIndex: 0 }, told.recipe)] : null,
      table("Metrics, first and last", [{ title: "Metric" }, { title: "First", n: true }, { title: "Last", n: true }], told.metrics.map(([name, first, last]) => h("tr", null, h("th", { scope: "row" }, h("code", null, name)), h("td", { class: "n" }, first), h("td", { class: "n" }, last))), { showCaption: true }));
  } }, h("summary", null, "Details: recipe, versions, times, failures"), body);
  return box;
}

function metrics(at, found, extra) {
  const rows = Object.entries(found.metrics).map(([name, told]) => {
    const isShown = extra.includes(name), next = isShown ? extra.filter((one) => one !== name) : [...extra, name];
    return h("tr", null, h("th", { scope: "row" }, h("code", null, name)), h("td", null, told.unit), h("td", null, told.meaning), h("td", null, h("a", { href: link("run", at.id, { ...at.params, also: next.join(",") }) }, isShown ? "remove" : "plot")));
  });
  const body = table("Metrics", [{ title: "Metric" }, { title: "Unit" }, { title: "Meaning" }, { title: "Chart" }], rows);
  const search = h("input", { type: "search", placeholder: "Find a metric", ariaLabel: "Find a metric", oninput: () => rows.forEach((row) => { row.hidden = !row.textContent.toLowerCase().includes(search.value.toLowerCase()); }) });
  const box = h("details", { class: "card fold", hidden: !rows.length, open: extra.length > 0 }, h("summary", null, `All ${rows.length} metrics`), search, body);
  box.dataset.n = rows.length;
  return box;
}
