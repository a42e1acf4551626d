"""A teacher that scores what the policy sampled, for losses with a key `teacher`.

It is frozen and looks at the rows of a step once, before the first update. What a resumed run needs of it is in the
recipe: the coefficient is a function of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlhf.batching.samples import Floats, Sample
from rlhf.data import ScoredGroup
from rlhf.errors import ModelError, boundary
from rlhf.inference.embedded.attention import use_packed_attention
from rlhf.losses.contrib.kdrl import KDRL, Teach
from rlhf.losses.policy_loss import PolicyLoss
from rlhf.training.backends.sequence_parallel import check_heads
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.context import LiveStage, RunContext, StageKeys
from rlhf.training.hooks.base import StageHook, Step
from rlhf.training.policy.model import Policy
from rlhf.training.policy.model_files import base_or, check_context_of, load_folder


@dataclass(frozen=True, slots=True)
class Teacher:
    """A causal language model without gradient, with the policy's tokenizer and on its device.

    Attributes:
        model: as its folder has it, in the number format of the policy.
        where: what it is called in messages.
    """

    model: Any
    where: str

    @classmethod
    def load(cls, path: str, policy: Policy) -> Teacher:
        """Return the model of a Hugging Face folder or hub name.

        Raises:
            ModelError: it cannot be loaded, or its tokenizer is not the policy's.
        """
        where = f"loss.teacher {path}"
        first = next(policy.model.parameters())
        model, tokenizer = load_folder(path, dtype=str(policy.model.dtype).removeprefix("torch."), where=where)
        _check_tokenizers(tokenizer.get_vocab(), policy.tokenizer.get_vocab(), where)
        model.requires_grad_(False).to(first.device).eval()
        use_packed_attention(model)
        return cls(model, where)

    def teach(self, stage: StageKeys, trainer: TorchTrainer, rows: Sequence[Sample]) -> list[Floats]:
        """Teacher log-probs of each row's policy tokens, at their sampling temperature."""
        rows = [replace(row, adapter="") for row in rows]  # adapters of roles are the policy's
        budget = stage.max_tokens_per_microbatch
        return trainer.compute_token_stats(
            rows, (), temperature=stage.temperature, max_tokens=budget, model=self.model
        )["logprobs"]


def check_teachers(losses: Iterable[object], policy: Policy, max_context: int) -> None:
    """Raise ModelError where the teacher that a loss names has another tokenizer than the policy, or none.

    Or where it cannot read rows of `max_context` tokens.
    """
    from transformers import AutoTokenizer

    for path in {loss.teacher for loss in losses if isinstance(loss, KDRL)}:
        where = f"loss.teacher {path}"
        with boundary(ModelError, where, "give the folder or the hub name of a model with its tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(base_or(path))
        _check_tokenizers(tokenizer.get_vocab(), policy.tokenizer.get_vocab(), where)
        check_context_of(path, max_context, where)


def teacher_of(stage: StageKeys, policy: Policy) -> Teacher | None:
    """Return the teacher that the stage's loss names, or None.

    Raises:
        ModelError: it cannot be loaded, or its tokenizer is not the policy's.
        TrainingError: the processes that share a row cannot share its attention heads.
    """
    if not isinstance(stage.loss, KDRL):
        return None
    teacher = Teacher.load(stage.loss.teacher, policy)
    check_heads(getattr(stage.trainer, "sequence_parallel", 1), teacher.model, f": {teacher.where}")
    return teacher


@dataclass(frozen=True)
class TeacherHook(StageHook):
    """Teacher hook of a stage: its loss coefficient, and its log-probs on the rows.

    Attributes:
        teacher: of the stage.
        n_steps: of the stage.
    """

    teacher: Teacher
    n_steps: int

    @classmethod
    def of(cls, stage: StageKeys, policy: Policy) -> TeacherHook | None:
        """Return the hook of a stage; None where its loss names no teacher."""
        teacher = teacher_of(stage, policy)
        return None if teacher is None else cls(teacher, stage.steps)

    def loss_of(self, run: RunContext, loss: PolicyLoss, number: int) -> PolicyLoss:
        """Return the loss with the teacher's coefficient at a step, counted from 0."""
        return loss.at(number, self.n_steps) if isinstance(loss, KDRL) else loss

    def transform_samples(self, parts: LiveStage, step: Step, samples: Sequence[Sample]) -> Sequence[Sample]:
        """See `with_teacher_logprobs`."""
        return with_teacher_logprobs(self.teacher, step.stage, parts.trainer, samples, step.groups)


def with_teacher_logprobs(
    teacher: Teacher,
    stage: StageKeys,
    trainer: TorchTrainer,
    samples: Sequence[Sample],
    groups: Sequence[ScoredGroup],
) -> list[Sample]:
    """Return the rows with the teacher's log-probs where it is to teach, NaN elsewhere.

    Args:
        teacher: of the stage.
        stage: says who is taught.
        trainer: runs the forward pass, over the rows that are taught.
        samples: rows of the step.
        groups: of the step; `Sample.sequence` numbers their trajectories in order.
    """
    if not isinstance(stage.loss, KDRL):
        return list(samples)
    chosen = pupils(groups, stage.loss.teach, stage.loss.correct_above)
    rows = [s for s in samples if s.sequence in chosen]
    found = iter(teacher.teach(stage, trainer, rows))
    return [_with(s, next(found) if s.sequence in chosen else None) for s in samples]


def pupils(groups: Sequence[ScoredGroup], teach: Teach, correct_above: float) -> set[int]:
    """Return the numbers of the trajectories that are taught, counted over all groups in order.

    Scores of (0, 1), (0, 0) and (1, 1): all six; of the wrong ones 0, 2 and 3; of silent groups 2 and 3.
    """
    chosen, first = set(), 0
    for group in groups:
        totals = [score.total for score in group.scores]
        wrong = {first + i for i, total in enumerate(totals) if total <= correct_above}
        silent = len(wrong) == len(totals) and len(set(totals)) <= 1
        everyone = set(range(first, first + len(totals)))
        chosen |= {"all": everyone, "wrong": wrong, "silent_groups": wrong if silent else set()}[teach]
        first += len(totals)
    return chosen


def _with(sample: Sample, logprobs: Floats | None) -> Sample:
    row = np.zeros(len(sample), np.float32)
    row[sample.mask] = np.nan if logprobs is None else logprobs
    return replace(sample, teacher_logprobs=row)


def _check_tokenizers(theirs: Mapping[str, int], ours: Mapping[str, int], where: str) -> None:
    differing = sorted({*theirs.items()} ^ {*ours.items()}, key=lambda item: item[1])
    if differing:
        _, number = differing[0]
        raise ModelError(
            "the teacher's tokenizer differs from the policy's, so it cannot score sampled tokens",
            where=where,
            got=f"{len(theirs)} tokens, of which {_name(theirs, number)} is number {number}",
            expected=f"the policy's {len(ours)} tokens, of which {_name(ours, number)} is",
            hint="use a teacher of the same family as the policy",
        )


def _name(vocabulary: Mapping[str, int], number: int) -> str:
    found = [token for token, n in vocabulary.items() if n == number]
    return repr(found[0]) if found else "none"
