"""Policy weights: a version and where the parameters are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: How an engine takes weights: it shares the trainer's module; it is sent every parameter; or only the adapter's.
WeightsForm = Literal["shared", "full", "adapter"]
#: Gives (name, tensor), one after the other.
ParameterIterator = Callable[[], Iterable[tuple[str, Any]]]


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """A version of the policy.

    Attributes:
        version: counts optimiser publications from 0; never goes back.
        fingerprint: short digest of the parameters; an engine answers with the one it holds. Empty when it is known
            only once the parameters have been walked: the engine then compares what was sent with what arrived.
        parameters: walks the parameters, one (name, tensor) at a time, each gathered from wherever its shards lie and
            free to be changed once the next is asked for; None when engine and trainer share a module.
        adapter: settings of a PEFT adapter, as its `adapter_config.json` has them, if `parameters` are an adapter's.
        roles: walks, as `parameters` does, the adapter of each role that has one of its own, of the same settings.
    """

    version: int
    fingerprint: str = ""
    parameters: ParameterIterator | None = None
    adapter: Mapping[str, Any] | None = None
    roles: Mapping[str, ParameterIterator] = field(default_factory=dict)

    @property
    def form(self) -> WeightsForm:
        """Form in which these weights are delivered."""
        return "shared" if self.parameters is None else "full" if self.adapter is None else "adapter"
