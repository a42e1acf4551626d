"""The generated problems of reasoning-gym: one question each, answered once or in several attempts with feedback.

    State the final answer to the following arithmetic problem: 8995 - 5221 + 2341 + 5967 =
    > 12082
    Right.

Problems, references and scorers are those of the package (Stojanovski et al., arXiv 2505.24760). Some of its scorers
hand the answer to `eval` or to a parser that evaluates; an answer reaches these only if it is of the plain form that a
right answer has. The package has no splits: here a problem belongs to one by a hash of its question.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult
from environments.core.normalise import words
from environments.core.procedural import Attempts, Judged, SplitByContent, digest, plan_answer, split_of
from environments.packages import import_from, version_of
from rlhf.data import Task
from rlhf.errors import EnvError, nearest
from rlhf.settings import STRICT

#: Problems of one dataset object of the package, which is made anew, with the next seed, after so many.
_CHUNK = 500
_PATIENCE, _LONGEST = 2_000, 20_000
_EXTRA = "reasoning-gym"

#: Generators without a reference answer, for which there is no oracle; and those that differ between processes.
NO_REFERENCE: frozenset[str] = frozenset({"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"})
UNSTABLE: frozenset[str] = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)

_LISTS = re.compile(r"""[\[\]\s,0-9A-Z'"_-]*""")
_FORMULA = re.compile(r"(?:[0-9]++|[xyzX]|C|asin|acos|atan|sin|cos|tan|exp|log|sqrt|pi|E|[\s+\-*/^().])*")
_NUMBER = re.compile(r"\s*[-+]?[0-9,]{0,30}\.?[0-9]{0,30}(?:[eE][-+]?[0-9]{1,2})?(?:/[0-9,]{1,30})?\s*")
_COMPLEX = re.compile(r"[-+\s0-9.eEiIjJ()]*")
_POWER = re.compile(r"\*\*")
_EXPONENT = r"(?:-?[0-9]{1,2}|\(-?[0-9]{1,2}(?:/[0-9]{1,2})?\))"
_SMALL_POWER = re.compile(rf"\*\*\s*{_EXPONENT}(?!\s*[0-9.]|\s*\*\*)")
_POWER_OF_NUMBER = re.compile(r"[0-9)]\s*\*\*")


def is_plain_list(answer: str) -> bool:
    """True if an answer holds only brackets, numbers and capitals, so that `eval` just reads it."""
    return _LISTS.fullmatch(answer) is not None


def is_plain_number(answer: str) -> bool:
    """True if an answer is a number or fraction of a few digits, with an exponent of at most two."""
    return _NUMBER.fullmatch(answer) is not None


def is_plain_complex(answer: str) -> bool:
    """True if an answer holds only digits, signs, brackets and the imaginary unit: neither NaN nor infinity."""
    return _COMPLEX.fullmatch(answer) is not None


def is_plain_formula(answer: str) -> bool:
    """True if an answer is a formula of known names and small exponents, fast to evaluate.

    Powers of numbers and of parentheses may stand in it twice at most: nested, they would make numbers without end.
    """
    powers = len(_POWER.findall(answer))
    plain = len(answer) <= 500 and _FORMULA.fullmatch(answer) is not None and "***" not in answer
    return plain and len(_SMALL_POWER.findall(answer)) == powers and len(_POWER_OF_NUMBER.findall(answer)) <= 2


#: Generators that take 10 ms and more to score a long answer, or to make a problem. Those of all others take less.
SLOW: frozenset[str] = frozenset(
    words(
        "advanced_geometry futoshiki game_of_life game_of_life_halting polynomial_equations propositional_logic rearc "
        "rubiks_cube sokoban sudoku zebra_puzzles"
    )
)

#: Generators whose scorer takes any text for right; here the answer has to be the reference.
CREDULOUS: frozenset[str] = frozenset({"game_of_life_halting"})

#: Generators of probabilities, whose scorer takes the first digits of one for right, and makes numbers of billions of
#: digits; here an answer may be off by 0.0001 and 1 %.
PROBABILITY: frozenset[str] = frozenset({"coin_flip"})

#: Generators whose scorer evaluates an answer, and what an answer must be like to reach it.
EVALUATED: Mapping[str, Callable[[str], bool]] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), is_plain_list),
    **dict.fromkeys(
        ("countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"),
        is_plain_formula,
    ),
}


_PLAIN: Mapping[str, Callable[[str], bool]] = {
    **EVALUATED,
    **dict.fromkeys(PROBABILITY, is_plain_number),
    "complex_arithmetic": is_plain_complex,  # any answer is near one that is no number
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReasoningGym(SplitByContent):
    """Generator of reasoning-gym, in one attempt or several with feedback."""

    dataset: str = "chain_sum"
    """Name of the generator, as the package registers it."""
    params: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of the generator, as the package has them, without `seed` and `size`."""
    max_steps: Annotated[int, Field(ge=1)] = 1
    """Attempts at one problem."""
    success_threshold: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Score of the package from which an answer counts as right."""
    reward: Literal["success", "score"] = "success"
    """1 for a right answer; or by how much the package's score exceeds the best so far."""

    name: ClassVar[str] = "reasoning_gym"

    def __hash__(self) -> int:
        """Settings are hashed by their text, as `params` cannot be."""
        return hash(repr(self))

    @property
    def level(self) -> str:
        """Version of the package, generator and settings."""
        params = f"-{digest(repr(sorted(self.params.items())))}" if self.params else ""
        return f"{version_of('reasoning-gym', _EXTRA)}/{self.dataset}{params}"

    @property
    def properties(self) -> Properties:
        """Properties of the environment; most scorers take microseconds, and 10 ms for the longest answers."""
        isolated = self.dataset in UNSTABLE or self.dataset in EVALUATED
        return replace(
            super().properties,
            deterministic=self.dataset not in UNSTABLE,
            inline=not (isolated or self.dataset in SLOW),
            oracle=self.dataset not in NO_REFERENCE,
            package=f"reasoning-gym {version_of('reasoning-gym', _EXTRA)}",
            isolated=isolated,
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of a split, in the order of generation.

        Raises:
            EnvError: no such split, no such generator, or settings that it refuses.
            MissingPackageError: `reasoning_gym` is not installed.
        """
        n = self.n_in(split)
        prefix = f"{self.name}/{self.level}/{split}"
        return [
            Task(id=f"{prefix}/{i}", seed=i, info={"problem": digest(str(problem(self, i)["question"]))})
            for i in _numbers(self, split, n)
        ]

    def instance(self, task: Task) -> Mapping[str, Any]:
        """The package's entry of a task. Raises EnvError where it is another one than in the process that listed it."""
        entry = problem(self, task.seed)
        if task.info.get("problem", digest(str(entry["question"]))) != digest(str(entry["question"])):
            raise EnvError(
                "this generator makes a different problem in this process",
                where=task.id,
                got=self.dataset,
                expected=f"the problem {task.info['problem']}",
                hint="it depends on the hash seed: start all processes with PYTHONHASHSEED=0",
            )
        return entry

    def start(self, task: Task) -> ReasoningEpisode:
        """Begin one attempt at a task."""
        return ReasoningEpisode(self, task)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Reference answer, on one line if that is accepted too; None if there is none, or it is wrong."""
        reference = self.instance(task)["answer"]
        if not isinstance(reference, str):
            return None
        flat = " ".join(reference.split())
        right = next((text for text in (flat, reference) if self.score(task, text) >= self.success_threshold), None)
        return plan_answer(self.start(task), taken, right)

    def score(self, task: Task, answer: str) -> float:
        """Score of an answer by the package, within [0, 1]; 0 for a form that is unsafe to score."""
        if not answer.strip() or len(answer) > _LONGEST or not _PLAIN.get(self.dataset, bool)(answer):
            return 0.0
        if self.dataset in CREDULOUS:
            return float(answer.strip().lower() == str(self.instance(task)["answer"]).lower())
        try:
            if self.dataset in PROBABILITY:
                right = Fraction(str(self.instance(task)["answer"]))
                off = abs(Fraction(answer.replace(",", "")) - right)
                return float(off <= min(Fraction(1, 10_000), right / 100))
            with _LOCK:
                score = float(_generator(self, task.seed // _CHUNK).score_answer(answer, self.instance(task)))
        except Exception:  # scorers raise on what they cannot parse
            return 0.0
        return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0


class ReasoningEpisode(Attempts):
    """Attempts at one problem. The key of a state tells the problem, the answers given, and how many are left."""

    def __init__(self, settings: ReasoningGym, task: Task) -> None:
        self._settings, self._task, self._best, self._score = settings, task, 0.0, 0.0
        question = str(settings.instance(task)["question"]).strip()
        super().__init__(
            question, self._judged, name=f"{settings.dataset}/{digest(question)}", max_steps=settings.max_steps
        )

    async def step(self, action: str) -> StepResult:
        """Score one answer."""
        result = await super().step(action)
        if self._settings.reward == "success":
            return result
        gained, self._best = max(self._score - self._best, 0.0), max(self._best, self._score)
        return replace(result, reward=gained)

    def _judged(self, text: str) -> Judged:
        self._score = self._settings.score(self._task, text)
        solved = self._score >= self._settings.success_threshold
        return Judged("Right." if solved else "That is not right.", text.strip() or None, solved)


#: Generators keep state of their own, and some draw with the global `random`.
_LOCK = threading.RLock()


@lru_cache(maxsize=64)
def _numbers(world: ReasoningGym, split: str, n: int) -> tuple[int, ...]:
    """The first `n` problems that belong to a split, without repetitions."""
    found: list[int] = []
    seen: set[str] = set()
    fruitless = i = 0
    while len(found) < n and fruitless < _PATIENCE:
        question = str(problem(world, i)["question"])
        fruitless += 1
        if question not in seen and split_of(question) == split:
            found.append(i)
            fruitless = 0
        seen.add(question)
        i += 1
    return tuple(found)


@lru_cache(maxsize=16_384)
def problem(world: ReasoningGym, i: int) -> Mapping[str, Any]:
    """The `i`-th problem of a generator. Raises EnvError, MissingPackageError."""
    with _LOCK:
        entry: Mapping[str, Any] = _generator(world, i // _CHUNK)[i % _CHUNK]
    return entry


@lru_cache(maxsize=64)
def _generator(world: ReasoningGym, chunk: int) -> Any:
    package = import_from("reasoning_gym", "reasoning-gym", _EXTRA)
    known = sorted(import_from("reasoning_gym.factory", "reasoning-gym", _EXTRA).DATASETS)
    if world.dataset not in known or world.dataset == "composite":
        raise EnvError(
            "reasoning-gym has no such generator",
            where="environment.dataset",
            got=repr(world.dataset),
            expected=nearest(world.dataset, known) or ", ".join(known),
        )
    try:
        return package.create_dataset(world.dataset, seed=1_000_003 * chunk + 42, size=_CHUNK, **world.params)
    except Exception as error:
        raise EnvError(
            "reasoning-gym refuses these settings", where="environment.params", got=f"{world.params}: {error}"
        ) from error
