// Charts: uPlot with the colours of the page, readable without them, and updated in place.
import { h, number, percent } from "./dom.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const COLOURS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6"];
const HEIGHT = 190;

export class Chart {
  // `lines` gives [{label, xs, values, colour, band?: [lows, highs], points?: bool, dash?: bool}]
  // `over` is what xs count, `key` the charts whose cursors move together, `real` where xs are no whole numbers.
  constructor({ title, hint, unit, wide, share, over = "steps", key = "steps", real = false }) {
    Object.assign(this, { title, unit, share, over, key, real });
    this.legend = h("div", { class: "legend" });
    this.box = h("div", { class: "plot" });
    this.element = h("figure", { class: `card chart${wide ? " wide" : ""}` },
      h("figcaption", null, h("h2", null, title), unit ? h("span", { class: "soft unit" }, unit) : null, this.legend),
      this.box);
    if (hint) this.element.title = hint;
    this.height = wide ? 240 : HEIGHT;
    this.plot = null;
    this.shape = "";
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.box);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.repaint = () => { this.shape = ""; if (this.given) this.update(this.given); };
    this.scheme.addEventListener("change", this.repaint);
  }

  close() {
    this.observer.disconnect();
    this.scheme.removeEventListener("change", this.repaint);
    if (this.plot) this.plot.destroy();
  }

  text(value) {
    return this.share ? percent(value) : number(value);
  }

  update(lines) {
    this.given = lines;
    const { xs, columns } = joined(lines);
    this.element.hidden = xs.length === 0;
    if (!xs.length) return;
    const shape = JSON.stringify(lines.map((l) => [l.label, l.colour, Boolean(l.band), l.points]));
    if (!this.plot || shape !== this.shape) {
      if (this.plot) this.plot.destroy();
      this.plot = null;
      this.shape = shape;
      this.build(lines, [xs, ...columns]);
    } else {
      this.plot.setData([xs, ...columns]);
    }
    this.say(lines, xs.length - 1, columns);
    this.columns = columns;
  }

  build(lines, data) {
    const soft = css("--soft"), rule = css("--rule"), series = [{}], bands = [];
    for (const line of lines) {
      const colour = css(line.colour || COLOURS[0]);
      series.push({ label: line.label, stroke: colour, width: line.points ? 0 : 2, spanGaps: true, dash: line.dash ? [5, 4] : undefined,
        points: { show: line.points || ((u) => u.data[0].length < 3), size: line.points ? 11 : 9, fill: colour, stroke: css("--paper"), width: 1.5 }, paths: line.points ? () => null : undefined });
      if (line.band) {
        const high = series.length + 1, low = series.length;
        series.push({ stroke: "transparent", width: 0, points: { show: false }, spanGaps: true }, { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true });
        bands.push({ series: [high, low], fill: alpha(colour, 0.14) });
      }
    }
    const grid = { stroke: rule, width: 1 }, font = "11.5px system-ui, sans-serif";
    const options = {
      width: Math.max(this.box.clientWidth, 120), height: this.height, series, bands,
      legend: { show: false }, padding: [10, 12, 0, 0],
      cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false }, sync: { key: this.key } },
      scales: { x: { time: false, range: (u, low, high) => { const room = (high - low || 1) * 0.012; return [low - room, high + room]; } }, y: this.share ? { range: (u, low, high) => [0, Math.max(0.05, Math.min(1.02, high > 0.5 ? 1.02 : high * 1.25 || 0.05))] } : { range: padded } },
      axes: [
        { stroke: soft, grid: { show: false }, ticks: { show: false }, font, size: 26, gap: 4, incrs: this.real ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000, 1000000] },
        { stroke: soft, grid, ticks: { show: false }, font, size: 50, gap: 6, values: (u, splits) => splits.map((v) => this.text(v)) },
      ],
      hooks: { setCursor: [(u) => this.say(this.given, u.cursor.idx ?? u.data[0].length - 1, this.columns || data.slice(1))] },
    };
    this.plot = new window.uPlot(options, data, this.box);
    const canvas = this.box.querySelector("canvas");
    canvas.setAttribute("role", "img");
    this.canvas = canvas;
  }

  // The values at the cursor, else the last ones.
  say(lines, index, columns) {
    const parts = [], words = [];
    let column = 0;
    for (const line of lines) {
      const values = columns[column];
      let at = index;
      while (at > 0 && (values[at] === null || values[at] === undefined)) at--;
      const value = values[at] ?? null;
      let text = this.text(value);
      if (line.band && columns[column + 1][at] != null) text += ` (${this.text(columns[column + 1][at])}–${this.text(columns[column + 2][at])})`;
      parts.push(h("span", { class: "key" }, h("i", { class: line.points ? "dot" : "", style: { background: `var(${line.colour || COLOURS[0]})` } }), line.label, h("b", null, text)));
      words.push(`${line.label} ${text}`);
      column += line.band ? 3 : 1;
    }
    this.legend.replaceChildren(...parts);
    if (this.canvas) this.canvas.setAttribute("aria-label", `${this.title} over ${this.over}: ${words.join(", ")}`);
  }

  resize() {
    if (this.plot && this.box.clientWidth) this.plot.setSize({ width: this.box.clientWidth, height: this.height });
  }
}

function alpha(colour, share) {
  const hex = colour.replace("#", "");
  return `rgba(${parseInt(hex.slice(0, 2), 16)}, ${parseInt(hex.slice(2, 4), 16)}, ${parseInt(hex.slice(4, 6), 16)}, ${share})`;
}

function padded(u, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.12;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

function joined(lines) {
  const all = new Set();
  for (const line of lines) for (const x of line.xs) all.add(x);
  const xs = [...all].sort((a, b) => a - b), place = new Map(xs.map((x, i) => [x, i])), columns = [];
  for (const line of lines) {
    for (const values of line.band ? [line.values, ...line.band] : [line.values]) {
      const column = new Array(xs.length).fill(null);
      line.xs.forEach((x, i) => { if (values[i] !== null && values[i] !== undefined) column[place.get(x)] = values[i]; });
      columns.push(column);
    }
  }
  return { xs, columns };
}
