"""The reward-model stage: its recipe keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem, unused
from rlhf.rollout.group_structure import GroupStructure, Independent
from rlhf.settings import STRICT
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.contrib.node_merging import Merging
from rlhf.training.policy.lora import Lora, no_base
from rlhf.training.stages.pair_settings import PairStage, made_as


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardModel(PairStage):
    """Train a reward model; the policy is not changed.

    The model is a copy of the policy, adapters merged, with one number in place of the output layer. It is judged on
    tasks that it was not trained on, and saved in `reward_model/` of the run.

    `objective: pairwise` is Bradley-Terry, by TRL: r is read at the last token, and the loss of a pair is
    −log σ(r_chosen − r_rejected) + c (r_chosen + r_rejected)². For `rewards: {kind: reward_model}`.

    `objective: outcome` and `objective: process` read σ(number), the probability that the attempt comes out right: at
    its last sampled token, or at the last of each turn. The loss of a label y is −y log p − (1 − y) log(1 − p), and its
    mean is over the labels of an update. For `rewards: {kind: outcome_model}` and `{kind: process_model}`. `pairs` then
    says which attempts are made, and `pairs_per_microbatch` and `batch_size` count attempts, or nodes where turns
    merge.

    Sources: Bradley and Terry, Biometrika 39, 1952; centring, arXiv 2312.09244; outcome and process supervision, arXiv
    2211.14275; labels of steps from continuations, arXiv 2412.11006.
    """

    objective: Literal["pairwise", "outcome", "process"] = "pairwise"
    """Training signal: pairwise preference (Bradley-Terry), outcome of an attempt (ORM), or probability of success
    after each turn (PRM)."""
    success_threshold: float = 1.0
    """Score from which an attempt is correct, for `outcome` and `process`."""
    rollout: GroupStructure = Field(default_factory=Independent)
    """Group structure of the attempts of `process` and `pairwise`. The outcomes of attempts that branch after a turn
    label that turn; independent attempts have one label for all of their turns."""
    eta: Annotated[float, Field(ge=0)] = 1.0
    """η of the labels of `process`: (1/η) ln mean exp(η r) over the attempts that continue from there; 0 is their mean.
    """
    merge: Merging | None = None
    """Turns of `process` merged into nodes, as data augmentation; null scores each turn given everything before it."""
    lora: Lora | None = None
    """Train adapters, merged at the end, and the scalar head; null trains all weights."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the tasks held out to evaluate the model."""
    centring: Annotated[float, Field(ge=0)] = 0.01
    """c of `pairwise`, which centres the scores of a pair at 0; 0 does not."""
    epochs: Annotated[int, Field(ge=1)] = 2
    """Epochs over the pairs or attempts."""
    optimizer: AdamW = Field(default_factory=lambda: AdamW(lr=1e-5, schedule="linear", warmup_steps=5))
    """Optimizer of the weights."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Also refuse keys without effect on this objective, and impossible attempts."""
        yield from super().check(context)
        lora = context.recipe.policy.lora
        if lora is not None and lora.quantization is not None:
            whose, expected = "a reward model, which is a copy of that base", "a base in its own number format"
            yield no_base("policy.lora.quantization", lora.quantization, whose, expected)
        yield from self._unlearnt(context)
        yield from made_as(self, context)

    @property
    def needs_pairs(self) -> bool:
        """True if it learns from pairs."""
        return self.objective == "pairwise"

    def _unlearnt(self, context: CheckContext) -> Iterator[Problem]:
        """Yield problems with keys of another thing to learn from."""
        path, why = context.path, f"{context.path} has objective: {self.objective}"
        of_steps, of_pairs = "remove the key, or use objective: process", "remove the key, or use objective: pairwise"
        if self.objective == "pairwise":
            yield from unused(self, ("success_threshold", "eta", "merge"), path, why, of_steps)
            return
        yield from unused(self, ("centring",), path, why, of_pairs)
        if self.objective == "outcome":
            yield from unused(self, ("rollout", "eta", "merge"), path, why, of_steps)
        names = ("file", "level", "gamma", "margin", "max_per_task", "role", "rejected_from")
        yield from unused(self.pairs, names, context.at("pairs"), why, of_pairs)
