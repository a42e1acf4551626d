"""A manager and an answering agent over conversations: what each is shown, and that the oracle's operations suffice."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from agents.base import History
from agents.chat import ChatAgent
from agents.memory.base import DemonstrationInputs
from agents.memory.contrib.managed import Managed, bank_of
from environments.base import StepResult
from environments.contrib.long_memory import LongMemory
from rlhf.data import Message, Task, Turn
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer
from rlhf.training.stages import demonstrations
from tests.agents.spoken import Says, Speaks
from tests.training.tiny import policy as tiny_policy


def two(manager: list[str], agent: list[str]) -> Speaks:
    """A manager and an agent, each saying its own lines in order; after its last one, the manager says nothing new."""
    return Speaks(agent, memory=manager, last='{"op": "NOOP"}')


def play(memory: Managed, policy: Speaks, said: list[str]) -> tuple[Turn, ...]:
    turns: tuple[Turn, ...] = ()
    for i in range(len(said)):
        history = History(Task("t"), said[0], turns)
        action = asyncio.run(ChatAgent(system="", memory=memory).act(history, policy))
        turns = (*turns, Turn(action, said[i + 1] if i + 1 < len(said) else "The end."))
    return turns


def add(text: str) -> str:
    return json.dumps({"op": "ADD", "text": text})


def test_each_role_is_shown_what_is_its_own_and_nothing_of_other_turns() -> None:
    manager = [add("Mia Rome"), '{"op": "UPDATE", "id": 1, "text": "Mia Paris"}', '{"op": "NOOP"}']
    policy = two(manager, ["next", "next", "Paris"])
    turns = play(Managed(ask="Op:"), policy, ["Mia is in Rome.", "Mia is now in Paris.", "Where is Mia?"])
    assert policy.asked == [
        ("memory", "Memories:\n(none)\nNew: Mia is in Rome.\nOp:"),
        ("", "Memories:\nMia Rome\nMia is in Rome."),
        ("memory", "Memories:\n1: Mia Rome\nNew: Mia is now in Paris.\nOp:"),
        ("", "Mia is in Rome.\nMemories:\nMia Paris\nMia is now in Paris."),
        ("memory", "Memories:\n1: Mia Paris\nNew: Where is Mia?\nOp:"),
        ("", "Mia is in Rome.\nMemories:\nMia Paris\nWhere is Mia?"),
    ]
    assert [t.action.text for t in turns] == ["next", "next", "Paris"]
    assert [[g.role for g in t.generations] for t in turns] == [["memory", ""]] * 3
    assert json.loads(turns[1].action.notes["operations"]) == [{"op": "UPDATE", "id": 1, "text": "Mia Paris"}]
    assert turns[2].action.notes == {}


def test_what_is_no_operation_changes_nothing_and_the_manager_reads_why() -> None:
    policy = two(
        [add("Mia Rome"), '{"op": "DELETE", "id": 5}', "Mia is in Paris", '{"op": "NOOP"}'], ["a", "b", "c", "d"]
    )
    turns = play(Managed(ask="Op:", show_opening=False), policy, ["one", "two", "three", "four"])
    asked = [text for role, text in policy.asked if role]
    assert asked[1] == "Memories:\n1: Mia Rome\nNew: two\nOp:"
    assert asked[2] == (
        "Memories:\n1: Mia Rome\nYour last reply changed nothing: DELETE: there is no id 5; ids: 1\nNew: three\nOp:"
    )
    assert "changed nothing: the reply is not JSON" in asked[3]
    assert policy.asked[-1] == ("", "Memories:\nMia Rome\nfour")
    # The policy still acts in those turns: what is wrong is the manager's reply alone.
    assert all(t.action.error is None and len(t.generations) == 2 for t in turns)
    assert [set(t.action.notes) for t in turns] == [{"operations"}, {"refused"}, {"refused"}, set()]


def test_where_there_are_more_memories_than_are_shown_those_nearest_in_words_are() -> None:
    facts = ["Mia is in Rome", "Ben has a dog", "Ann is in Oslo", "the dog is old"]
    policy = two([add(fact) for fact in facts], ["x"] * 5)
    play(Managed(ask="Op:", show_opening=False, n_managed=2, n_shown=1), policy, ["o", "o", "o", "o", "who has a dog"])
    assert policy.asked[-2] == ("memory", "Memories:\n2: Ben has a dog\n4: the dog is old\nNew: who has a dog\nOp:")
    assert policy.asked[-1] == ("", "Memories:\nBen has a dog\nwho has a dog")
    assert policy.asked[-4][1].startswith("Memories:\n(none)\nNew: o"), "none of three shares a word with it"


def test_thoughts_of_the_manager_are_no_part_of_its_reply() -> None:
    policy = two([f"<think>it is a place</think>\n```json\n{add('Mia Rome')}\n```"], ["next"])
    turns = play(Managed(ask="Op:"), policy, ["Mia is in Rome."])
    assert "Mia Rome" in turns[0].action.notes["operations"]


@pytest.mark.parametrize(
    ("before", "now", "asked", "said"),
    [
        ("", "Mia Rome", "Memories:\n(none)\nNew: Mia is in Rome.", {"op": "ADD", "text": "Mia Rome"}),
        ("Mia Rome", "Mia Rome", "Memories:\n1: Mia Rome", {"op": "NOOP"}),
        ("Mia Rome", "Mia Paris", "Memories:\n3: Mia Rome", {"op": "UPDATE", "id": 3, "text": "Mia Paris"}),
        ("Ben Oslo; Mia Rome", "Mia Rome", "Memories:\n1: Mia Rome\n2: Ben Oslo", {"op": "DELETE", "id": 2}),
        # What is not among the memories shown cannot be named: it is said anew, or left.
        ("Mia Rome", "Mia Paris", "Memories:\n(none)", {"op": "ADD", "text": "Mia Paris"}),
        ("Ben Oslo", "", "Memories:\n(none)", {"op": "NOOP"}),
        (
            "Ben Oslo",
            "Mia Rome; Ann Bern",
            "Memories:\n7: Ben Oslo",
            [{"op": "ADD", "text": "Mia Rome"}, {"op": "ADD", "text": "Ann Bern"}, {"op": "DELETE", "id": 7}],
        ),
    ],
)
def test_the_operations_between_two_lists_of_what_is_worth_keeping(
    before: str, now: str, asked: str, said: dict[str, Any]
) -> None:
    shown = DemonstrationInputs("next", recall=now, role="memory", recalled=before, asked=asked)
    assert json.loads(ChatAgent(system="", memory=Managed()).write(shown)) == said


@pytest.mark.parametrize("per_turn", [1, 3])
def test_demonstrated_operations_keep_exactly_what_the_oracle_finds_worth_keeping(per_turn: int) -> None:
    environment = LongMemory(n_facts=4, n_changes=2, per_turn=per_turn, n_train=6)
    made = tiny_policy(max_context=2048)
    agent = ChatAgent(system="", memory=Managed())
    tasks = environment.tasks("train")
    played = asyncio.run(
        demonstrations.play(
            environment,
            tasks,
            random_share=0.0,
            unsolved_share=0.0,
            limits=Limits(max_turns=32, max_tokens=64),
            seed=0,
            needs=agent.needs,
        )
    )
    rendered = asyncio.run(demonstrations.render(played, agent, Renderer(made.tokenizer)))
    for task, trajectory in zip(tasks, rendered, strict=True):
        history = History(task, trajectory.opening, trajectory.turns)
        for k in range(1, len(trajectory.turns) + 1):
            bank = bank_of(agent.past(replace(history, turns=trajectory.turns[:k])))
            kept = environment.recall(task, [t.action.text for t in trajectory.turns[: k - 1]])
            assert sorted(text for _, text in bank.entries) == sorted(filter(None, kept.split("; ")))
        assert not any("refused" in t.action.notes for t in trajectory.turns)


def test_answers_from_the_bank_alone_are_right_where_the_window_has_forgotten() -> None:
    # An agent that reads the place after the person's name among its memories answers every conflict there is.
    environment = LongMemory(abilities=("conflict",), n_questions=2, n_facts=4, n_changes=2, distance=3, n_test=20)
    rng = random.Random(0)
    for task in rng.sample(list(environment.tasks("test")), 5):
        episode, taken = environment.start(task), []
        now, score = episode.opening, 0.0

        def reads(role: str, messages: tuple[Message, ...]) -> str:
            text = messages[-1].content
            if role:
                before = environment.recall(task, taken[:-1]) if taken else ""  # noqa: B023
                shown = DemonstrationInputs("", environment.recall(task, taken), role=role, recalled=before, asked=text)  # noqa: B023
                return Managed().remembered(shown)
            memories, _, question = text.partition("where is ")
            place = [line.split()[1] for line in memories.splitlines() if line.startswith(question[:-1] + " ")]
            return place[0] if question else "next"

        turns: tuple[Turn, ...] = ()
        opening = now
        while not (now.terminated or now.truncated):
            memory = Managed(show_opening=False, n_managed=2, n_shown=2)
            history = History(task, opening.reply, turns)
            action = asyncio.run(ChatAgent(system="", memory=memory).act(history, Says(reads)))
            stepped = asyncio.run(_step(episode, action.text))
            turns, now, score = (*turns, Turn(action, stepped.reply)), stepped, score + stepped.reward
            taken.append(action.text)
        assert now.success and score == pytest.approx(1.0)


async def _step(episode: Any, text: str) -> StepResult:
    found = episode.step(text)
    return await found if asyncio.iscoroutine(found) else found
