// Elements and texts. Whatever comes from a run is put in as text, never as markup.
const SVG = "http://www.w3.org/2000/svg";

export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "class") element.setAttribute("class", value);
    else if (name in element && !(element instanceof SVGElement) && name !== "list") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) add(element, child);
    else if (child instanceof Node) element.append(child);
    else if (child !== null && child !== undefined && child !== false) element.append(shown(String(child)));
  }
}

// Characters that would steer or turn around the text of the page are made visible.
export function shown(text) {
  return text
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/\u007f/g, "␡")
    .replace(/[\u0080-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (c) => `<${c.charCodeAt(0).toString(16).padStart(4, "0")}>`);
}

export function put(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

export const number = (value, digits = 3) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "";
  if (size >= 10000) return sign + Math.round(size).toLocaleString("en");
  if (size !== 0 && size < 0.0001) return sign + size.toExponential(1).replace("e-", "e−");
  return sign + String(Number(size.toPrecision(digits)));
};
// At most one decimal; what is near 0 or 100 is never rounded to it.
export function percent(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.0005) return "<0.1%";
  if (value >= 0.9995 && value < 1) return ">99.9%";
  return `${Number((100 * value).toFixed(1))}%`;
}
export const signed = (value) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : value < 0 ? "−" : "") + number(Math.abs(value)));
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
// A span of time that ticks of an axis tell apart: 3:07, or 45 s.
export function clock(seconds) {
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  return whole < 3600 ? `${Math.floor(whole / 60)}:${two(whole % 60)}` : `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)} h`;
}
export const within = (low, high) => (low === null || low === undefined ? "" : `95% interval ${percent(low)} to ${percent(high)}`);

export const OUTCOMES = {
  solved: ["✓", "solved"],
  failed: ["✗", "not solved"],
  turn_limit: ["…", "turn limit reached"],
  token_limit: ["≡", "context full"],
  timeout: ["⧖", "timed out"],
  env_error: ["!", "environment error"],
  agent_error: ["!", "agent error"],
  engine_error: ["!", "engine error"],
  reward_error: ["!", "reward error"],
};
export const outcomeWords = (outcome) => (OUTCOMES[outcome] || ["?", outcome])[1];
export const outcomeSign = (outcome) => (OUTCOMES[outcome] || ["?", outcome])[0];
export const outcomeClass = (outcome) => (outcome === "solved" ? "solved" : outcome in OUTCOMES && !outcome.endsWith("error") && outcome !== "timeout" ? "failed" : "broken");

export function badge(state) {
  const words = { running: "running", finished: "finished", stopped: "stopped", gone: "deleted" };
  return h("span", { class: `state ${state}` }, words[state] || state);
}

// A table; of more rows than `options.most` the first are shown until all are asked for.
export function table(caption, columns, rows, options = {}) {
  const more = rows.length > options.most ? rows.slice(options.most) : [];
  more.forEach((row) => { row.hidden = true; });
  const all = h("button", { type: "button", class: "all", onclick: () => { more.forEach((row) => { row.hidden = false; }); all.remove(); } }, `Show all ${rows.length}`);
  return h("div", { class: "scroll", tabIndex: 0, role: "region", ariaLabel: caption },
    h("table", { class: options.class },
      h("caption", { class: options.showCaption ? "" : "hidden" }, caption),
      h("thead", null, h("tr", null, columns.map((c) => h("th", { scope: "col", class: c.n ? "n" : "" }, c.title)))),
      h("tbody", null, rows)),
    more.length ? all : null);
}

export function copyButton(textOf, words) {
  const button = h("button", { type: "button", class: "copy", onclick: async () => {
    let done = true;
    const text = textOf();
    try { await navigator.clipboard.writeText(text); } catch { done = fallback(text); }
    button.textContent = done ? "Copied" : "Copying is blocked: select the text";
    setTimeout(() => { button.textContent = words; }, 1600);
  } }, words);
  return button;
}

function fallback(text) {
  const area = h("textarea", { value: text, class: "hidden" });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
