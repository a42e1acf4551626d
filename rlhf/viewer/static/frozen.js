// The page in one file: answers to its requests from what the file holds, and searches done here.
const element = document.getElementById("frozen");
const held = element ? JSON.parse(element.textContent) : null;
const PAGE = 60, KEPT = 4, unpacked = new Map();

export const isFrozen = held !== null;
export const start = isFrozen ? `#/${held.start}` : "#/runs";

export async function answer(path, params) {
  const [, , id, what] = path.match(/^(run)\/([^/]*)\/?(.*)$/) || [];
  if (what === "groups") return groups(id, params);
  if (what === "trajectory") return trajectory(id, params);
  if (what === "search") return search(id, params);
  const text = params.toString(), found = held.answers[text ? `${path}?${text}` : path] || (path === "compare" ? compared(params) : held.answers[path]);
  if (!found) throw new Error("This file does not hold that. The run's own files do: rlhf view FOLDER.");
  return found;
}

// Of each two evaluations one order is held; the other is the same the other way round.
function compared(params) {
  const first = params.get("first"), second = params.get("second");
  const turned = held.answers[`compare?${new URLSearchParams({ first: second, second: first })}`];
  if (first === second) return { problem: "These are the same evaluation." };
  if (!turned || turned.problem) return turned;
  return { ...turned, difference: -turned.difference, low: -turned.high, high: -turned.low, n_better: turned.n_worse, n_worse: turned.n_better,
    flipped: turned.flipped.map((one) => ({ ...one, first: one.second, second: one.first })) };
}

// The attempts of a step, as they were packed; the last few stay unpacked.
async function step(id, place) {
  const key = `${id}/${place}`;
  if (!unpacked.has(key)) {
    const packed = (held.files[decodeURIComponent(id)] || {})[place];
    if (!packed) throw new Error("The attempts of this step are not in this file. The run's own files hold them: rlhf view FOLDER.");
    const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
    unpacked.set(key, new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json());
    while (unpacked.size > KEPT) unpacked.delete(unpacked.keys().next().value);
  }
  const found = await unpacked.get(key);
  if (found.problem) throw new Error(found.problem);
  return found;
}

const placeOf = (params) => `${params.get("stage")}:${params.get("phase")}:${params.get("step")}`;

async function groups(id, params) {
  const found = await step(id, placeOf(params)), admits = filter(params);
  const marked = found.groups.map((group) => ({ ...group, attempts: group.attempts.map((one) => ({ ...one, found: admits(one, found.attempts[one.row]) !== null })) }));
  const kept = marked.filter((group) => group.attempts.some((one) => one.found)), offset = Number(params.get("offset")) || 0;
  const n = kept.reduce((sum, group) => sum + group.attempts.filter((one) => one.found).length, 0);
  return { groups: kept.slice(offset, offset + PAGE), n_groups: kept.length, n_attempts: found.n_attempts, n_found: n, offset, page: PAGE };
}

async function trajectory(id, params) {
  const found = await step(id, placeOf(params)), row = Number(params.get("row")), shown = found.attempts[row];
  if (!shown) throw new Error("This attempt is not in this file. The run's own files hold it: rlhf view FOLDER.");
  const siblings = found.groups.flatMap((group) => group.attempts).filter((one) => one.task_id === shown.task_id);
  return { ...shown, siblings, stage: params.get("stage"), phase: params.get("phase"), step: Number(params.get("step")), row };
}

// Attempts of all steps, the newest step first; one step at a call.
async function search(id, params) {
  const places = held.answers[`run/${id}/steps`].stored.flatMap((one) => one.steps.map((n) => ({ stage: one.stage, phase: one.phase, step: n })));
  let asked = filter(params);
  if (params.get("like")) {
    const like = params.get("like").split(":"), same = (await step(id, like.slice(0, 3).join(":"))).groups.flatMap((group) => group.attempts).find((one) => one.row === Number(like[3])).task_id;
    asked = (row) => (row.task_id === same ? "" : null);
  }
  const cursor = Number(params.get("cursor") ?? -1), left = (cursor < 0 ? places.length : cursor) - 1, at = places[left], hits = [], problems = [];
  try {
    const found = await step(id, `${at.stage}:${at.phase}:${at.step}`);
    for (const row of found.groups.flatMap((group) => group.attempts)) {
      const around = asked(row, found.attempts[row.row]);
      if (around !== null) hits.push({ ...row, ...at, around });
    }
  } catch (error) { problems.push(error.message); }
  return { hits, problems, cursor: left || null, left, n_files: places.length };
}

// Tells of an attempt what was found in it, or null where it is not what is looked for.
function filter(params) {
  const asked = (name) => params.get(name) || "", text = asked("text").toLowerCase(), task = asked("task").toLowerCase();
  const outcomes = asked("outcome").split(",").filter(Boolean), least = asked("least"), most = asked("most");
  return (row, attempt) => {
    if (outcomes.length && !outcomes.includes(row.outcome)) return null;
    if (task && !row.task_id.toLowerCase().includes(task)) return null;
    if (least && !(row.score !== null && row.score >= Number(least))) return null;
    if (most && !(row.score !== null && row.score <= Number(most))) return null;
    return !text ? "" : attempt ? around(attempt, text) : null;
  };
}

function around(attempt, text) {
  for (const words of said(attempt)) {
    const at = words.toLowerCase().indexOf(text);
    if (at >= 0) return words.slice(Math.max(0, at - 80), at + text.length + 80);
  }
  return null;
}

function* said(attempt) {
  yield attempt.opening || "";
  yield attempt.detail || "";
  for (const turn of attempt.turns) yield* [turn.action, turn.thought, turn.reply, ...Object.entries(turn.notes).flat()];
}
