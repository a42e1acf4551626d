"""Engine settings of a recipe. Torch-free: an engine is built only by `rlhf.build`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TransformersSettings:
    """The embedded engine: in process, sharing the policy's parameters with the trainer."""

    max_sessions: Annotated[int, Field(ge=1)] = 128
    """Episodes whose key/value cache is kept at a time."""
    max_batch_tokens: Annotated[int, Field(ge=1)] = 4096
    """Most tokens of one forward pass; a longer prompt is computed in pieces."""
