"""Parts and recipes of a stranger, written into a folder outside the repository for the tests of recipes."""

from __future__ import annotations

from pathlib import Path

PARTS = '''
"""One small part of every sort, as a user would write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from environments.base import Properties, StepResult
from rlhf.data import Action, Message, Role, Task


@dataclass(frozen=True)
class Echo:
    """Say the word that was asked for."""

    n_tasks: Annotated[int, Field(ge=1)] = 20
    max_steps: int = 3

    @property
    def properties(self):
        return Properties(deterministic=True, replayable=True, oracle=True, splits=("train", "dev", "test"))

    def tasks(self, split):
        if split not in self.properties.splits:
            raise ValueError(split)
        first = 100 * self.properties.splits.index(split)
        return [Task(id=f"echo/{i}", seed=i, reference=str(i)) for i in range(first, first + self.n_tasks)]

    def start(self, task):
        return EchoEpisode(str(task.seed))

    def plan(self, task, taken):
        return [str(task.seed)]


class EchoEpisode:
    def __init__(self, word):
        self.word = word
        self.opening = StepResult(f"Say {word}.", state_key="start", admissible_actions=(word, "nothing"))

    async def step(self, action):
        solved, known = action == self.word, action in self.opening.admissible_actions
        reply = "Right." if solved else "Wrong."
        return StepResult(reply, float(solved), True, state_key=action, success=solved, valid=known)

    async def close(self):
        pass


@dataclass(frozen=True)
class Mute:
    """An environment that cannot demonstrate and declares nothing."""

    def tasks(self, split):
        return [Task(id=f"mute/{split}/0")]

    def start(self, task):
        return EchoEpisode("0")


@dataclass(frozen=True)
class Parrot:
    tone: Literal["flat", "loud"] = "flat"

    async def act(self, history, policy):
        reply = await policy.generate(self.messages(history))
        return Action(reply.text.strip(), (reply.generation,))

    def messages(self, history):
        said = [Message(Role.USER, history.opening)]
        for turn in history.turns:
            said.append(Message(Role.ASSISTANT, turn.action.text, turn.generations[0].token_ids))
            said.append(Message(Role.USER, turn.reply))
        return said

    def write(self, shown):
        return shown.action


@dataclass(frozen=True)
class Plumber:
    needs_tools = True

    async def act(self, history, policy):
        raise NotImplementedError


class Long:
    """A plain class with an annotated __init__."""

    def __init__(self, at_least: int = 2, words: list[str] | None = None) -> None:
        self.at_least = at_least
        self.words = words

    async def __call__(self, task, trajectory):
        return float(len(trajectory.turns) >= self.at_least)

    def __eq__(self, other):
        return vars(self) == vars(other)


class Forgetful:
    def __init__(self, at_least: int = 2) -> None:
        self.limit = at_least

    def __call__(self, task, trajectory):
        return 0.0


class Heavy:
    def __init__(self, weight: float = 2.0) -> None:
        self.weight = weight

    def __call__(self, task, trajectory):
        return 0.0


def solved(task, trajectory):
    return float(trajectory.solved)


def same(answer: str, reference: str) -> float:
    return float(answer == reference)


@dataclass(frozen=True)
class Halved:
    """An advantage estimator that wraps another."""

    inner: AdvantageEstimator
    factor: Annotated[float, Field(gt=0)] = 0.5
    needs_values = False
    min_group = 1

    def __call__(self, group, values=None):
        return self.inner(group, values)


@dataclass(frozen=True)
class Mixed:
    """An advantage estimator that holds any number of others."""

    among: tuple[AdvantageEstimator, ...]
    otherwise: AdvantageEstimator | None = None
    needs_values = False
    min_group = 1

    def __call__(self, group, values=None):
        return self.among[0](group, values)

    def over_batch(self, groups):
        return [self(group) for group in groups]


@dataclass(frozen=True)
class Critical:
    """An advantage estimator that needs a critic."""

    needs_values = True
    min_group = 1

    def __call__(self, group, values=None):
        raise NotImplementedError


not_a_class = 3

from rlhf.credit.estimator import AdvantageEstimator  # noqa: E402
'''

RECIPE = """\
# Say the word: the smallest thing that can be trained.
policy: {kind: from_scratch, hidden_size: 32, n_layers: 1, n_heads: 2, max_context: 64}
environment: {kind: ./parts.py:Echo}
agent: {kind: ./parts.py:Parrot}
rewards:
  right: {kind: ./parts.py:solved}
limits: {max_turns: 3, max_tokens: 8}
evaluation: {n_tasks: 10}
stages:
  - {kind: supervised, n_demonstrations: 20, batch_size: 8, epochs: 2}
  - {kind: policy_gradient, steps: 3, tasks_per_step: 4, group_size: 5}
"""


def write(folder: Path, recipe: str = RECIPE, name: str = "echo.yaml") -> Path:
    """Put the parts and a recipe into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parts.py").write_text(PARTS)
    (folder / name).write_text(recipe)
    return folder / name
