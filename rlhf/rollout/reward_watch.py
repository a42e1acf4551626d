"""What a recipe says of a reward that is watched: computed and logged, and never trained on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Watch:
    """What a watched reward is compared with, and what follows when the two part. `watch: true` takes the defaults."""

    of: str | None = None
    """The trained reward that it stands beside, by its name in the recipe; null compares with the whole score."""
    window: Annotated[int, Field(ge=8)] = 20
    """Steps over which a trend is looked for; twice, four times as many, and so on are looked at too."""
    stop: bool = False
    """Whether the run stops, once in a stage, when the trained reward rises while this one falls."""
