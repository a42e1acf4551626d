"""A repository of a model hub that a trained policy is pushed to."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Hub:
    """Repository on a hub, which the last checkpoint is pushed to once the run has ended."""

    repo: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    """User or organisation, slash, name: `me/my-model`."""
    private: bool = True
    """Make a new repository private; one that is there stays as it is."""
