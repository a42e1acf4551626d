"""Base of rewards that run what a policy wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers.extract import fenced
from rewards.combinators.parts import with_parts
from rewards.sandbox.level import Isolation, Level, LevelName
from rewards.sandbox.probe import probe_isolation
from rewards.sandbox.run import Bounds, Sandbox
from rlhf.checking import CheckContext, Problem, no_effect
from rlhf.settings import STRICT

_LANGUAGES = ("python", "python3", "py")
_Seconds = Annotated[float, Field(gt=0, le=600)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sandboxed:
    """Runs programs in the sandbox, at the best level of the machine; see docs/sandbox.md."""

    min_level: LevelName = "rlimits"
    """The run is refused on a machine whose sandbox does not reach this: `rlimits`, `namespaces`, or `bubblewrap`."""
    sandbox: Sandbox | None = None
    """Sandbox that programs run in: null is this machine's own sandbox; a container, or a service elsewhere."""
    cpu_s: _Seconds = 4.0
    """Processor time of a program, for each test."""
    wall_s: _Seconds = 8.0
    """Time of a program, for each test."""
    memory_mb: Annotated[int, Field(ge=32)] = 512
    """Memory of a program."""

    slow_s: ClassVar[float] = 20.0

    @property
    def bounds(self) -> Bounds:
        """Resource limits of each program."""
        return Bounds(cpu_s=self.cpu_s, wall_s=self.wall_s, memory_mb=self.memory_mb)

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a level of a sandbox that is not used."""
        if self.sandbox is not None and self.min_level != "rlimits":
            yield no_effect(context.at("min_level"), self.min_level, "programs run in another sandbox")

    def isolation(self, where: str) -> Isolation | Sandbox:
        """Sandbox of programs here. Raises RecipeError where that is less than `min_level`, or nowhere."""
        if self.sandbox is not None:
            self.sandbox.refuse_absent(f"{where}.sandbox")
            return self.sandbox
        return probe_isolation().at_least(Level.named(self.min_level), f"{where}.min_level")


def sandbox_record(rewards: Mapping[str, Any]) -> dict[str, object] | None:
    """Sandbox level of the rewards' programs, for a run's record; None where no reward runs any.

    Args:
        rewards: by their names in the recipe.

    Raises:
        RecipeError: a reward demands more than this machine offers.
        RewardError: this machine offers nothing.
    """
    using = [(path, part) for path, part in with_parts("rewards", rewards) if isinstance(part, Sandboxed)]
    for path, reward in using:
        reward.isolation(path)
    other = [str(reward.sandbox) for _, reward in using if reward.sandbox is not None]
    if other:
        return {"level": ", ".join(sorted(set(other)))}
    return probe_isolation().record() if using else None


def program_of(answer: str) -> str | None:
    """Return the last Python block of `answer`, between lines of three backticks; None where it has none.

    Blocks without a language count where none is Python: behind a program they show what it prints.
    """
    blocks = list(fenced(answer))
    found = [text for language, text in blocks if language.lower() in _LANGUAGES]
    found = found or [text for language, text in blocks if not language]
    return found[-1] if found and found[-1].strip() else None
