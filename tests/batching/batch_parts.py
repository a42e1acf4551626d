"""Trajectories over a tiny vocabulary and a tiny language model, for tests of batching."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from rlhf.batching.pack import PackedBatch
from rlhf.data import Action, Credit, Finish, Generation, Outcome, Prompt, Score, ScoredGroup, Trajectory, Turn

VOCABULARY = 6


def generation(prompt: Sequence[int], sampled: Sequence[int], logprob: float = -0.5) -> Generation:
    return Generation(Prompt(tuple(prompt)), tuple(sampled), (logprob,) * len(sampled), Finish.STOP, 0)


def trajectory(*generations: Generation, outcome: Outcome = Outcome.FAILED, task_id: str = "task") -> Trajectory:
    """A trajectory with one turn per generation."""
    turns = tuple(Turn(Action("act", (g,)), "reply") for g in generations)
    return Trajectory(task_id, 0, "opening", turns, outcome)


def group(*trajectories: Trajectory) -> ScoredGroup:
    scores = tuple(Score({}, (0.0,) * len(t.turns), 0.0) for t in trajectories)
    return ScoredGroup(trajectories[0].task_id, trajectories, scores)


def constant_credit(made: ScoredGroup, values_G: Sequence[float]) -> Credit:
    """Credit with one number per trajectory."""
    return Credit(
        tuple(
            tuple((value,) * len(g.token_ids) for g in t.generations)
            for t, value in zip(made.trajectories, values_G, strict=True)
        )
    )


ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=0, max_size=3)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Up to four generations; most prompts extend what came before, some are rewritten, some sample nothing."""
    made: list[Generation] = []
    prompt = [0, *draw(ids)]
    for _ in range(draw(st.integers(1, 4))):
        sampled = draw(ids)
        logprob = draw(st.sampled_from([-0.1, -1.0, -2.5]))
        made.append(generation(prompt, sampled, logprob))
        extends = draw(st.integers(0, 3)) > 0
        prompt = [*prompt, *sampled, *draw(ids)] if extends else [1, *draw(ids)]
    return trajectory(*made)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[ScoredGroup], list[Credit]]:
    """One to three groups, each token with credit of its own."""
    groups = [group(*draw(st.lists(trajectories(), min_size=1, max_size=3))) for _ in range(draw(st.integers(1, 3)))]
    number = st.sampled_from([-1.5, -0.25, 0.0, 0.5, 1.0])
    credits = [
        Credit(tuple(tuple(tuple(draw(number) for _ in g.token_ids) for g in t.generations) for t in made.trajectories))
        for made in groups
    ]
    return groups, credits


class PrefixModel:
    """A language model in float64 whose logits depend on every token of the prefix, in order: h ← tanh(A h + E x)."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"embedding": (VOCABULARY, 4), "recurrence": (4, 4), "head": (4, VOCABULARY)}
        self.parameters = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
            for name, shape in shapes.items()
        }

    def logits(self, row: torch.Tensor) -> torch.Tensor:
        """`[L]` ids to `[L, V]` logits of the next token."""
        hidden, states = torch.zeros(4, dtype=torch.float64), []
        for token in row:
            hidden = torch.tanh(self.parameters["recurrence"] @ hidden + self.parameters["embedding"][token])
            states.append(hidden)
        return torch.stack(states) @ self.parameters["head"]

    def packed_logits(self, batch: PackedBatch) -> torch.Tensor:
        """`[T, V]`: each row by itself, as packed attention has it."""
        return torch.cat([self.logits(row) for row in batch.token_ids.split(batch.lengths.tolist())])

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """∂loss / ∂ all parameters, flat; zeros where the loss does not depend on them."""
        leaves = list(self.parameters.values())
        if not loss.requires_grad:  # a batch without tokens
            return torch.zeros(sum(p.numel() for p in leaves), dtype=torch.float64)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        return torch.cat(
            [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(leaves, found, strict=True)]
        )


def policy_logprobs(logits: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """`[N]`, from logits `[T, V]`."""
    chosen = torch.log_softmax(logits[batch.select], dim=-1)
    return chosen.gather(-1, batch.targets[:, None]).squeeze(-1)
