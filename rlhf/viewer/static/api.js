// Requests to the server that this page came from, or to the file that it is; every address is relative.
import { answer as answered, isFrozen, start } from "./frozen.js";

export class Refused extends Error {}

export async function get(path, params = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== undefined && value !== null && value !== "") query.set(name, value);
  }
  if (isFrozen) return answered(path, query);
  const text = query.toString();
  const response = await fetch(`api/${path}${text ? `?${text}` : ""}`, { signal });
  let answer = null;
  try { answer = await response.json(); } catch { /* said below */ }
  if (!response.ok) throw new Refused((answer && (answer.problem || answer.detail && String(answer.detail))) || `The server says ${response.status}.`);
  return answer;
}

export const run = (id) => `run/${encodeURIComponent(id)}`;

// The address behind the #: a view, a run, and what is chosen there; so each state of the page has a link.
export function parse(hash) {
  const [path, query] = (hash || start).replace(/^#\/?/, "").split("?");
  const [view, id] = path.split("/");
  return { view: view || "runs", id: id ? decodeURIComponent(id) : "", params: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function link(view, id = "", params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== undefined && value !== null && value !== "") query.set(name, value);
  }
  const text = query.toString();
  return `#/${view}${id ? `/${encodeURIComponent(id)}` : ""}${text ? `?${text}` : ""}`;
}

export function go(view, id, params, replace = false) {
  const target = link(view, id, params);
  if (replace) {
    history.replaceState(null, "", target);
    return;
  }
  location.hash = target;
}
