"""Attempts by scripted policies: real agents in worlds that come along, through engine, renderer and tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewards.verified import Verified, is_verifier
from rlhf.data import SamplingParams, Task, Trajectory
from rlhf.inference.scripted import ScriptedEngine
from rlhf.recipe.builder import build_part
from rlhf.rollout.episode import run_episode
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.scoring import WeightedReward, score_group
from tests.rollout.small_world import tokenizer

SEARCH: dict[str, Any] = {"kind": "search_qa"}
TOOLS: dict[str, Any] = {"kind": "tools", "questions": ["bill"]}
SQL: dict[str, Any] = {"kind": "text_to_sql"}
CHAT: dict[str, Any] = {"kind": "chat"}
CALLS: dict[str, Any] = {"kind": "tools"}


def built(section: str, values: dict[str, Any], base: Path = Path()) -> Any:
    """A part as a recipe builds it; a verifier becomes a reward as it does there."""
    part = build_part(section, values, section, base=base)
    return Verified(part) if section == "reward" and is_verifier(part) else part


def own_questions(folder: Path, answer: str) -> dict[str, Any]:
    """The settings of `search_qa` for one question of one's own."""
    (folder / "corpus.jsonl").write_text(json.dumps({"text": "nothing much"}))
    asked = {"What?": "train", "What else?": "test"}
    rows = [json.dumps({"question": text, "answer": answer, "split": split}) for text, split in asked.items()]
    (folder / "questions.jsonl").write_text("\n".join(rows))
    return {"kind": "search_qa", "corpus": str(folder / "corpus.jsonl"), "questions": str(folder / "questions.jsonl")}


def own_row(folder: Path, columns: dict[str, Any]) -> dict[str, Any]:
    """The settings of `dataset` for one row of one's own."""
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "What?", "answer": "x", **columns}))
    return {"kind": "dataset", "train": str(folder / "rows.jsonl")}


def first_task(environment: Any) -> Task:
    """The first task of the split `train`."""
    return next(iter(environment.tasks("train")))


def attempt(environment: Any, agent: Any, said: Sequence[str], *, number: int = 0, max_turns: int = 8) -> Trajectory:
    """Attempt the first task, saying `said` turn by turn; the attempt ends after the last of them."""
    lines = iter(said)
    names = tokenizer()
    engine = ScriptedEngine(lambda text: next(lines), tokenizer=names)
    limits = Limits(max_turns=min(len(said), max_turns), max_tokens=4096)
    task = first_task(environment)
    episode = run_episode(task, environment, agent, engine, Renderer(names), limits, SamplingParams(), attempt=number)
    return asyncio.run(episode)


def totals(reward: Any, task: Task, attempts: Sequence[Trajectory]) -> list[float]:
    """What the reward gives each attempt, all of them scored as a group."""
    group = asyncio.run(score_group(task, attempts, {"r": WeightedReward("r", 1.0, reward)}))
    assert not group.failures, group.failures
    return [score.total for score in group.scores]
