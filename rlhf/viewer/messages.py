"""Stored attempts as conversations: what other tools' formats are made of, redacted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.data import Generation, Outcome, Trajectory
from rlhf.data.generation import calls_of, joined
from rlhf.evaluation.rows import TrajectoryRecord, decode, decode_failure
from rlhf.evaluation.store import StoredStep
from rlhf.viewer.library import ShownRun
from rlhf.viewer.redaction import Redaction

#: Words for speakers in the control tokens of chat templates, or in the text behind them.
_ROLES = {
    **{"system": "system", "developer": "system", "user": "user", "human": "user", "inst": "user"},
    **{"assistant": "assistant", "model": "assistant", "tool": "tool", "ipython": "tool"},
    **{"observation": "tool", "chatbot": "assistant"},
}
_IN_TOKEN = re.compile(rf"(?<![a-z/])({'|'.join(_ROLES)})(?![a-z]|[_▁]calls?)")
_IN_TEXT = re.compile(rf"\s*({'|'.join(_ROLES)})\s*(?:\n|$)")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One attempt as messages.

    Attributes:
        task_id: the task attempted.
        attempt: number of it.
        outcome: how it ended.
        detail: what there is to say of that.
        messages: `role` and `content` each: what the policy read, as the control tokens of its template part it, and
            what it sampled, call by call. What a call repeats of the one before is left out. Without the tokens or the
            tokenizer, what agent and environment said in turns; the environment is the user.
        parts: value and reason of each reward.
        facts: plain figures of it.
    """

    task_id: str
    attempt: int
    outcome: Outcome
    detail: str
    messages: list[dict[str, str]]
    parts: dict[str, dict[str, Any]]
    facts: dict[str, Any]


def conversations(run: ShownRun, stored: StoredStep, redaction: Redaction) -> Iterator[Conversation]:
    """The attempts of a step, one at a time.

    Raises:
        DataError: the file cannot be read.
    """
    tokenizer = run.tokenizers.get(run.poll().settings)
    for row in run.attempts.records(stored):
        if row["turns"] is None:  # a failure of which no more is known
            failed = decode_failure(row)
            failure, text = failed.failure, redaction.text
            yield Conversation(
                text(failed.task_id), failure.attempt, failure.outcome, text(failure.message), [], {}, {}
            )
        else:
            yield _conversation(decode(row), tokenizer, redaction)


def _conversation(record: TrajectoryRecord, tokenizer: Any | None, redaction: Redaction) -> Conversation:
    t, score = record.trajectory, record.score
    parts = {} if score is None else {**score.parts, **score.monitored}
    used = [g.usage or (g.prompt.n_tokens, g.n_tokens) for g in t.generations]
    plain: dict[str, Any] = redaction.values(
        {
            "task_id": record.task_id,
            "detail": t.detail,
            "messages": _sampled(t, tokenizer) or list(_in_turns(t)),
            "parts": {name: {"value": verdict.value, "why": verdict.why} for name, verdict in parts.items()},
            "facts": {
                "score": None if score is None else score.total,
                "rewards": list(score.turns) if score is not None else [turn.reward for turn in t.turns],
                "n_turns": len(t.turns),
                "n_tokens": t.n_tokens,
                "n_read": sum(n_read for n_read, _ in used),
                "n_context": max(map(sum, used), default=0),
                "seconds": t.duration_s,
                "versions": sorted({v for g in t.generations for v in g.versions}),
                "parent": t.parent,
                "end": t.turns[-1].reply if t.turns else "",
                "finish": str(t.generations[-1].finish) if t.generations else None,
                "notes": [dict(turn.action.notes) for turn in t.turns],
            },
        }
    )
    return Conversation(attempt=t.attempt, outcome=t.outcome, **plain)


def _in_turns(t: Trajectory) -> Iterator[dict[str, str]]:
    reply = t.opening
    for turn in t.turns:
        yield {"role": "user", "content": reply}
        yield {"role": "assistant", "content": turn.action.reply_text or turn.action.text}
        reply = turn.reply


def _sampled(t: Trajectory, tokenizer: Any | None) -> list[dict[str, str]]:
    """Messages by the tokens read and sampled; none where they are not known."""
    if tokenizer is None or any(g.usage is not None for g in t.generations):
        return []
    special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    found: list[dict[str, str]] = []
    earlier: list[Generation] = []
    for said in map(joined, calls_of([g for g in t.generations if not g.opponent])):
        before = next((one for one in reversed(earlier) if said.prompt.extends(one)), None)
        n_known = 0 if before is None else before.length
        read, ids = _read(tokenizer, special, said.prompt.ids[n_known:].tolist()), said.ids.tolist()
        if not read or read[-1]["role"] != "assistant":  # which is the header of the reply
            read.append({"role": "assistant", "content": ""})
        read[-1]["content"] += _decoded(tokenizer, ids[:-1] if ids and ids[-1] in special else ids)
        found += read
        earlier.append(said)
    return found


def _read(tokenizer: Any, special: Mapping[int, str], ids: Sequence[int]) -> list[dict[str, str]]:
    """Messages of a part of a prompt; the last may be the header of a reply, with what a template begins it with."""
    found: list[dict[str, str]] = []
    begin = 0
    for end in [i for i, token in enumerate(ids) if token in special] + [len(ids)]:
        text = _decoded(tokenizer, ids[begin:end])
        token = special[ids[begin - 1]].lower() if begin else ""
        parts = "end" not in token and "sep" not in token
        named = _IN_TOKEN.search(token) if parts else None
        if named is None and token and parts and (named := _IN_TEXT.match(text)):
            text = text[named.end() :]
        if named is not None:
            found.append({"role": _ROLES[named[1]], "content": text})
        elif found:
            found[-1]["content"] += text
        elif text.strip():
            found.append({"role": "user", "content": text})
        begin = end + 1
    whole = [{**message, "content": message["content"].strip()} for message in found[:-1]]
    last = [{**message, "content": message["content"].lstrip()} for message in found[-1:]]
    return [message for message in whole if message["content"]] + last


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))
