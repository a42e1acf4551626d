// All runs: where each of them is, and their success over steps in one chart.
import { get, go, link, run as of } from "./api.js";
import { Chart, COLOURS } from "./charts.js";
import { Curves } from "./curves.js";
import { badge, duration, h, percent, put, table, within } from "./dom.js";
import { isFrozen } from "./frozen.js";

const EVERY = 2000, MOST = 6, NAMES = ["rollout/success", "rollout/success_low", "rollout/success_high"];

export async function showRuns(main, at) {
  const chosen = new Set((at.params.pick || "").split(",").filter(Boolean));
  const curves = new Map(), chart = new Chart({ title: "Success in training", unit: "share of the episodes of each step", wide: true, share: true });
  at.closing(() => chart.close());
  const list = h("div"), compare = h("p", { class: "actions" });
  put(main, h("div", { class: "heading" }, h("h1", null, "Runs"), h("p", { class: "soft", id: "count" })), chart.element, list, compare);

  const pick = () => go("runs", "", { pick: [...chosen].join(",") }, true);
  async function refresh() {
    const { runs } = await get("runs", {}, at.signal);
    if (!chosen.size) for (const one of runs.filter((r) => r.success).slice(0, MOST)) chosen.add(one.id);
    const drawn = runs.filter((one) => chosen.has(one.id)).slice(0, MOST);
    await Promise.all(drawn.map(async (one) => {
      const known = curves.get(one.id);
      if (!known || known.nLines !== one.n_lines) curves.set(one.id, await new Curves(one.id, NAMES).load(at.signal));
    }));
    chart.update(drawn.map((one, i) => {
      const found = curves.get(one.id).series(NAMES);
      return { label: one.id, xs: found.xs, values: found.values[0], band: drawn.length <= 3 ? [found.values[1], found.values[2]] : null, colour: COLOURS[i] };
    }).filter((line) => line.xs.length));
    const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.pick : null;
    document.getElementById("count").textContent = `${runs.length} ${runs.length === 1 ? "run" : "runs"}, ${runs.filter((r) => r.state === "running").length} running`;
    put(list, table("Runs", [{ title: "Plot" }, { title: "Run" }, { title: "State" }, { title: "Step" }, { title: "Success in training", n: true }, { title: "On unseen tasks", n: true }, { title: "Time left", n: true }, { title: "Environment" }],
      runs.map((one) => row(one, drawn, () => { chosen.has(one.id) ? chosen.delete(one.id) : chosen.add(one.id); pick(); refresh().catch(() => {}); })), { class: "runs cards" }));
    if (focused) { const box = list.querySelector(`[data-pick="${CSS.escape(focused)}"]`); if (box) box.focus(); }
    put(compare, drawn.length > 1 ? h("a", { class: "button", href: link("run", drawn[0].id, { with: drawn.slice(1, 4).map((one) => one.id).join(",") }) }, `Compare all curves of ${Math.min(drawn.length, 4)} runs`) : null);
    if (!runs.length) put(list, h("p", { class: "card" }, "No run yet. It appears here as soon as one starts."));
  }
  await refresh();
  if (isFrozen) return;
  const timer = setInterval(() => { if (!document.hidden) refresh().catch(() => {}); }, EVERY);
  at.closing(() => clearInterval(timer));
}

function row(one, drawn, toggle) {
  const place = drawn.findIndex((other) => other.id === one.id);
  const box = h("input", { type: "checkbox", checked: place >= 0, onchange: toggle, ariaLabel: `Plot ${one.id}` });
  box.dataset.pick = one.id;
  const swatch = place >= 0 ? h("i", { class: "swatch", style: { background: `var(${COLOURS[place]})` } }) : null;
  const evaluations = one.evaluations.filter((e) => e.success !== null && e.success !== undefined), last = evaluations[evaluations.length - 1];
  const shown = last ? [evaluations.length > 1 ? [h("span", { class: "soft" }, percent(evaluations[0].success)), " → "] : null, h("b", null, percent(last.success))] : "–";
  return h("tr", null,
    h("td", { "data-title": "Plot" }, h("label", { class: "pick" }, box, swatch)),
    h("th", { scope: "row" }, h("a", { href: link("run", one.id) }, one.id)),
    h("td", { "data-title": "State" }, badge(one.state)),
    h("td", { "data-title": "Step" }, one.n_steps ? h("span", null, `${one.step} of ${one.n_steps}`, progress(one)) : one.stage ? `${one.step}` : "–"),
    h("td", { class: "n", "data-title": "Success in training", title: one.success ? within(one.success.low, one.success.high) : "" }, one.success ? percent(one.success.value) : "–"),
    h("td", { class: "n", "data-title": "On unseen tasks", title: last ? within(last.low, last.high) : "" }, shown),
    h("td", { class: "n", "data-title": "Time left" }, one.left_s === null ? "–" : duration(one.left_s) + (one.is_last_stage ? "" : " of this stage")),
    h("td", { class: "soft", "data-title": "Environment" }, [one.environment, one.seed === null ? null : `seed ${one.seed}`].filter(Boolean).join(" · ")));
}

export function progress(one) {
  const share = one.n_steps ? Math.min(1, one.step / one.n_steps) : 0;
  const bar = h("span", { class: "progress", role: "progressbar", ariaValueMin: "0", ariaValueMax: String(one.n_steps), ariaValueNow: String(one.step), ariaLabel: "Steps" }, h("span", null));
  bar.firstChild.style.width = `${100 * share}%`;
  return bar;
}
