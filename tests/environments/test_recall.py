"""What worlds say is worth remembering: enough to act on, and no longer however long the episode."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from environments.contrib.composite_tasks import Objectives
from environments.contrib.long_memory import LongMemory, worth_keeping


async def play(episode: Any, actions: list[str]) -> str:
    """What is said last."""
    reply = episode.opening.reply
    for action in actions:
        reply = (await episode.step(action)).reply
    return str(reply)


def test_the_newest_of_what_was_said_holds() -> None:
    said = ["Mia is in Rome. Ben is in Oslo.", "A red ball is a dax.", "Mia is now in Paris.", "The day is calm."]
    assert worth_keeping(said) == "Ben Oslo; Mia Paris; red dax"


def test_facts_answer_the_questions_that_ask_for_them() -> None:
    made = LongMemory(abilities=("retrieval", "conflict"), n_questions=3, distance=6)
    assert hasattr(made, "recall")
    for task in made.tasks("test")[:20]:
        plan = list(made.plan(task, ()) or ())
        kept = dict(pair.split() for pair in made.recall(task, plan[:-3]).split("; "))
        for k in range(len(plan) - 3, len(plan)):
            said = asyncio.run(play(made.start(task), plan[:k]))
            assert kept[said.split("where is ")[1].rstrip("?")] == plan[k]
        lengths = [len(made.recall(task, plan[:k])) for k in range(len(plan))]
        assert max(lengths) <= 14 * made.n_facts  # "Clara Athens; "


@pytest.mark.parametrize("mode", ["in_turn", "together"])
def test_objectives_say_what_is_asked_whom_to_look_up_and_what_was_found(mode: str) -> None:
    made = Objectives(k=3, hops=2, mode=mode)  # type: ignore[arg-type]
    task = made.tasks("train")[0]
    plan = list(made.plan(task, ()) or ())
    for k, action in enumerate(plan):
        kept = made.recall(task, plan[:k])
        if action.startswith("look up"):
            assert action.removeprefix("look up ") in re.findall(r"\w+", kept)
        else:
            assert [one.strip() for one in action.removeprefix("answer ").split(";")] == [
                one.split()[-1].strip() for one in kept.split(";")
            ]
    assert Objectives(environment=LongMemory(), k=2).recall(task, ()) == ""
