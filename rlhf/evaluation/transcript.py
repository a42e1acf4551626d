"""Token-level HTML transcripts: prompt tokens in grey, sampled ones coloured by advantage.

All text of models and environments is escaped. Pieces of text are shown as the tokenizer of the run's newest checkpoint
gives them; without one the ids are shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlhf.data import Generation, Outcome
from rlhf.digests import verify_model
from rlhf.evaluation.store import StoredStep, TrajectoryRecord, list_steps, read_trajectories
from rlhf.evaluation.wording import number_text

#: A prompt longer than this is folded away.
MAX_OPEN_PROMPT = 220
#: Steps from each end of training in which a solved and an unsolved trajectory are looked for.
MAX_LOOKED_AT = 16
#: Tokens before one that decide how it is decoded, far more than any tokenizer looks back.
_CONTEXT = 64
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)} | {127: "␡"}


def choose(folder: Path) -> list[tuple[str, TrajectoryRecord]]:
    """Pick up to six stored trajectories that tell the story of a run, each with a caption.

    The start and the end of training give one unsolved and one solved each, preferring those that carry advantages
    other than zero; the first and last evaluation give one each.
    """
    training = sorted((s for s in list_steps(folder) if s.phase == "train"), key=lambda s: (s.step, s.stage))
    half = (len(training) + 1) // 2
    picked = []
    for end in (training[:half], training[half:][::-1]):
        for solved in (False, True):
            if (record := _first_where(folder, end[:MAX_LOOKED_AT], solved)) is not None:
                picked.append((f"Training, step {record.step}: {'solved' if solved else 'not solved'}", record))
    return picked + _choose_evaluated(folder)


def _first_where(folder: Path, files: Sequence[StoredStep], solved: bool) -> TrajectoryRecord | None:
    """Find a trajectory in the first of these files that has one of the wanted outcome."""
    wanted = [o for o in Outcome if (o is Outcome.SOLVED) is solved and not o.is_failure_of_a_part]
    for stored in files:
        found = read_trajectories(folder, stage=stored.stage, phase="train", steps=[stored.step], outcomes=wanted)
        own = (record for record in found if not record.trajectory.is_demonstration)
        if record := max(own, key=_signal, default=None):
            return record
    return None


def _choose_evaluated(folder: Path) -> list[tuple[str, TrajectoryRecord]]:
    evaluated = sorted(
        (s for s in list_steps(folder) if s.phase == "eval"), key=lambda s: (s.step, s.stage != "before")
    )
    picked = []
    ends = [evaluated[0], evaluated[-1]] if len(evaluated) > 1 else evaluated
    for stored, wanted in zip(ends, (False, True), strict=False):  # with one evaluation there is one end
        records = list(read_trajectories(folder, stage=stored.stage, phase="eval", steps=[stored.step], limit=64))
        if records:
            record = next((r for r in records if r.trajectory.solved is wanted), records[0])
            words = "solved" if record.trajectory.solved else "not solved"
            picked.append((f"Evaluation, {stored.stage}: {words}", record))
    return picked


def _signal(record: TrajectoryRecord) -> float:
    return max((abs(a) for row in record.advantages or () for a in row), default=0.0)


def load_tokenizer(run_folder: Path) -> Any | None:
    """Newest readable `tokenizer.json` below a run folder, or None."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    for path in sorted(
        Path(run_folder).rglob("tokenizer.json"), key=lambda p: (p.stat().st_mtime, str(p)), reverse=True
    ):
        try:
            verify_model(path.parent, weights=False)
            return Tokenizer.from_file(str(path))
        except Exception:  # the tokenizers library raises plain Exception; ids are shown instead
            continue
    return None


def pieces(tokenizer: Any | None, token_ids: Sequence[int]) -> list[str]:
    """Give the text that each token adds to the decoded text.

    A token that ends inside a character adds none: it is shown by its name in the vocabulary, else by its id.
    """
    if tokenizer is None:
        return [f"[{i}]" for i in token_ids]
    shown: list[str] = []
    first, before = 0, ""  # decoding begins here, so that a long text takes no square of its length
    for k in range(1, len(token_ids) + 1):
        text = tokenizer.decode(list(token_ids[first:k]), skip_special_tokens=False)
        added = text[len(before) :] if text.startswith(before) and not text.endswith("�") else ""
        before = before + added
        shown.append(added or tokenizer.id_to_token(token_ids[k - 1]) or f"[{token_ids[k - 1]}]")
        if added and k - first >= 2 * _CONTEXT:
            first = k - _CONTEXT
            before = tokenizer.decode(list(token_ids[first:k]), skip_special_tokens=False)
    return shown


def transcript(record: TrajectoryRecord, tokenizer: Any | None, scale: float) -> str:
    """Return one trajectory as HTML.

    Args:
        record: the trajectory, with its advantages where it has any.
        tokenizer: a `tokenizers.Tokenizer`, or None.
        scale: the absolute advantage that gets the full colour.
    """
    rows = "".join(_turns(record, tokenizer, scale))
    summary = f"{record.task_id}, {record.trajectory.outcome}"
    return (
        f'<div class="tokens" tabindex="0" role="group" aria-label="{_clean(summary)}: use the arrow keys to walk '
        f'through the sampled tokens">{rows}</div><output class="readout" aria-live="polite"></output>'
    )


def _turns(record: TrajectoryRecord, tokenizer: Any | None, scale: float) -> Iterator[str]:
    before: tuple[int, ...] = ()
    position = 0
    trajectory = record.trajectory
    for k, turn in enumerate(trajectory.turns):
        parts = []
        for generation in turn.generations:
            row = record.advantages[position] if record.advantages is not None else None
            parts.append(_read(generation, before, tokenizer) + _sampled(generation, row, tokenizer, scale))
            before, position = generation.full_ids, position + 1
        for name, note in turn.action.notes.items():
            parts.append(f'<span class="obs"><b>{_clean(name)}</b>: {_clean(note)}</span>')
        if not turn.generations:
            parts.append(f'<span class="obs">{_clean(turn.action.text)}</span>')
        reward = record.score.turns[k] if record.score is not None else turn.reward
        notes = [f'<span class="reward {"up" if reward > 0 else "down"}">reward {reward:+.3g}</span>'] if reward else []
        if k < trajectory.n_given:
            notes.append('<span class="soft" title="played before the policy took over">given</span>')
        elif k < trajectory.n_shared:
            title = f"replayed: in common with attempt {trajectory.parent}"
            notes.append(f'<span class="soft" title="{title}">shared</span>')
        if not turn.valid:
            notes.append(f'<span class="bad" title="{_clean(turn.action.error or "not understood")}">invalid</span>')
        yield (
            f'<div class="turn"><div class="gutter"><b>Turn {k + 1}</b>{"".join(notes)}</div>'
            f'<div class="text">{"".join(parts)}</div></div>'
        )
    last = trajectory.turns[-1].reply if trajectory.turns else trajectory.opening
    detail = f" ({_clean(trajectory.detail)})" if trajectory.detail else ""
    yield (
        '<div class="turn"><div class="gutter"><b>End</b></div><div class="text">'
        f'<span class="obs">{_clean(last)}</span><span class="end">{trajectory.outcome}{detail}</span></div></div>'
    )


def spoken(record: TrajectoryRecord) -> str:
    """Return one trajectory as HTML in words alone: what the environment said, and what the policy did.

    It takes no tokenizer, and so it shows policies that sample no tokens as it shows models.
    """
    t = record.trajectory
    rows = [_said("", t.opening)]
    for k, turn in enumerate(t.turns):
        reward = record.score.turns[k] if record.score is not None else turn.reward
        notes = f'<span class="reward {"up" if reward > 0 else "down"}">reward {reward:+.3g}</span>' if reward else ""
        if not turn.valid:
            notes += f'<span class="bad" title="{_clean(turn.action.error or "not understood")}">invalid</span>'
        text = turn.action.text or turn.action.error or ""
        rows.append(_said(f"<b>Turn {k + 1}</b>{notes}", turn.reply, f'<div class="act said">{_clean(text)}</div>'))
    detail = f" ({_clean(t.detail)})" if t.detail else ""
    end = f'<span class="end">{t.outcome}{detail}</span>'
    rows.append(f'<div class="turn"><div class="gutter"><b>End</b></div><div class="text">{end}</div></div>')
    return f'<div class="words">{"".join(rows)}</div>'


def _said(gutter: str, reply: str, action: str = "") -> str:
    text = f'{action}<span class="obs">{_clean(reply)}</span>'
    return f'<div class="turn"><div class="gutter">{gutter}</div><div class="text">{text}</div></div>'


def _read(generation: Generation, before: tuple[int, ...], tokenizer: Any | None) -> str:
    """Rendered prompt tokens since the last generation; the whole prompt if it was rewritten."""
    prompt = generation.prompt.token_ids
    extends = prompt[: len(before)] == before
    new = prompt[len(before) :] if extends else prompt
    text = _clean(_decoded(tokenizer, new))
    span = f'<span class="obs" title="{len(new)} tokens the model read">{text}</span>'
    if extends and len(new) <= MAX_OPEN_PROMPT:
        return span
    words = "prompt" if extends else "context rewritten: the whole prompt"
    return f"<details><summary>{words}, {len(new)} tokens</summary>{span}</details>"


def _decoded(tokenizer: Any | None, token_ids: Sequence[int]) -> str:
    if tokenizer is None:
        return " ".join(f"[{i}]" for i in token_ids)
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))


def _sampled(generation: Generation, advantages: Sequence[float] | None, tokenizer: Any | None, scale: float) -> str:
    parts = []
    for k, piece in enumerate(pieces(tokenizer, generation.token_ids)):
        logprob = generation.logprobs[k]
        words = f"id {generation.token_ids[k]}, log-prob {logprob:.3f} (p {math.exp(logprob):.3f})"
        sign, strength = "", 0.0
        if advantages is not None:
            words += f", advantage {number_text(advantages[k])}"
            sign = " up" if advantages[k] > 0 else " down" if advantages[k] < 0 else ""
            strength = min(1.0, abs(advantages[k]) / scale) if scale > 0 else 0.0
        shade = f' style="--a:{0.12 + 0.88 * strength:.2f}"' if sign else ""
        shown = _clean(piece).replace("\n", "↵\n")
        parts.append(f'<span class="t{sign}"{shade} title="{_clean(repr(piece))}, {words}">{shown}</span>')
    cut = '<span class="bad" title="cut by limits.max_tokens">cut</span>' if generation.finish == "length" else ""
    asked = ", ".join(filter(None, [generation.role, generation.by and f"by {generation.by}"]))
    role = f'<span class="soft">{_clean(asked)}</span> ' if asked else ""
    return f'<div class="act">{role}{"".join(parts)}{cut}</div>'


def _clean(text: str) -> str:
    """Escape for HTML, and make control characters visible."""
    return escape(text.translate(_CONTROLS))
