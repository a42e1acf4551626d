"""An environment, an agent and a reward of somebody who never touched this repository, trained by its command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rlhf.cli import app
from rlhf.evaluation.store import read_trajectories
from rlhf.evaluation.transcript import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent

ENVIRONMENT = '''
"""A castle with one unlocked door."""

import random
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from environments.base import Properties, StepResult
from rlhf.data import Task

COLOURS = ("amber", "blue", "crimson", "dun", "emerald")


@dataclass(frozen=True)
class Castle:
    n_doors: Annotated[int, Field(ge=2, le=5)] = 3
    tries: int = 2

    properties = Properties(deterministic=True, replayable=True, oracle=True, repeats=True)

    def tasks(self, split):
        first = {"train": 0, "test": 1000}[split]
        return [Task(id=f"castle-{self.n_doors}/{seed}", seed=seed) for seed in range(first, first + 50)]

    def start(self, task):
        return Visit(COLOURS[: self.n_doors], self.unlocked(task), self.tries)

    def plan(self, task, taken):
        return [f"push the {self.unlocked(task)} door"]

    def unlocked(self, task):
        return random.Random(task.seed).choice(COLOURS[: self.n_doors])


class Visit:
    def __init__(self, colours, unlocked, tries):
        self.unlocked, self.left = unlocked, tries
        self.actions = tuple(f"push the {colour} door" for colour in colours)
        told = f"A castle gate. A crow croaks: {unlocked}."
        self.opening = StepResult(told, state_key=f"{tries} left", admissible_actions=self.actions)

    async def step(self, action):
        self.left -= 1
        opened = action == f"push the {self.unlocked} door"
        return StepResult(
            "The gate creaks open." if opened else "It is locked.",
            reward=float(opened),
            terminated=opened,
            truncated=not opened and self.left <= 0,
            state_key=f"{self.left} left",
            success=opened if opened or self.left <= 0 else None,
            valid=action in self.actions,
            admissible_actions=self.actions,
        )

    async def close(self):
        pass
'''

AGENT = '''
"""An agent that says one word; the rest of the action is its own."""

from dataclasses import dataclass

from rlhf.data import Action, Message, Role


@dataclass(frozen=True)
class Pusher:
    verb: str = "push"
    greeting: str = "Good day."

    async def act(self, history, policy):
        reply = await policy.generate(self.messages(history))
        word = reply.text.strip()
        error = None if word else "The pusher heard nothing. Name a colour."
        return Action(f"{self.verb} the {word} door" if word else "", (reply.generation,), error)

    def messages(self, history):
        said = [Message(Role.SYSTEM, self.greeting), Message(Role.USER, history.opening)]
        for turn in history.turns:
            ids = turn.generations[-1].token_ids if turn.generations else None
            said += [Message(Role.ASSISTANT, turn.action.text, ids), Message(Role.USER, turn.reply)]
        return said

    def write(self, shown):
        return shown.action.removeprefix(f"{self.verb} the ").removesuffix(" door")
'''

REWARD = '''
"""A reward for brevity, with its reason."""

from dataclasses import dataclass

from rlhf.data import Verdict


@dataclass(frozen=True)
class Brevity:
    longest: int = 24

    def __call__(self, task, trajectory):
        n = max((len(turn.action.text) for turn in trajectory.turns), default=0)
        return Verdict(float(n <= self.longest), why=f"the longest action has {n} characters")
'''

RECIPE = """\
# A stranger's castle.
policy: {kind: from_scratch, hidden_size: 32, n_layers: 1, n_heads: 2, vocab_size: 512, max_context: 128}
environment: {kind: ../worlds/castle.py:Castle, n_doors: 3}
agent: {kind: ../minds/pusher.py:Pusher, greeting: "Good evening."}
rewards:
  opened: {kind: outcome}
  brevity: {kind: ../judges/brevity.py:Brevity, longest: 20, weight: 0.5}
limits: {max_turns: 2, max_tokens: 4}
evaluation: {n_tasks: 6}
stages:
  - {kind: supervised, n_demonstrations: 16, batch_size: 8, epochs: 2}
  - {kind: policy_gradient, steps: 2, tasks_per_step: 3, group_size: 4, advantage: {kind: gigpo}}
"""

FILES = {
    "worlds/castle.py": ENVIRONMENT,
    "minds/pusher.py": AGENT,
    "judges/brevity.py": REWARD,
    "recipes/castle.yaml": RECIPE,
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stranger's folder: each part in a folder of its own, the recipe in another."""
    folder = tmp_path_factory.mktemp("theirs")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text.lstrip())
    return folder


@pytest.fixture(scope="module")
def trained(theirs: Path) -> dict[str, Any]:
    """What `rlhf train` says at its end, started from a folder that has nothing to do with either."""
    elsewhere = theirs / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.cli", "train", "../recipes/castle.yaml", "--out", "run", "--json"],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values | {"folder": elsewhere / values["run"]}


def check(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def test_the_parts_train_to_the_end(trained: dict[str, Any]) -> None:
    assert trained["n_episodes"] == 2 * 3 * 4  # steps x tasks_per_step x group_size
    assert 0 <= trained["success_before"] <= 1 and 0 <= trained["success_after"] <= 1
    assert (trained["folder"] / "report.html").is_file()


def test_the_trajectories_tell_the_strangers_story(trained: dict[str, Any]) -> None:
    found = list(read_trajectories(trained["folder"] / "trajectories", phase="train"))
    tokenizer: Any = load_tokenizer(trained["folder"])
    assert len(found) == 24
    replies = {turn.reply for record in found for turn in record.trajectory.turns}
    assert "It is locked." in replies  # three doors, an untrained policy, 24 attempts
    for record in found:
        first = record.trajectory.generations[0].prompt
        prompt = tokenizer.decode(list(first.token_ids), skip_special_tokens=False)
        assert prompt == f"<|system|>Good evening.<|user|>{record.trajectory.opening}<|assistant|>"
        assert record.trajectory.opening.startswith("A castle gate. A crow croaks: ")
        assert record.score is not None and set(record.score.parts) == {"opened", "brevity"}
        longest = max(len(turn.action.text) for turn in record.trajectory.turns)
        assert record.score.parts["brevity"].why == f"the longest action has {longest} characters"
        assert record.score.parts["brevity"].value == float(longest <= 20)  # `longest: 20` of the recipe
        for turn in record.trajectory.turns:
            heard_nothing = turn.reply == "The pusher heard nothing. Name a colour."
            assert heard_nothing or (turn.action.text.startswith("push the ") and turn.action.text.endswith(" door"))


def test_the_strangers_reward_counts_by_its_weight(trained: dict[str, Any]) -> None:
    for record in read_trajectories(trained["folder"] / "trajectories", phase="train"):
        assert record.score is not None
        value = {name: verdict.value for name, verdict in record.score.parts.items()}
        assert record.score.total == value["opened"] + 0.5 * value["brevity"]
    logged = [json.loads(line) for line in (trained["folder"] / "metrics.jsonl").read_text().splitlines()]
    assert any("reward/brevity" in line for line in logged)


def test_the_run_says_where_its_parts_came_from(trained: dict[str, Any], theirs: Path) -> None:
    text = (trained["folder"] / "recipe.yaml").read_text()
    for name in ("worlds/castle.py:Castle", "minds/pusher.py:Pusher", "judges/brevity.py:Brevity"):
        assert str((theirs / name).resolve()) in " ".join(text.split())


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("environment.n_doors=1", ("environment.n_doors", "a whole number, at least 2, at most 5")),
        ("environment.n_dors=3", ("environment.n_dors", "Castle has no key 'n_dors'", "did you mean 'n_doors'?")),
        ("agent.verb=3", ("agent.verb", "expected: text")),
        ("rewards.brevity.longest=short", ("rewards.brevity.longest", "'short' (text)", "a whole number")),
        ("rewards.brevity.kind=../judges/brevity.py:Brevty", ("rewards.brevity.kind", "did you mean 'Brevity'?")),
        ("environment.kind=../minds/pusher.py:Pusher", ("this is no environment", "lacks tasks, start")),
    ],
)
def test_the_fields_of_the_parts_are_validated(theirs: Path, override: str, says: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["train", str(theirs / "recipes/castle.yaml"), override])
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert all(text in result.stderr for text in says), result.stderr


@pytest.mark.parametrize(
    ("what", "target", "fields"),
    [
        ("environment", "worlds/castle.py:Castle", ["n_doors=4", "tries=3"]),
        ("agent", "minds/pusher.py:Pusher", ["verb=pull"]),
        ("reward", "judges/brevity.py:Brevity", ["longest=9"]),
        ("recipe", "recipes/castle.yaml", []),
    ],
)
def test_the_parts_keep_their_contracts(theirs: Path, what: str, target: str, fields: list[str]) -> None:
    result = check(what, theirs / target, *fields)
    assert result.exit_code == 0, result.output
