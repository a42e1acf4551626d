"""Refusal of sampling parameters other than the recipe's: log-probs would be of another distribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.gateway.request import Refusal


def conflicting_parameters(sampling: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """The parameters of a request by which its replies would come from another distribution than is recorded."""
    return {name: value for name, value in sampling.items() if not (name == "temperature" and value == temperature)}


def sampling_refusal(found: Mapping[str, Any], temperature: float) -> Refusal:
    """The refusal of such a request."""
    got = ", ".join(f"{name}={value!r}" for name, value in found.items())
    return Refusal(
        400,
        "these parameters would sample otherwise than the recipe does, and log-probs would be of another "
        f"distribution. Got: {got}. Expected: none of them, or temperature={temperature:g}. "
        "Do: leave them out, or set agent.override_sampling: true in the recipe, which overrides and counts them.",
        "sampling_parameters",
    )
