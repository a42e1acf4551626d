"""Machine learning as an engineering task: train on a table, predict another, be scored on labels that are hidden.

    train.csv has 60 lines and test.csv, without label, 40. train.csv begins: a,b,c,label ...
    Write a Python program ... that prints a label for each line of test.csv.

Tables and the rule behind their labels are drawn by seed. A program of the policy runs in the sandbox, with both files
and Python's own library; it never sees the labels. After MLE-bench, arXiv 2410.07095, in the small: its competitions
are in no registry. Marks for progress are after RL for machine learning engineering agents, arXiv 2509.01684, which
gives .1 for each of seven lines that a program prints on its way.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult
from environments.core.procedural import Attempt, Drawn, digest, word_of
from rewards.code.sandboxed_reward import program_of
from rewards.sandbox.run import Bounds, Finished, run
from rlhf.data import Task
from rlhf.settings import STRICT

Rule = Literal["line", "box", "cross"]
_COLUMNS, _SHOWN, _PROGRESS = ("a", "b", "c"), 4, 0.1
_ASK = (
    "Write a Python program, in a block of three backticks, that reads both files with Python's own library alone and "
    "prints a label, 0 or 1, for each line of test.csv. Reply 'submit' to be scored on all of them."
)


@plain_dataclass(frozen=True)
class Data:
    """Rows of three numbers, their labels, and the rule that gives them.

    Attributes:
        rule: `line` (a weighted sum is above a bound), `box` (two columns are small), `cross` (two have one sign).
        weights: of `line`; the numbers of the columns of the others.
        train, test: rows.
        labels: of the rows of `train`, then of `test`.
    """

    rule: Rule
    weights: tuple[float, ...]
    train: tuple[tuple[float, ...], ...]
    test: tuple[tuple[float, ...], ...]
    labels: tuple[int, ...]

    @property
    def hidden(self) -> tuple[int, ...]:
        """Labels of `test`."""
        return self.labels[len(self.train) :]

    def files(self) -> dict[str, bytes]:
        """Both tables; labels of `train` alone."""
        train = [",".join(map(str, (*row, label))) for row, label in zip(self.train, self.labels, strict=False)]
        return {
            "train.csv": "\n".join([",".join((*_COLUMNS, "label")), *train, ""]).encode(),
            "test.csv": "\n".join([",".join(_COLUMNS), *(",".join(map(str, row)) for row in self.test), ""]).encode(),
        }


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MlTask(Drawn):
    """Write a program that learns from a table and predicts another; runs in the sandbox."""

    rules: Annotated[tuple[Rule, ...], Field(min_length=1)] = ("line", "box", "cross")
    """Kinds of rules behind the labels."""
    rows: Annotated[int, Field(ge=20, le=1000)] = 60
    """Rows to learn from; two thirds as many are to be predicted."""
    min_skill: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the way from always the commonest label to all labels right, from which the task is solved."""
    max_steps: Annotated[int, Field(ge=2)] = 4
    """Programs, and `submit`; what is not submitted keeps the marks for progress."""
    cpu_s: Annotated[float, Field(gt=0, le=600)] = 8.0
    """Processor time of a program."""

    name: ClassVar[str] = "ml_task"
    #: Programs have lines.
    agent_defaults: ClassVar[Mapping[str, Any]] = {"format": "text"}

    @property
    def properties(self) -> Properties:
        """Properties: steps start a process, so they run in threads; a program may draw numbers or depend on time."""
        return replace(super().properties, inline=False, deterministic=False, replayable=False)

    @property
    def level(self) -> str:
        """Rules and rows."""
        return f"{'+'.join(self.rules)}-{self.rows}"

    def draw(self, rng: random.Random) -> Data:
        """Draw a rule and rows of which each label has a quarter at least."""
        while True:
            rule = rng.choice(self.rules)
            some = rng.sample(range(3), 2)
            weights = tuple(rng.choice((-1.0, 1.0)) * rng.randint(2, 9) / 10 for _ in range(3))
            weights = weights if rule == "line" else tuple(map(float, some))
            n = self.rows + self.rows * 2 // 3
            rows = tuple(tuple(rng.randint(-99, 99) / 100 for _ in _COLUMNS) for _ in range(n))
            labels = tuple(labelled(rule, weights, row) for row in rows)
            if n // 4 <= sum(labels) <= n - n // 4 and 0 < sum(labels[self.rows :]) < n - self.rows:
                return Data(rule, weights, rows[: self.rows], rows[self.rows :], labels)

    def start(self, task: Task) -> MlEpisode:
        """Begin one attempt at a task."""
        return MlEpisode(self.instance(task), self)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Print what the rule gives, and submit; None where too few steps are left or something was submitted."""
        data: Data = self.instance(task)
        if any(word_of(action) == "submit" for action in taken) or self.max_steps - len(taken) < 2:
            return None
        lines = "\n".join(map(str, data.hidden))
        return (f"```python\nprint('''{lines}''')\n```", "submit")


def labelled(rule: Rule, weights: Sequence[float], row: Sequence[float]) -> int:
    """The label of a row."""
    if rule == "line":
        return int(sum(w * x for w, x in zip(weights, row, strict=True)) > 0)
    a, b = (row[int(i)] for i in weights)
    return int(abs(a) < 0.7 and abs(b) < 0.7) if rule == "box" else int(a * b > 0)


def skill(said: Sequence[int], right: Sequence[int]) -> float:
    """(accuracy − that of the commonest label) / (1 − that), at least 0: 0 for a constant, 1 for all labels."""
    accuracy = sum(a == b for a, b in zip(said, right, strict=True)) / len(right)
    constant = max(sum(right), len(right) - sum(right)) / len(right)
    return max(0.0, (accuracy - constant) / (1 - constant))


class MlEpisode(Attempt):
    """One attempt: programs are run, and the last one's predictions submitted. Each mark for progress is .1."""

    def __init__(self, data: Data, settings: MlTask) -> None:
        super().__init__(settings.max_steps)
        self._data, self._settings, self._name = data, settings, digest(repr(data))
        self.said: tuple[int, ...] | None = None
        self._n_run = 0
        self._finished: Finished | None = None
        head = data.files()["train.csv"].decode().splitlines()[: _SHOWN + 1]
        told = f"train.csv has {len(data.train)} lines and test.csv, without label, {len(data.test)}."
        self.opening = self.opened("\n".join([told, "train.csv begins:", *head, _ASK]))

    async def step(self, action: str) -> StepResult:
        """Do one action; a program runs before it is answered."""
        self._finished, program = None, program_of(action)
        if program is not None and not self.over:
            bounds = Bounds(cpu_s=self._settings.cpu_s, wall_s=2 * self._settings.cpu_s)
            files = {"main.py": program.encode(errors="replace"), **self._data.files()}
            self._finished = await run(("python", "main.py"), files=files, bounds=bounds)
        return self.act(action)

    def do(self, action: str) -> tuple[str, bool]:
        """Read what a program printed, or submit."""
        if word_of(action) == "submit":
            self.done = True
            earned = 0.0 if self.said is None else skill(self.said, self._data.hidden)
            self.solved = earned >= self._settings.min_skill
            self.score += (1 - 2 * _PROGRESS) * earned
            return "Nothing to submit." if self.said is None else "Submitted.", True
        if self._finished is None:
            return f"No program. {_ASK}", False
        self._n_run += 1
        if not self._finished.ok:
            last = self._finished.stderr.decode(errors="replace").rstrip().rpartition("\n")[2][:200]
            return f"The program failed: {self._finished.ending}. {last}", True
        self.score = max(self.score, _PROGRESS)
        words = self._finished.stdout.decode(errors="replace").split()
        n = len(self._data.test)
        if len(words) != n or not set(words) <= {"0", "1"}:
            return f"It ended well, and printed {len(words)} words; expected {n} labels, 0 or 1.", True
        self.score, self.said = 2 * _PROGRESS, tuple(map(int, words))
        return f"It printed {n} labels, {sum(self.said)} of them 1.", True

    def state(self) -> str:
        """Return the task, the last predictions, the programs run, and whether they are submitted."""
        return f"{self._name}/{self._n_run}/{digest(repr(self.said))}{'/submitted' if self.done else ''}"

    def possible(self) -> tuple[str, ...]:
        """Nothing can be listed."""
        return ()
