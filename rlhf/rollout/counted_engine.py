"""Engine wrapper of a group: counts sampled tokens by policy version, and calls for which no server was left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from rlhf.data import Generation, PolicyWeights, Prompt, SamplingParams, ScoredGroup, WeightsForm
from rlhf.data.generation import counted_once
from rlhf.inference.engine import RolloutEngine
from rlhf.inference.vllm.instance import NoInstanceError


class CountedEngine:
    """A `RolloutEngine` that passes everything on.

    Args:
        engine: samples.
        on_tokens: called with (version, tokens) for each version that sampled some of a generation.

    Attributes:
        n_refused: calls so far for which no instance was left.
    """

    def __init__(self, engine: RolloutEngine, on_tokens: Callable[[int, int], object]) -> None:
        self._engine, self._on_tokens, self.n_refused = engine, on_tokens, 0

    @property
    def policy_version(self) -> int:
        """Version of the weights that new calls use."""
        return self._engine.policy_version

    @property
    def weights_form(self) -> WeightsForm:
        """Form in which `load` takes weights."""
        return self._engine.weights_form

    @property
    def shares_policy(self) -> bool:
        """True if it computes with the trainer's own module."""
        return self._engine.shares_policy

    @property
    def max_context(self) -> int:
        """Most tokens of one call."""
        return self._engine.max_context

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        """Sample once, and count."""
        try:
            generation = await self._engine.generate(prompt, params, session)
        except NoInstanceError:
            self.n_refused += 1
            raise
        for version, n in spans_of(generation):
            self._on_tokens(version, n)
        return generation

    async def release(self, session: str) -> None:
        """Forget a session's cache."""
        await self._engine.release(session)

    async def load(self, weights: PolicyWeights) -> None:
        """Use `weights` for all new calls."""
        await self._engine.load(weights)

    async def close(self) -> None:
        """Leave the engine open: it belongs to the run."""


def spans_of(generation: Generation) -> Iterable[tuple[int, int]]:
    """Return (version, tokens) of each version that sampled some of a generation."""
    return generation.version_spans or ((generation.policy_version, generation.n_tokens),)


def tokens_by_version(group: ScoredGroup) -> Mapping[int, int]:
    """Return how many tokens of the attempts that count each version has sampled; shared ones count once."""
    turns = (turn for trajectory in group.trajectories for turn in trajectory.own_turns)
    found: Counter[int] = Counter()
    for generation in counted_once(turn.generations for turn in turns):
        for version, n in spans_of(generation):
            found[version] += n
    return found
