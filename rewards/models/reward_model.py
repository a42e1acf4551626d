"""Learned rewards: outcome, process and preference models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.models.model_folder import SCALE, ModelReward, Row, nodes_of, pooled
from rewards.models.step_rows import StepRow, aggregated, cut, node_row, step_rows, telescoped
from rlhf.data import Trajectory, Verdict
from rlhf.errors import ModelError
from rlhf.settings import STRICT
from rlhf.stats import sigmoid


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardModelScore(ModelReward):
    """Score of a reward model for the token ids of an attempt, read at the last one.

    The folder is that of a `reward_model` stage, `runs/NAME/reward_model/STAGE`, or of any sequence classifier with one
    label whose tokenizer is the policy's: what it reads are the ids that were sampled, never text. All attempts at a
    task are scored together. A model that fails, or says something that is no finite number, makes all of them failures
    of the reward, and never a zero; so does an attempt in which the policy said nothing, as there is nothing to read.

    A version x that a stage has trained further is served as a x + b, in the scale of the version before it; its folder
    says a and b.
    """

    def read(self, model: Any, rows: Sequence[Row]) -> list[list[float]]:
        """Score at the last token that is not padding, as in TRL's training."""
        a, b = getattr(model.config, SCALE, (1.0, 0.0))
        return [[a * x + b for x in values] for values in pooled(model, rows, self.batch_size)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OutcomeModelScore(ModelReward):
    """Probability that the attempt is correct: σ of a reward model's score at the last sampled token.

    The folder is that of a `reward_model` stage with `objective: outcome`. What cannot be read, or a model that fails,
    is a failure of the reward, and never a zero.
    """

    unrefreshed: ClassVar[tuple[str, ...]] = ("eta", "max_per_task", "centring")
    learnt: ClassVar[str] = "outcome"

    def verdict(self, trajectory: Trajectory, said: Sequence[Sequence[float]]) -> Verdict:
        """The probability."""
        p = sigmoid(said[-1][-1])
        return Verdict(p, f"right with {p:.0%}, by {self.name}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProcessModelScore(ModelReward):
    """Change of the probability of success with each turn, by a process reward model.

    The folder is that of a `reward_model` stage with `objective: process`, read at the last sampled token of each turn:
    p_k = σ(number). With `aggregation: telescoped` turn k earns p_k − p_{k−1}, with p_0 = 0; the turns sum to the last
    p, so that a policy gains nothing by more steps. Otherwise the attempt earns one number, on its last turn.
    Probabilities (.9, .8, .3) are worth .9, −.1 and −.5 by turn; as one number .3 (min), .216 (product), .3 (last) or
    .667 (mean).

    With `node` n the turns of an attempt are taken n at a time, and a node earns on its last turn: a mistake
    that is mended within it costs nothing, by `min` neither. A model that was trained with `merge` reads each node with
    a mark before it; any other is asked where nodes end. Probabilities (.2, .8, .9, .7) by turn have the least .2, and
    where nodes of two turns end (.8, .7) the least .7.

    Turns that the policy did not take are not read: the first that it took earns its whole p. What cannot be read, or a
    model that fails, is a failure of the reward, and never a zero.

    Sources: Lightman and others, arXiv 2305.20050; the minimum over steps is theirs too. Nodes: arXiv 2503.13551.
    """

    unrefreshed: ClassVar[tuple[str, ...]] = ("max_per_task", "centring")
    learnt: ClassVar[str] = "process"

    aggregation: Literal["telescoped", "min", "product", "last", "mean"] = "telescoped"
    """Aggregate of the probabilities: a value for each turn, or one number."""
    node: Annotated[int, Field(ge=1)] = 1
    """Turns that are judged as one, from the first of the attempt on; no more than the model has learnt, where it
    reads nodes."""

    def rows(self, trajectory: Trajectory) -> list[Row]:
        """The rows of the attempt, asked where each node ends."""
        read = step_rows(trajectory)
        nodes = nodes_of(self.path)
        if nodes is None:
            return [(row.token_ids, [row.ends[last] for _, last in self._nodes(row)]) for row in read]
        marked = (node_row(row, *node, nodes[0]) for row in read for node in self._nodes(row))
        return [(ids, (end,)) for ids, end in marked]

    def _nodes(self, row: StepRow) -> list[tuple[int, int]]:
        return cut(len(row.turns), self.node)

    def check_policy(self, tokenizer: Any) -> None:
        """Also refuse a model that was not trained on nodes of this many turns. Raises ModelError."""
        super().check_policy(tokenizer)
        nodes = nodes_of(self.path)
        if nodes is not None and self.node > nodes[1]:
            raise ModelError(
                "the reward model was not trained on nodes of this length",
                where=f"reward model {self.path}",
                got=f"node: {self.node}",
                expected=f"at most {nodes[1]}, the `merge.max_turns` of its stage",
                hint="lower node, or train the model with a longer one",
            )

    def verdict(self, trajectory: Trajectory, said: Sequence[Sequence[float]]) -> Verdict:
        """Values per turn, or one number."""
        p = [sigmoid(x) for row in said for x in row]
        why = f"{', '.join(f'{x:.2f}' for x in p[-12:])} by {self.name}"
        if self.aggregation != "telescoped":
            return Verdict(aggregated(p, self.aggregation), why)
        earned = [0.0] * len(trajectory.turns)
        turns = [row.turns[last] for row in step_rows(trajectory) for _, last in self._nodes(row)]
        for number, x in zip(turns, telescoped(p), strict=True):
            earned[number] = x
        return Verdict(math.fsum(earned), why, tuple(earned))
