"""Policy weights: a version and where the parameters are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """A version of the policy.

    Attributes:
        version: counts optimiser publications from 0; never goes back.
        fingerprint: short digest of the parameters; an engine answers with the one it holds.
        path: folder in HF format where the parameters lie, or None when they are shared in memory.
    """

    version: int
    fingerprint: str
    path: str | None = None
