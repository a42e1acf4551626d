// The curves of a run as they grow: loaded once, then fed by the stream.
import { get, run } from "./api.js";

export class Curves {
  constructor(id, names) {
    this.id = id;
    this.names = new Set(names);
    this.clear();
  }

  clear() {
    this.epoch = 0;
    this.nLines = 0;
    this.lines = [];
  }

  async load(signal) {
    const names = [...this.names].join(",");
    const found = await get(`${run(this.id)}/metrics`, { names }, signal);
    this.clear();
    this.take(found);
    this.epoch = found.epoch;
    return this;
  }

  take(found) {
    const columns = Object.entries(found.values);
    for (let i = 0; i < found.step.length; i++) {
      const line = { stage: found.stages[found.stage[i]], step: found.step[i], time: found.time[i], values: {} };
      for (const [name, values] of columns) if (values[i] !== null) line.values[name] = values[i];
      this.lines.push(line);
    }
    this.nLines = found.n_lines;
  }

  get stages() {
    return [...new Set(this.lines.map((line) => line.stage))];
  }

  // Points of some metrics, of one stage or of all: xs count steps from the first stage that has one of them.
  // An evaluation before the stage stands at its beginning.
  series(names, stage = "") {
    const begun = this.lines.findIndex((line) => line.stage === stage);
    const before = this.lines.slice(0, Math.max(begun, 0)).filter((line) => "eval/success" in line.values).pop();
    const rows = this.lines.filter((line) => names.some((name) => name in line.values) && (!stage || line.stage === stage || line === before));
    if (stage) {
      const xs = rows.map((line) => (line.stage === stage ? line.step : 0));
      return { xs, values: names.map((name) => rows.map((line) => (name in line.values ? line.values[name] : null))) };
    }
    const most = new Map();
    for (const line of rows) most.set(line.stage, Math.max(most.get(line.stage) || 0, line.step));
    const begins = new Map();
    let at = 0;
    for (const [stage, n] of most) { begins.set(stage, at); at += n; }
    const xs = rows.map((line) => begins.get(line.stage) + line.step);
    return { xs, values: names.map((name) => rows.map((line) => (name in line.values ? line.values[name] : null))) };
  }

  has(name) {
    return this.lines.some((line) => name in line.values);
  }

  matching(prefix) {
    const found = new Set();
    for (const line of this.lines) for (const name of Object.keys(line.values)) if (name.startsWith(prefix)) found.add(name);
    return [...found].sort();
  }

  last(name) {
    for (let i = this.lines.length - 1; i >= 0; i--) if (name in this.lines[i].values) return this.lines[i].values[name];
    return null;
  }
}
