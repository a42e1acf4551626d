"""One stored trajectory as plain values for the page: turns, texts, and credit of each token."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhf.data import Generation, Score, Turn
from rlhf.evaluation.folder import PLAN
from rlhf.evaluation.rows import Row, TrajectoryRecord, decode, decode_failure
from rlhf.evaluation.store import StoredStep
from rlhf.evaluation.transcript import load_tokenizer, pieces
from rlhf.viewer.redaction import Redaction, cut_whole

#: What a token can be coloured by, and why where it cannot.
COLOURS = {
    "advantage": "advantages are computed in training alone",
    "logprob": "no tokens were sampled",
    "version": "no tokens were sampled",
    "entropy": "not recorded: the stage's key token_stats stores it for steps of training",
    "gap": "not recorded: the stage's key token_stats stores it for steps of training",
}
#: Sampled tokens of an attempt that are sent one by one; characters of a text that are sent.
MAX_TOKENS, MAX_TEXT = 50_000, 200_000
#: Stands for a sampled token where there is no tokenizer.
UNKNOWN = "▯"


class Tokenizers:
    """The tokenizer of a run, looked for again when a checkpoint may have brought one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._of: tuple[int, Any] = (-1, None)

    def get(self, settings: Mapping[str, Any]) -> Any | None:
        """The run's own, else that of the folder its policy began from or an evaluation's policy; None without any."""
        try:
            changed = max(path.stat().st_mtime_ns for path in (self.folder, *self.folder.glob("checkpoints")))
        except OSError:
            changed = 0
        if self._of[0] != changed or self._of[1] is None:
            found = load_tokenizer(self.folder)
            for path in _policy_folders({**settings, **_plan(self.folder)}) if found is None else ():
                found = found or load_tokenizer(path)
            self._of = (changed, found)
        return self._of[1]


def _plan(folder: Path) -> dict[str, Any]:
    """Plan of an evaluation, `evaluation.yaml`; empty for a run, or where it cannot be read."""
    try:
        found = yaml.safe_load((folder / PLAN).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _policy_folders(settings: Mapping[str, Any]) -> Iterator[Path]:
    """Model folders that the recipe of a run or the plan of an evaluation names."""
    for section, key in (("policy", "path"), ("asked", "checkpoint"), ("asked", "target")):
        part = settings.get(section)
        path = part.get(key) if isinstance(part, dict) else None
        if isinstance(path, str):
            folders = (Path(path), Path(path) / "policy")
            yield from (folder for folder in folders if (folder / "tokenizer.json").is_file())


def failure(row: Row, redaction: Redaction) -> dict[str, Any]:
    """An attempt that ended with an infrastructure error."""
    record = decode_failure(row)
    shown = {
        "task_id": record.task_id,
        "attempt": record.failure.attempt,
        "outcome": str(record.failure.outcome),
        "detail": cut_whole(record.failure.message, MAX_TEXT),
        "is_failure": True,
        "turns": [],
    }
    found: dict[str, Any] = redaction.values(shown)
    return found


def trajectory(row: Row, tokenizer: Any | None, redaction: Redaction, folder: str) -> dict[str, Any]:
    """A trajectory with its score, its turns and their tokens, and the test that plays it in `folder`'s environment."""
    record = decode(row)
    t, score = record.trajectory, record.score
    turns = list(_turns(record, row, tokenizer, redaction))
    has_tokens = any(g["tokens"]["piece"] for turn in turns for g in turn["generations"])
    recorded = {"advantage": record.advantages is not None, "logprob": has_tokens, "version": has_tokens}
    recorded |= {"entropy": record.entropies is not None, "gap": record.gaps is not None}
    shown = {
        "task_id": record.task_id,
        "attempt": t.attempt,
        "outcome": str(t.outcome),
        "detail": cut_whole(t.detail, MAX_TEXT),
        "is_failure": False,
        "opening": _cut(t.opening),
        "n_tokens": t.n_tokens,
        "duration_s": t.duration_s,
        "n_retries": t.n_retries,
        "parent": t.parent,
        "n_shared": t.n_shared,
        "n_given": t.n_given,
        "score": None if score is None else {"total": score.total, **_verdicts(score)},
        "colours": {name: "" if recorded.get(name) else why for name, why in COLOURS.items()},
        "versions": sorted({v for g in t.generations for v in g.versions}),
        "has_tokenizer": tokenizer is not None,
        "test": as_test(folder, record),
    }
    return {**redaction.values(shown), "turns": turns}


def _verdicts(score: Score) -> dict[str, Any]:
    return {
        name: {
            part: {"value": v.value, "why": _cut(v.why), "per_turn": None if v.per_turn is None else list(v.per_turn)}
            for part, v in verdicts.items()
        }
        for name, verdicts in (("parts", score.parts), ("watched", score.monitored))
    }


def _turns(record: TrajectoryRecord, row: Row, tokenizer: Any | None, redaction: Redaction) -> Iterator[dict[str, Any]]:
    position, left = 0, MAX_TOKENS
    t = record.trajectory
    for k, turn in enumerate(t.turns):
        generations = []
        for g in turn.generations:
            of_tokens = {"advantage": record.advantages, "entropy": record.entropies, "gap": record.gaps}
            figures = {name: None if found is None else found[position] for name, found in of_tokens.items()}
            shown = _generation(g, figures, tokenizer, redaction, max(left, 0))
            read = row["generations"][position]["prompt_ids"]
            text = tokenizer.decode(read, skip_special_tokens=False) if tokenizer is not None else ""
            generations.append(
                {
                    **shown,
                    "read": redaction.text(_cut(text)),
                    "n_read": len(read),
                    "is_rewritten": not row["generations"][position]["extends"] and position > 0,
                    "is_masked": bool(g.opponent) or k < t.n_given,
                }
            )
            left, position = left - g.n_tokens, position + 1
        yield {**redaction.values(_words(turn, record.score, k, t.n_given, t.n_shared)), "generations": generations}


def _words(turn: Turn, score: Score | None, k: int, n_given: int, n_shared: int) -> dict[str, Any]:
    thought = turn.action.reply_text
    if turn.action.text and thought.rstrip().endswith(turn.action.text):
        thought = thought.rstrip().removesuffix(turn.action.text)
    return {
        "action": _cut(turn.action.text),
        "parts": [_cut(part) for part in turn.action.parts],
        "thought": _cut(thought.strip()),
        "error": _cut(turn.action.error or ""),
        "notes": {name: _cut(note) for name, note in turn.action.notes.items()},
        "reply": _cut(turn.reply),
        "valid": turn.valid,
        "reward": score.turns[k] if score is not None and k < len(score.turns) else turn.reward,
        "duration_s": turn.duration_s,
        "how": "given" if k < n_given else "shared" if k < n_shared else "",
    }


def _generation(
    g: Generation,
    figures: Mapping[str, Sequence[float] | None],
    tokenizer: Any | None,
    redaction: Redaction,
    left: int,
) -> dict[str, Any]:
    ids = [int(i) for i in g.token_ids][:left]
    if tokenizer is None:  # ids would tell a key, and nothing finds one in them
        shown, hidden = [UNKNOWN] * len(ids), set(range(len(ids)))
    else:
        shown, hidden = redaction.pieces(pieces(tokenizer, ids))
    versions = [v for version, n in g.version_spans for v in [version] * n] or [g.policy_version] * len(ids)
    return {
        "role": redaction.text(g.role),
        "by": redaction.text(g.opponent),
        "finish": str(g.finish),
        "n_tokens": g.n_tokens,
        "tokens": {
            "id": [None if i in hidden else token for i, token in enumerate(ids)],
            "piece": shown,
            "logprob": [_rounded(v) for v in list(g.logprobs)[: len(ids)]],
            **{n: None if found is None else [_rounded(v) for v in found[: len(ids)]] for n, found in figures.items()},
            "version": versions[: len(ids)],
        },
    }


def commands(folder: str, can_play: bool, task: str, attempt: int, at: StoredStep, row: int) -> dict[str, str]:
    """The commands that show this attempt in a terminal, or play on from its last turn, less `--turns`."""
    step = str(at.step)
    look = ["rlhf", "trajectories", folder, "--step", step, "--task", task, "--attempt", str(attempt), "--tokens"]
    found = {"look": shlex.join(look)}
    if can_play:
        found["play"] = shlex.join(["rlhf", "play", folder, "--from", f"{at.stage}:{at.phase}:{step}:{row}"])
    return found


def as_test(folder: str, record: TrajectoryRecord) -> str:
    """A test that plays the actions of an attempt again and expects the outcome it had."""
    actions = [part for turn in record.trajectory.turns if turn.action.error is None for part in turn.action.steps]
    return f"""import asyncio
from pathlib import Path

import pytest
from rlhf.recipe.played import environment_of, is_judged_by_rewards


def test_attempt_is_{record.trajectory.outcome}():
    place = Path({folder!r}), {record.stage!r}
    if is_judged_by_rewards(*place):
        pytest.skip("a reward says what is solved, which the environment does not know")
    environment = environment_of(*place)
    tasks = [task for split in environment.properties.splits for task in environment.tasks(split)]
    task = next(task for task in tasks if task.id == {record.task_id!r})
    actions = {actions!r}

    async def play():
        session, success = environment.start(task), False
        for action in actions:
            result = await session.step(action)
            success = success or bool(result.success)
        await session.close()
        return success

    assert asyncio.run(play()) is {record.trajectory.solved}
"""


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if value == value and abs(value) != float("inf") else None


def _cut(text: str) -> str:
    kept = cut_whole(text, MAX_TEXT)
    return text if kept == text else f"{kept}\n[of {len(text):,} characters]"
