"""What all rewards have in common that run what a policy wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.fences import fenced
from rewards.sandbox.level import Level, LevelName, Way
from rewards.sandbox.probe import reached
from rewards.sandbox.run import Bounds
from rewards.verified import Verified
from rlhf.settings import STRICT

_LANGUAGES = ("", "python", "python3", "py")
_Seconds = Annotated[float, Field(gt=0, le=600)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sandboxed:
    """Runs programs in the sandbox, at the best level of the machine; see docs/sandbox.md."""

    min_level: LevelName = "rlimits"
    """The run is refused on a machine whose sandbox does not reach this: `rlimits`, `namespaces`, or `bubblewrap`."""
    cpu_s: _Seconds = 4.0
    """Processor time of a program, for each test."""
    wall_s: _Seconds = 8.0
    """Time of a program, for each test."""
    memory_mb: Annotated[int, Field(ge=32)] = 512
    """Memory of a program."""

    slow_s: ClassVar[float] = 20.0

    @property
    def bounds(self) -> Bounds:
        """What each program may use."""
        return Bounds(cpu_s=self.cpu_s, wall_s=self.wall_s, memory_mb=self.memory_mb)

    def way(self, where: str) -> Way:
        """How programs are run here. Raises RecipeError where that is less than `min_level`."""
        return reached().at_least(Level.named(self.min_level), where)


def sandbox_record(rewards: Mapping[str, Any]) -> dict[str, object] | None:
    """Say which level the rewards' programs run at, for the record of a run; None where no reward runs any.

    Args:
        rewards: by their names in the recipe.

    Raises:
        RecipeError: a reward demands more than this machine offers.
        RewardError: this machine offers nothing.
    """
    using = list(_sandboxed("rewards", rewards))
    for path, reward in using:
        reward.way(f"{path}.min_level")
    return reached().record() if using else None


def _sandboxed(path: str, part: Any) -> Iterator[tuple[str, Sandboxed]]:
    """Give path and settings of every reward that runs programs, those within another included."""
    if isinstance(part, Sandboxed):
        yield path, part
    elif isinstance(part, Verified):
        yield from _sandboxed(path, part.verifier)
    elif isinstance(part, Mapping):
        for name, inner in part.items():
            yield from _sandboxed(f"{path}.{name}", inner)
    elif isinstance(part, list | tuple):
        for i, inner in enumerate(part):
            yield from _sandboxed(f"{path}[{i}]", inner)
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        for field in dataclasses.fields(part):
            yield from _sandboxed(f"{path}.{field.name}", getattr(part, field.name))


def program_of(answer: str) -> str | None:
    """Return the last Python block of `answer`, between lines of three backticks; None where it has none."""
    found = [text for language, text in fenced(answer) if language.lower() in _LANGUAGES]
    return found[-1] if found and found[-1].strip() else None
