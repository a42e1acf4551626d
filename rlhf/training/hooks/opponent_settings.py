"""Games against older versions of the policy: the recipe keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Opponents:
    """Let older versions of the policy have a seat of some of the games that it plays against itself.

    The policy of the stage's begin is the first version; after every `every` steps the present one joins, and of all of
    them the last `keep` stay. In about `share` of the games one seat is played by one of them, each as likely as
    another; which seat it is alternates from one such game of a group to the next. What it says is read by the others
    and never trained on, and `advantage: {kind: seats}` compares its seat with nobody's.

    What a version costs are its trained parameters, of an adapter the adapter, in memory and in every checkpoint. It
    needs the engine that shares the trainer's module.

    Sources: sampling from stale snapshots, AgentRL, arXiv 2510.04206; fictitious self-play, Heinrich, Lanctot, Silver,
    2015.
    """

    every: Annotated[int, Field(ge=1)] = 10
    """Steps after which the present policy joins the older ones."""
    keep: Annotated[int, Field(ge=1)] = 4
    """How many older versions stay: the last so many."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Chance that an older version has a seat of a game."""
