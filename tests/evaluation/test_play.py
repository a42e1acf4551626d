"""Evaluations that are interrupted, or in which too much fails, keep what is finished."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given

from agents.chat import ChatAgent
from environments.base import Properties, StepResult
from rewards.shaping.outcome import Outcome
from rlhf.data import Action, Finish, Generation, Message, Prompt, Role, SamplingParams, Task, Trajectory
from rlhf.errors import EnvError, TrainingError
from rlhf.evaluation.baselines import MessageIdRenderer, RandomSeedEngine, RandomSeedRenderer, StubEngine
from rlhf.evaluation.journal import AttemptJournal
from rlhf.evaluation.play import play_part
from rlhf.evaluation.store import list_steps, read_columns
from rlhf.rollout.contrib.strategies import ReflectAndRetry, Strategy, TreeSearch
from rlhf.rollout.limits import Limits
from rlhf.rollout.runner import RolloutRunner
from rlhf.rollout.scoring import WeightedReward
from tests.evaluation.test_store import trajectories

TASKS = [Task(f"count/test/{i}", seed=i) for i in range(8)]
COLUMNS = [
    "parent",
    "n_shared",
    "spent",
    "task_id",
    "attempt",
    "outcome",
    "turns",
    "generations",
    "score",
    "n_tokens",
    "n_retries",
    "opening",
]


class Episode:
    """Two actions, of which the second decides."""

    opening = StepResult("Say a number.")
    n = 0

    async def step(self, action: str) -> StepResult:
        self.n += 1
        return StepResult("Another.", 0.1, self.n == 2, success=self.n == 2 and int(action) % 2 == 0)

    async def close(self) -> None:
        pass


@dataclass(frozen=True)
class Counting:
    """An environment that writes down which tasks are begun; those of `broken` cannot be."""

    broken: frozenset[str] = frozenset()
    begun: list[str] = field(default_factory=list)

    @property
    def properties(self) -> Properties:
        return Properties()

    def tasks(self, split: str) -> list[Task]:
        return TASKS

    def start(self, task: Task) -> Episode:
        self.begun.append(task.id)
        if task.id in self.broken:
            raise EnvError("out of order", where="start")
        return Episode()


@dataclass(frozen=True)
class Says:
    """An agent that says what the policy draws; at one task it waits for ever once more than `at_most` have begun."""

    waits_at: str = ""
    begun: Sequence[str] = ()
    at_most: int = -1

    async def act(self, history: Any, policy: Any) -> Action:
        if history.task.id == self.waits_at and len(self.begun) > self.at_most:
            await asyncio.Event().wait()
        generated = await policy.generate([Message(Role.USER, history.opening)])
        return Action(generated.text, (generated.generation,))


def played(
    folder: Path,
    environment: Counting,
    agent: Says,
    until: Callable[[], bool] | None = None,
    strategy: Strategy | None = None,
) -> None:
    """Play the tasks; where `until` is given, cancel it as Ctrl-C does once that is true."""
    rewards = {"success": WeightedReward("success", 1.0, Outcome())}
    limits = Limits(max_turns=3, max_concurrent=2 if strategy is None else 1, max_retries=0, max_error_fraction=0.3)
    parts: Any = (environment, agent, rewards, RandomSeedEngine(), RandomSeedRenderer(), limits)

    async def play() -> None:
        how: dict[str, Any] = {"attempts": 1, "sampling": SamplingParams(), "strategy": strategy}
        playing = asyncio.create_task(play_part("p", TASKS, RolloutRunner(*parts, seed=3), folder, **how))
        while until is not None and not until():
            await asyncio.sleep(0.01)
            assert not playing.done()
        if until is not None:
            playing.cancel()
        await playing

    asyncio.run(play())


def rows(folder: Path) -> list[dict[str, Any]]:
    """What is stored, without times."""
    found = [row for stored in list_steps(folder) for row in read_columns(stored.path, COLUMNS)]
    return [{**row, "turns": [{**turn, "duration_s": 0} for turn in row["turns"] or ()]} for row in found]


def test_what_is_finished_outlasts_an_interruption(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    played(whole, Counting(), Says())
    journal = cut / "p-eval-000000.jsonl"
    first = Counting()
    # Task 2 never ends; the other seat plays all that come after it.
    with pytest.raises(asyncio.CancelledError):
        played(cut, first, Says(TASKS[2].id), lambda: journal.is_file() and journal.read_bytes().count(b"\n") == 7)
    assert len(first.begun) == 8 and not list_steps(cut)  # one block
    with journal.open("ab") as file:
        file.write(b'\n{"step": 0, "stage": "p", "ta')  # where a process was killed
    again = Counting()
    played(cut, again, Says())
    assert again.begun == [TASKS[2].id]
    assert rows(cut) == rows(whole) and len(rows(whole)) == 8
    names = sorted(p.name for p in whole.iterdir())
    assert sorted(p.name for p in cut.iterdir()) == names  # the journal is gone
    journal.touch()  # as a kill leaves it between the block and its removal
    played(cut, again, Says())
    assert len(again.begun) == 1 and sorted(p.name for p in cut.iterdir()) == names


def test_where_too_much_fails_only_what_failed_is_played_again(tmp_path: Path) -> None:
    broken = frozenset(task.id for task in TASKS[3:6])
    with pytest.raises(TrainingError, match="38% of the attempts ended with infrastructure errors"):
        played(tmp_path / "failed", Counting(broken), Says())
    again = Counting()
    played(tmp_path / "failed", again, Says())
    assert set(again.begun) == broken
    played(tmp_path / "whole", Counting(), Says())
    assert rows(tmp_path / "failed") == rows(tmp_path / "whole")


@pytest.mark.parametrize(
    ("strategy", "n_each", "n_kept"), [(TreeSearch(n=6), 6, 3), (ReflectAndRetry(n=3, until="end"), 3, 2)]
)
def test_candidates_that_branch_off_each_other_outlast_an_interruption(
    tmp_path: Path, strategy: Strategy, n_each: int, n_kept: int
) -> None:
    whole, cut = (tmp_path / name / "trajectories" for name in ("whole", "cut"))
    played(whole, Counting(), Says(), strategy=strategy)
    # Blocks are of one task. In that of task 2 the candidates from the start end, and the first that leaves from them.
    journal, first = cut / "p-eval-000002.jsonl", Counting()
    waits = Says(TASKS[2].id, first.begun, 2 * n_each + n_kept)
    with pytest.raises(asyncio.CancelledError):
        played(cut, first, waits, lambda: len(first.begun) > 2 * n_each + n_kept, strategy=strategy)
    assert len(list_steps(cut)) == 2 and journal.read_bytes().count(b"\n") == n_kept
    again = Counting()
    played(cut, again, Says(), strategy=strategy)
    assert len(again.begun) == 6 * n_each - n_kept
    for one, other in ((cut, whole), (cut.with_name("candidates"), whole.with_name("candidates"))):
        assert rows(one) == rows(other) and len(rows(one)) in (8, 8 * n_each)


@dataclass
class Answers(StubEngine):
    """An engine that replies to the messages with a number made of them, and waits for ever after `at_most` calls."""

    renderer: MessageIdRenderer
    at_most: int
    n: int = 0

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        self.n += 1
        if self.n > self.at_most:
            await asyncio.Event().wait()
        said = repr([(m.role, m.content) for m in self.renderer.messages(prompt.token_ids)])
        ids = self.renderer.encode_reply(str(crc32(f"{said}{params.seed}".encode())))
        return Generation(prompt, ids, (0.0,), Finish.STOP, 0)


def test_branches_of_a_policy_without_tokens_read_after_an_interruption_what_was_said(tmp_path: Path) -> None:
    def go(folder: Path, at_most: int) -> int:
        renderer = MessageIdRenderer()
        engine, rewards = Answers(renderer, at_most), {"success": WeightedReward("success", 1.0, Outcome())}
        limits = Limits(max_turns=3, max_concurrent=2, max_retries=0)
        agent = ChatAgent(system="", format="text")
        runner = RolloutRunner(Counting(), agent, rewards, engine, renderer, limits, seed=3)

        async def play() -> None:
            how: dict[str, Any] = {"attempts": 1, "sampling": SamplingParams(), "strategy": TreeSearch(n=3)}
            playing = asyncio.create_task(play_part("p", TASKS[:2], runner, folder / "trajectories", **how))
            while engine.n <= at_most and not playing.done():
                await asyncio.sleep(0.01)
            playing.cancel()
            with suppress(asyncio.CancelledError):
                await playing

        asyncio.run(play())
        return engine.n

    whole, cut, n = tmp_path / "whole", tmp_path / "cut", go(tmp_path / "whole", 1000)
    said = [[turn["text"] for turn in row["turns"]] for row in rows(whole / "candidates")]
    assert len(said) == 6
    for at_most in range(n):  # each goes on from the one before, or from what was left of it
        go(cut, at_most)
        if at_most % 3 == 2:
            go(cut, 3)
        last = go(cut, 1000)
        assert [[turn["text"] for turn in row["turns"]] for row in rows(cut / "candidates")] == said
        assert at_most < n - 1 or last < n, "the task that was over is not played again"
        shutil.rmtree(cut)


@given(kept=trajectories())
def test_a_journal_holds_attempts_exactly(tmp_path_factory: pytest.TempPathFactory, kept: Trajectory) -> None:
    path = tmp_path_factory.mktemp("journal") / "p.jsonl"
    AttemptJournal(path, "p").keep(kept)
    assert AttemptJournal(path, "p").held(kept.task_id, kept.attempt) == kept
