// What the run was busy with: a lane each for rollouts, updates, delivery and evaluation, and the rest of the time.
import { clock, duration, h, put, s } from "./dom.js";

const LANES = [
  ["time/rollout_s", "Rollouts and scoring", "--s1"],
  ["time/train_s", "Update", "--s2"],
  ["time/publish_s", "Delivery", "--s4"],
  ["time/eval_s", "Evaluation", "--s3"],
];
export const TIMES = LANES.map((lane) => lane[0]);
const ROW = 26, LEFT = 148, MOST = 40;

export class Timeline {
  constructor() {
    this.text = h("p", { class: "soft small" });
    this.box = h("div", { class: "lanes scroll", tabIndex: 0, role: "region", ariaLabel: "Timeline" });
    this.element = h("section", { class: "card wide timeline" }, h("div", { class: "row" }, h("h2", null, "Timeline"), h("span", { class: "soft unit" }, "the last steps in wall-clock time")), this.box, this.text);
    this.observer = new ResizeObserver(() => this.given && this.update(this.given));
    this.observer.observe(this.box);
  }

  close() {
    this.observer.disconnect();
  }

  update(lines) {
    this.given = lines;
    const busy = lines.filter((line) => TIMES.some((name) => name in line.values)).slice(-MOST);
    this.element.hidden = busy.length === 0;
    if (!busy.length) return;
    const spans = busy.map(spanOf);
    // Nothing is done twice at a time: what a line did began when the one before was written, or later.
    const first = spans[0].start, last = spans[spans.length - 1].end, all = last - first || 1;
    const width = Math.max(this.box.clientWidth, 300), room = width - LEFT - 8, x = (t) => LEFT + (room * (t - first)) / all;
    const lanes = LANES.filter(([name]) => spans.some((span) => span.parts.some((p) => p.name === name)));
    const rows = [...lanes.map((lane) => lane[1]), "Idle and other"];
    const svg = s("svg", { viewBox: `0 0 ${width} ${rows.length * ROW + 22}`, width, height: rows.length * ROW + 22, role: "img" });
    rows.forEach((title, i) => {
      svg.append(s("text", { x: 0, y: i * ROW + 17, class: "lane" }, title), s("line", { x1: LEFT, x2: width - 8, y1: i * ROW + 13, y2: i * ROW + 13, class: "rail" }));
    });
    const sums = new Map();
    let before = first, idle = 0;
    const bar = (row, from, to, fill, title) => {
      const rect = s("rect", { x: x(from), y: row * ROW + 4, width: Math.max(x(to) - x(from) - 0.6, 1), height: ROW - 9, rx: 2, class: "bar" }, s("title", null, title));
      rect.style.fill = fill;
      svg.append(rect);
    };
    for (const span of spans) {
      let at = Math.max(span.start, before);
      if (at - before > all * 0.002) { bar(rows.length - 1, before, at, "var(--idle)", `idle and other work for ${duration(at - before)} before step ${span.step}`); idle += at - before; }
      for (const part of span.parts) {
        const lane = lanes.findIndex(([name]) => name === part.name);
        bar(lane, at, at + part.seconds, `var(${lanes[lane][2]})`, `step ${span.step}: ${lanes[lane][1].toLowerCase()} ${duration(part.seconds)}`);
        sums.set(lanes[lane][1], (sums.get(lanes[lane][1]) || 0) + part.seconds);
        at += part.seconds;
      }
      if (span.end - at > all * 0.002) { bar(rows.length - 1, at, span.end, "var(--idle)", `idle and other work for ${duration(span.end - at)} in step ${span.step}`); idle += span.end - at; }
      before = Math.max(span.end, at);
    }
    const ticks = room > 420 ? 4 : 1;
    for (let i = 0; i <= ticks; i++) svg.append(s("text", { x: x(first + (all * i) / ticks), y: rows.length * ROW + 16, class: "tick", "text-anchor": i === 0 ? "start" : i === ticks ? "end" : "middle" }, i ? `+${clock((all * i) / ticks)}` : `step ${spans[0].step}`));
    const words = [...sums].map(([title, seconds]) => `${title.toLowerCase()} ${Math.round((100 * seconds) / all)}%`);
    words.push(`idle and other ${Math.round((100 * idle) / all)}%`);
    svg.setAttribute("aria-label", `Share of the time: ${words.join(", ")}`);
    put(this.box, svg);
    this.text.textContent = `Of ${duration(all)}: ${words.join(", ")}. Point at a bar for its seconds.`;
  }
}

function spanOf(line) {
  const parts = TIMES.filter((name) => line.values[name] > 0).map((name) => ({ name, seconds: line.values[name] }));
  const seconds = parts.reduce((sum, part) => sum + part.seconds, 0);
  return { step: line.step, start: line.time - Math.max(seconds, 0), end: line.time, parts };
}
