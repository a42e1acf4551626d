// One attempt: what was read, thought, done and rewarded, turn by turn, and each sampled token by what it was worth.
import { get, link, run as of } from "./api.js";
import { copyButton, duration, h, number, outcomeClass, outcomeSign, outcomeWords, put, signed } from "./dom.js";
import { hitRow } from "./groups.js";

const COLOURS = { advantage: "Advantage", logprob: "Log-prob", entropy: "Entropy", gap: "Gap", version: "Version" };
const HINTS = {
  advantage: "blue: reinforced, red: discouraged by the update", logprob: "darker: less likely", entropy: "darker: higher entropy", gap: "log-prob of the trainer minus that of the engine, before the update",
  version: "one colour per policy version",
};

const ENDS = { advantage: ["discouraged", "reinforced"], gap: ["engine higher", "trainer higher"] };

export async function showAttempt(main, at) {
  const { stage, phase, step, row } = at.params;
  const own = await get(`${of(at.id)}/trajectory`, { stage, phase, step, row }, at.signal);
  const beside = at.params.beside ? await get(`${of(at.id)}/trajectory`, { ...place(at.params.beside, at.params) }, at.signal).catch(() => null) : null;
  const wanted = at.params.colour || "advantage";
  const colour = own.is_failure || own.colours[wanted] === "" ? wanted : Object.keys(COLOURS).find((name) => own.colours[name] === "") || "advantage";
  const to = (changes) => link("attempt", at.id, { ...at.params, ...changes });
  put(main,
    h("nav", { class: "crumbs", ariaLabel: "Where" }, h("a", { href: link("groups", at.id, { stage, phase, step }) }, `${phase === "eval" ? `Evaluation ${stage}` : `Step ${step}, ${stage}`}`), h("span", { class: "soft" }, ` › attempt ${own.attempt}`)),
    h("div", { class: "heading" }, h("h1", { class: "task" }, h("bdi", null, own.task_id)), siblings(at, own, to)),
    controls(own, colour, to),
    h("div", { class: beside ? "pair" : "" }, pane(own, colour, beside), beside ? pane(beside, colour, own) : null),
    again(at, own));
}

function place(text, params) {
  const [stage, phase, step, row] = text.includes(":") ? text.split(":") : [params.stage, params.phase, params.step, text];
  return { stage, phase, step, row };
}

function siblings(at, own, to) {
  return h("div", { class: "siblings" },
    h("span", { class: "soft" }, "Group "),
    own.siblings.map((one) => h("a", {
      class: `cell ${outcomeClass(one.outcome)}${one.row === own.row ? " here" : ""}`, href: to({ row: one.row, beside: "" }), "aria-current": one.row === own.row ? "true" : null,
      ariaLabel: `attempt ${one.attempt}: ${outcomeWords(one.outcome)}`, title: `attempt ${one.attempt}: ${outcomeWords(one.outcome)}, score ${number(one.score)}${one.parent === null ? "" : `, branched off attempt ${one.parent}`}` }, outcomeSign(one.outcome))),
    own.siblings.length > 1 ? h("select", { ariaLabel: "Compare with another attempt", onchange: (e) => { location.hash = to({ beside: e.target.value }); } },
      h("option", { value: "" }, "Compare with…"),
      own.siblings.filter((one) => one.row !== own.row).map((one) => h("option", { value: one.row, selected: at.params.beside === String(one.row) }, `Compare with attempt ${one.attempt}, ${outcomeWords(one.outcome)}`))) : null);
}

function controls(own, colour, to) {
  if (own.is_failure) return null;
  return h("div", { class: "controls card" },
    h("fieldset", { class: "segments" }, h("legend", { class: "hidden" }, "Colour tokens by"),
      Object.entries(COLOURS).map(([name, title]) => {
        const why = own.colours[name];
        return h("label", { class: why ? "off" : "", title: why || HINTS[name] }, h("input", { type: "radio", name: "colour", value: name, checked: name === colour, disabled: Boolean(why), onchange: () => { location.hash = to({ colour: name }); } }), h("span", null, title, why ? h("small", null, why.startsWith("not recorded") ? "not recorded" : "none") : null));
      })),
    colour in ENDS ? h("span", { class: "legend", title: HINTS[colour] }, ENDS[colour][0], h("span", { class: "scale", "aria-hidden": "true" }), ENDS[colour][1]) : h("span", { class: "legend" }, HINTS[colour]),
    own.has_tokenizer ? null : h("span", { class: "soft" }, "No tokenizer found: the texts of tokens are not shown."));
}

function pane(own, colour, other) {
  const box = h("article", { class: "pane" }), readout = h("output", { class: "readout", "aria-live": "polite" });
  const scale = scaleOf([own, other], colour), tokens = [];
  box.append(summary(own));
  if (own.is_failure) return box;
  const body = h("div", { class: "turns", tabIndex: 0, role: "group", ariaLabel: `Attempt ${own.attempt}: use the arrow keys to walk through the sampled tokens` });
  body.append(said("Opening", own.opening, ""));
  own.turns.forEach((turn, k) => body.append(turnOf(turn, k, own, colour, scale, tokens)));
  body.append(h("div", { class: "turn" }, h("div", { class: "gutter" }, h("b", null, "End")), h("div", { class: "text" }, h("span", { class: `end ${outcomeClass(own.outcome)}` }, `${outcomeSign(own.outcome)} ${outcomeWords(own.outcome)}`), own.detail ? [" ", long(own.detail, "soft")] : null)));
  walk(body, tokens, readout);
  box.append(body, readout);
  return box;
}

function summary(own) {
  const facts = own.is_failure ? [own.detail] : [`${own.turns.length} turns`, `${own.n_tokens} sampled tokens`, duration(own.duration_s), own.versions.length ? `policy version ${own.versions.join(", ")}` : null, own.n_retries ? `${own.n_retries} retries` : null, own.parent === null ? null : `branched off attempt ${own.parent} after ${own.n_shared} turns`];
  const parts = own.score ? [...Object.entries(own.score.parts).map((part) => [...part, ""]), ...Object.entries(own.score.watched).map((part) => [...part, "monitored"])] : [];
  return h("div", { class: "card summary" },
    h("div", { class: "row" }, h("span", { class: `end ${outcomeClass(own.outcome)}` }, `${outcomeSign(own.outcome)} ${outcomeWords(own.outcome)}`), h("b", null, `attempt ${own.attempt}`), own.score ? h("span", { class: "total" }, "score ", h("b", null, signed(own.score.total))) : null, h("bdi", { class: "soft" }, facts.filter(Boolean).join(" · "))),
    parts.length ? h("dl", { class: "verdicts" }, parts.map(([name, verdict, kind]) => h("div", null, h("dt", null, name, kind ? h("small", null, kind) : null), h("dd", null, h("b", null, signed(verdict.value)), verdict.why ? [" ", long(verdict.why, "soft")] : null)))) : null);
}

function said(title, text, more) {
  return h("div", { class: "turn" }, h("div", { class: "gutter" }, h("b", null, title)), h("div", { class: "text" }, long(text, "obs"), more));
}

// A long text is folded: its beginning says what it is.
function long(text, name) {
  if (!text) return null;
  if (text.length < 1200) return h("bdi", { class: name }, text);
  return h("details", { class: "long" }, h("summary", null, h("bdi", { class: name }, `${text.slice(0, 400)}…`), h("span", { class: "soft" }, ` ${text.length.toLocaleString("en")} characters`)), h("bdi", { class: name }, text));
}

function turnOf(turn, k, own, colour, scale, tokens) {
  const why = own.score ? Object.entries(own.score.parts).filter(([, verdict]) => verdict.per_turn && verdict.per_turn[k]).map(([name, verdict]) => `${name} ${signed(verdict.per_turn[k])}`) : [];
  const gutter = h("div", { class: "gutter" }, h("b", null, `Turn ${k + 1}`),
    turn.reward ? h("span", { class: `reward ${turn.reward > 0 ? "up" : "down"}`, title: "weighted reward of this turn" }, signed(turn.reward)) : null,
    why.map((words) => h("span", { class: "soft" }, words)),
    turn.how ? h("span", { class: "soft", title: turn.how === "given" ? "played before the policy took over" : `in common with attempt ${own.parent}` }, turn.how) : null,
    turn.valid ? null : h("span", { class: "bad" }, "invalid"),
    turn.duration_s ? h("span", { class: "soft" }, duration(turn.duration_s)) : null);
  const text = h("div", { class: "text" });
  for (const generation of turn.generations) text.append(generationOf(generation, turn, k, colour, scale, tokens));
  for (const [name, note] of Object.entries(turn.notes)) text.append(h("div", { class: "note" }, h("b", null, name), long(note, "")));
  if (turn.error) text.append(h("div", { class: "note wrong" }, h("b", null, "invalid action"), h("bdi", null, turn.error)));
  if (turn.thought && turn.thought !== turn.action) text.append(h("details", { class: "thought" }, h("summary", null, "Thought"), h("bdi", null, turn.thought)));
  const bare = (words) => words.replace(/<\|[^|>]*\|>|<\/?s>|<(eos|pad)>/g, "").trim();
  const isSaid = turn.generations.length === 1 && bare(turn.generations[0].tokens.piece.join("")) === turn.action.trim();
  const steps = turn.parts.length ? turn.parts : isSaid ? [] : [turn.action];
  text.append(...steps.filter(Boolean).map((step) => h("div", { class: "act" }, h("span", { class: "soft", "aria-hidden": "true" }, "› "), h("span", { class: "hidden" }, "action "), long(step, ""))));
  text.append(h("div", { class: "reply" }, long(turn.reply, "obs")));
  return h("div", { class: "turn" }, gutter, text);
}

function generationOf(g, turn, k, colour, scale, tokens) {
  const box = h("div", { class: `generation${g.is_masked ? " masked" : ""}` });
  if (g.role || g.by || g.is_rewritten) box.append(h("span", { class: "tag" }, [g.role, g.by ? `by ${g.by}, not trained on` : "", g.is_rewritten ? "the prompt was rewritten" : ""].filter(Boolean).join(" · ")));
  box.append(h("details", { class: "read" }, h("summary", null, `${g.n_read.toLocaleString("en")} prompt tokens`), h("bdi", null, g.read || "No tokenizer stored: their text is not known.")));
  const line = h("div", { class: "tokens" });
  g.tokens.piece.forEach((piece, i) => {
    const token = { piece, k, i, n: g.n_tokens, id: g.tokens.id[i], logprob: g.tokens.logprob[i], advantage: figure(g, "advantage", i), entropy: figure(g, "entropy", i), gap: figure(g, "gap", i), version: g.tokens.version[i], masked: g.is_masked };
    const element = h("span", { class: "t" }, piece);
    paint(element, token, colour, scale);
    token.element = element;
    element.dataset.at = tokens.length;
    tokens.push(token);
    line.append(element);
  });
  if (g.n_tokens > g.tokens.piece.length) line.append(h("span", { class: "soft" }, ` … ${(g.n_tokens - g.tokens.piece.length).toLocaleString("en")} more tokens`));
  if (g.finish === "length") line.append(h("span", { class: "bad" }, " truncated"));
  box.append(line);
  return box;
}

// A figure of a token; null where none was stored, or the trainer does not train on it.
const figure = (g, name, i) => (g.tokens[name] ? g.tokens[name][i] : null);

function scaleOf(attempts, colour) {
  let most = 0;
  const versions = new Set();
  for (const own of attempts.filter(Boolean)) for (const turn of own.turns) for (const g of turn.generations) {
    for (const v of g.tokens[colour] || []) if (v !== null) most = Math.max(most, Math.abs(v));
    for (const v of g.tokens.version) versions.add(v);
  }
  return { most: colour === "logprob" ? Math.min(most || 1, 4) : most || 1, versions: [...versions].sort((a, b) => a - b) };
}

function paint(element, token, colour, scale) {
  if (token.masked) return;
  const value = token[colour];
  if (colour in ENDS && value) {
    element.classList.add(value > 0 ? "up" : "down");
    element.style.setProperty("--a", Math.max(0.08, Math.min(1, Math.abs(value) / scale.most)).toFixed(3));
  } else if ((colour === "logprob" || colour === "entropy") && value !== null) {
    element.classList.add("sure");
    element.style.setProperty("--a", Math.min(1, Math.abs(value) / scale.most).toFixed(3));
  } else if (colour === "version") {
    element.classList.add(`v${scale.versions.indexOf(token.version) % 6}`);
  }
}

// Walk through the tokens by keys or pointer; what each was stands below.
function walk(body, tokens, readout) {
  let current = -1;
  const show = (i) => {
    if (tokens[current]) tokens[current].element.classList.remove("current");
    current = Math.max(0, Math.min(tokens.length - 1, i));
    const token = tokens[current];
    if (!token) return;
    token.element.classList.add("current");
    const words = [`token ${current + 1} of ${tokens.length}`, `turn ${token.k + 1}`, token.id === null ? "redacted" : `id ${token.id}`, token.logprob === null ? null : `log-prob ${number(token.logprob)} (${number(100 * Math.exp(token.logprob))}%)`, `advantage ${token.advantage === null ? "not recorded" : signed(token.advantage)}`, token.entropy === null ? null : `entropy ${number(token.entropy)}`, token.gap === null ? null : `gap ${signed(token.gap)}`, token.version === -1 ? "demonstrated" : `version ${token.version}`, token.masked ? "not trained on" : null];
    put(readout, h("code", null, JSON.stringify(token.piece)), " ", words.filter(Boolean).join(" · "));
    return token;
  };
  put(readout, tokens.length ? `${tokens.length} sampled tokens. Point at one, or press an arrow key.` : "No tokens were sampled in this attempt.");
  body.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -tokens.length, End: tokens.length }[event.key];
    if (!move || !tokens.length || event.target.closest("summary, a, button, select")) return;
    event.preventDefault();
    show(current + move).element.scrollIntoView({ block: "nearest" });
  });
  body.addEventListener("mouseover", (event) => {
    const element = event.target.closest(".t");
    if (element) show(Number(element.dataset.at));
  });
}

function again(at, own) {
  const same = h("div", { class: "same" }), { stage, phase, step, row } = at.params;
  const look = h("button", { type: "button", onclick: async () => {
    look.disabled = true;
    const like = `${stage}:${phase}:${step}:${row}`, rows = [];
    let cursor = -1;
    try {
      do {
        const found = await get(`${of(at.id)}/search`, { like, cursor }, at.signal);
        rows.push(...found.hits.filter((hit) => !(hit.stage === stage && hit.phase === phase && String(hit.step) === String(step))).map((hit) => hitRow(at, hit)));
        cursor = found.cursor;
        put(same, h("p", { class: "soft" }, `${rows.length} attempts at this task elsewhere${cursor === null ? "." : ", searching…"}`), rows.length ? h("div", { class: "scroll", tabIndex: 0, role: "region", ariaLabel: "The same task elsewhere" }, h("table", { class: "groups cards" }, h("thead", null, h("tr", null, ["Attempt", "Where", "Score", "Turns", "Task", "Found"].map((title) => h("th", { scope: "col" }, title)))), h("tbody", null, rows))) : null);
      } while (cursor !== null && rows.length < 200);
    } catch (error) { if (error.name !== "AbortError") put(same, h("p", { class: "soft" }, error.message)); }
    look.disabled = false;
  } }, "This task at other steps");
  const { commands } = own;
  return h("section", { class: "card again" }, h("h2", null, "Reproduce"),
    h("div", { class: "buttons" }, look, own.test ? copyButton(() => own.test, "Copy as a test") : null, copyButton(() => commands.look, "Copy terminal command")),
    commands.play && own.turns.length ? playOn(own) : null, same);
}

// The command that plays the first turns again and then asks a person.
function playOn(own) {
  const last = own.turns.length - 1, turns = h("input", { type: "number", min: 0, max: own.turns.length, value: last, oninput: () => tell() });
  const command = () => `${own.commands.play} --turns ${Math.max(0, Math.min(own.turns.length, Math.round(Number(turns.value) || 0)))}`;
  const words = h("code"), tell = () => put(words, command());
  tell();
  return h("div", { class: "play" }, h("label", null, "Play on after turn ", turns), copyButton(command, "Copy the command"), h("pre", { tabIndex: 0 }, words));
}

