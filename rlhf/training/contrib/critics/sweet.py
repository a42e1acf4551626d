"""SWEET-RL critic: sees the reference answer, trained on trajectory pairs to score turns."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.random import Generator
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from rlhf.batching.pack import collate
from rlhf.batching.samples import Ints, Sample
from rlhf.checking import CheckContext, Problem
from rlhf.credit.estimator import without_given
from rlhf.credit.flat_tokens import FlatTokens
from rlhf.credit.groups import is_constant
from rlhf.data import ScoredGroup, Task
from rlhf.errors import TrainingError
from rlhf.inference.embedded.attention import packed_forward
from rlhf.losses.preference import bradley_terry, sequence_sums, turn_means
from rlhf.settings import STRICT
from rlhf.training.backends.token_stats import read
from rlhf.training.contrib.critics.turn_buffer import packed, shuffled, values_of_turns
from rlhf.training.critics.base import CriticTrainerBase, StepPredictions, Updates
from rlhf.training.critics.value_model import CriticModelSettings, PartialCheckpointModule
from rlhf.training.critics.values import bare_rows
from rlhf.training.policy.model import Policy

if TYPE_CHECKING:
    from rlhf.training.context import StageKeys

_REFERENCE = "{reference}"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SweetCritic(CriticModelSettings):
    """SWEET-RL critic: scores turns, trained on pairs of attempts and given the reference answer.

        A_k = mean over the tokens of turn k of log π_φ(token | privileged text, what was read) − log π_ref(the same)
        loss = −log σ(β (Σ_k A_k of the better attempt − Σ_k A_k of the worse one))

    π_φ is a model of the critic's own, π_ref what it began as. Log-ratios (.1, .1) and (.2) in the turns of the better
    attempt and (−.1, −.2) and (−.3) in those of the worse: sums of .3 and −.45, and with β = .1 a loss of .65635.

    Source: SWEET-RL, arXiv 2503.15478.
    """

    #: What every critic says that is asked for its memory: it trains a whole model that is not the policy's.
    backbone: ClassVar[str] = "own"
    trains_backbone: ClassVar[bool] = True

    privileged_text: str = "Known in hindsight: {reference}\n\n"
    """Privileged text before what the policy read; `{reference}` is the task's. Empty tells nothing more than the
    policy was told."""
    over: Literal["turns", "tokens"] = "turns"
    """Score of an attempt: the sum of its turns' means, or one mean over all its tokens."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """β, the scale of score differences."""
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """Critic warm-up: steps at the start of the stage in which only the critic is updated."""
    frozen: bool = False
    """Train it only during warm-up, from the policy at the stage's start, then freeze it."""
    epochs: Annotated[int, Field(ge=1)] = 4
    """Epochs over the tasks of a step."""
    batch_size: Annotated[int, Field(ge=1)] = 4
    """Tasks per update, with all their pairs."""

    def __post_init__(self) -> None:
        if self.privileged_text and _REFERENCE not in self.privileged_text:
            raise ValueError(
                f"privileged_text lacks {_REFERENCE}; leave it empty to give the critic no privileged text"
            )
        if self.frozen and not self.warmup_steps:
            raise ValueError("frozen: true trains in warmup_steps only, and there are none; raise them")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse, too, groups without a pair."""
        yield from super().check(context)
        if context.stage.group_size < 2:
            yield Problem(
                "this critic learns from pairs of attempts at one task",
                where=f"{context.stage_path}.group_size",
                got=str(context.stage.group_size),
                expected="at least 2",
                do="raise it; half of the tasks should have attempts that differ in score",
            )

    def privileged_ids(self, task: Task, tokenizer: Any) -> Ints:
        """Token ids of the privileged text of a task, `[n]`; none where nothing is told."""
        text = self.privileged_text.replace(_REFERENCE, task.reference or "")
        return np.array(tokenizer.encode(text, add_special_tokens=False), np.int64)

    def start(self, stage: StageKeys, policy: Policy, start: Path | None, seed: int) -> SweetTrainer:
        """Return what trains it through a stage; see `CriticKind.start`."""
        return SweetTrainer(self, self.build(policy, start, seed), stage, policy.tokenizer)

    def build(self, policy: Policy, start: Path | None, seed: int) -> RatioModel:
        """Return the critic before its first update, when all turns are equal. See `CriticModelSettings.begun`."""
        begun = self.begun(policy, start)
        begun.requires_grad_(True)
        frozen = None if self.lora else self.adapted(copy.deepcopy(begun).requires_grad_(False).eval(), seed)
        model = RatioModel(self.adapted(begun, seed), frozen)
        return model.to(next(policy.model.parameters()).device)


class RatioModel(PartialCheckpointModule):
    """A causal language model and what it began as: a frozen copy, or itself without its adapters.

    Args:
        live: is trained.
        frozen: what it began as; None where adapters are trained.
    """

    def __init__(self, live: nn.Module, frozen: nn.Module | None) -> None:
        super().__init__()
        self.live = live
        self._frozen = [frozen]  # no submodule: nothing of it is trained, and checkpoints hold none of it

    def _apply(self, fn: Any, recurse: bool = True) -> RatioModel:
        if self._frozen[0] is not None:
            self._frozen[0]._apply(fn, recurse)  # type: ignore[no-untyped-call]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    @contextmanager
    def as_begun(self) -> Iterator[nn.Module]:
        """Context in which the model has the weights from before its first update."""
        live: Any = self.live
        if self._frozen[0] is not None:
            yield self._frozen[0]
            return
        with live.disable_adapter():
            yield live


@plain_dataclass(frozen=True, eq=False)
class Attempt:
    """A trajectory of K turns and N sampled tokens, as the critic reads it.

    Attributes:
        rows: with the privileged text before each.
        tokens_K: int `[K]`, sampled tokens of each turn.
        score: what the attempt earned.
        group: number of its task in the step.
        before: float32 `[N]`, nats, log-probs of the model that the critic began as.
    """

    rows: Sequence[Sample]
    tokens_K: Ints
    score: float
    group: int
    before: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __len__(self) -> int:
        return sum(map(len, self.rows))


@plain_dataclass(frozen=True, kw_only=True)
class Compared(StepPredictions):
    """Predictions of advantages, in the place of the values of actions; those of states are 0.

    Attributes:
        attempts: those of each task in which something was sampled, where scores differ.
    """

    attempts: Sequence[Sequence[Attempt]]


def pair_loss(scores_A: Tensor, earned_A: Sequence[float], beta: float) -> Tensor:
    """Bradley-Terry loss: mean −log σ(β (s_i − s_j)) over pairs of attempts at a task where i earned more.

    Args:
        scores_A: Σ_k A_k of each attempt; carries the gradient.
        earned_A: what each earned; not all the same.
        beta: β.
    """
    better, worse = _pairs(earned_A)
    return bradley_terry(beta * scores_A[better], beta * scores_A[worse]).mean()


def _pairs(earned_A: Sequence[float]) -> tuple[list[int], list[int]]:
    n = range(len(earned_A))
    found = [(i, j) for i in n for j in n if earned_A[i] > earned_A[j]]
    return [i for i, _ in found], [j for _, j in found]


class SweetTrainer(CriticTrainerBase[SweetCritic, RatioModel]):
    """Updates a model of log-ratios in place; see `CriticTrainerBase`.

    Args:
        settings: the recipe keys.
        model: of the critic.
        stage: the recipe keys.
        tokenizer: the policy's.
    """

    def __init__(self, settings: SweetCritic, model: RatioModel, stage: StageKeys, tokenizer: Any) -> None:
        n_steps = settings.warmup_steps if settings.frozen else stage.steps
        total = n_steps * settings.epochs * -(-stage.tasks_per_step // settings.batch_size)
        super().__init__(settings, model, settings.optimizer.build(model.parameters()), total)
        self._stage, self._tokenizer = stage, tokenizer
        self._privileged: dict[str, Ints] = {}

    # --- the privileged text ---

    def set_references(self, tasks: Sequence[Task]) -> None:
        """Read the references of the tasks that the stage draws from.

        Raises:
            TrainingError: some have none.
        """
        if not self.settings.privileged_text:
            return
        without = [task.id for task in tasks if task.reference is None]
        if without:
            raise TrainingError(
                "a privileged critic reads the reference of each task, and some tasks have none",
                where="critic.privileged_text",
                got=f"{len(without)} of {len(tasks)} tasks without a reference, such as {without[0]}",
                expected="Task.reference of every task of the split",
                hint="write critic.privileged_text: '' so that the critic reads no more than the policy",
            )
        for task in tasks:
            self._privileged[task.id] = self.settings.privileged_ids(task, self._tokenizer)

    def _prefix(self, task_id: str) -> Ints:
        """Token ids of a task's privileged text; a task from a mid-episode state has that of the whole."""
        if not self.settings.privileged_text:
            return np.zeros(0, np.int64)
        origin = task_id.rpartition("@")[0]
        found = self._privileged.get(task_id, self._privileged.get(origin))
        if found is None:
            raise TrainingError(
                "a privileged critic reads the reference of each task, and this task is not in the stage's split",
                where="critic.privileged_text",
                got=task_id,
                expected=f"one of {len(self._privileged)} tasks",
                hint="write critic.privileged_text: '' so that the critic reads no more than the policy",
            )
        return found

    def _attempts(self, groups: Sequence[ScoredGroup]) -> list[Attempt | None]:
        """Return each trajectory of `groups`, in order; None where the policy sampled nothing."""
        line = FlatTokens.of([without_given(group) for group in groups])
        turns = np.split(line.tokens_K, np.cumsum(line.turns_S)[:-1])
        rows: dict[int, list[Sample]] = {}
        told = [self._prefix(group.task_id) for group in groups]
        for row in bare_rows(groups, "trajectory"):
            rows.setdefault(row.sequence, []).append(_after(told[row.group], row))
        owners = [(number, score.total) for number, group in enumerate(groups) for score in group.scores]
        return [
            Attempt(rows[i], turns[i], score, number) if i in rows else None for i, (number, score) in enumerate(owners)
        ]

    # --- before anything is learnt from a step ---

    @torch.no_grad()
    def predict(self, groups: Sequence[ScoredGroup]) -> Compared:
        """Score of each turn of a step, relative to the critic's initial model."""
        begun = time.perf_counter()
        self.model.eval()
        attempts = [a for a in self._attempts(groups) if a is not None]
        with self.model.as_begun() as frozen:
            before = self._each(attempts, frozen)
        attempts = [replace(a, before=b) for a, b in zip(attempts, before, strict=True)]
        now = self._each(attempts, self.model.live)
        gained = [n - a.before for n, a in zip(now, attempts, strict=True)]
        found = torch.cat([*(_of_turns(g, a) for g, a in zip(gained, attempts, strict=True)), torch.zeros(0)])
        values = values_of_turns(groups, found.double().cpu().numpy())
        scores = [float(self._score(g, [a])) for g, a in zip(gained, attempts, strict=True)]
        by_task = [[i for i, a in enumerate(attempts) if a.group == number] for number in range(len(groups))]
        of_pairs = [own for own in by_task if own and not is_constant([attempts[i].score for i in own])]
        figures = _figures([([scores[i] for i in own], [attempts[i].score for i in own]) for own in of_pairs])
        compared = [[attempts[i] for i in own] for own in of_pairs]
        return Compared(values=values, attempts=compared, figures=figures, time_s=time.perf_counter() - begun)

    def _each(self, attempts: Sequence[Attempt], model: nn.Module) -> list[Tensor]:
        """Return the log-probs of each attempt under `model`, `[N]` each."""
        found: list[Tensor] = []
        for part in packed(attempts, self._stage.max_tokens_per_microbatch):
            found += torch.split(self._logprobs(part, model), [int(a.tokens_K.sum()) for a in part])
        return found

    def _logprobs(self, attempts: Sequence[Attempt], model: nn.Module) -> Tensor:
        device = next(self.model.parameters()).device
        rows = [row for a in attempts for row in a.rows]
        batch = collate(rows, np.ones(len(rows)))

        def forward() -> Tensor:
            return packed_forward(model, batch.token_ids.to(device), batch.lengths.tolist(), batch.select.to(device))

        return read(model, forward, batch.targets.to(device), 1.0, ()).logprobs

    def _score(self, gained_N: Tensor, attempts: Sequence[Attempt]) -> Tensor:
        """Scores Σ_k A_k of attempts, `[A]`, from the log-ratios of their tokens end to end."""
        if self.settings.over == "tokens":
            counts = torch.tensor([int(a.tokens_K.sum()) for a in attempts])
            whose = torch.arange(len(attempts)).repeat_interleave(counts).to(gained_N.device)
            return sequence_sums(gained_N, whose, len(attempts), "mean")
        tokens_K = torch.from_numpy(np.concatenate([a.tokens_K for a in attempts]))
        turns = torch.arange(len(tokens_K)).repeat_interleave(tokens_K)
        whose = torch.arange(len(attempts)).repeat_interleave(torch.tensor([len(a.tokens_K) for a in attempts]))
        return turn_means(gained_N, turns.to(gained_N.device), whose.to(gained_N.device), len(attempts))

    # --- after ---

    def updates(self, seen: Compared, samples: Sequence[Sample], rng: Generator, step: int) -> Updates:
        """Update on a step, in its warm-up or unless frozen."""
        if self.is_warming(step) or not self.settings.frozen:
            yield from map(self._update, shuffled(seen.attempts, self.settings.epochs, self.settings.batch_size, rng))

    def _update(self, tasks: Sequence[Sequence[Attempt]]) -> dict[str, float]:
        """Make one update from the pairs of some tasks.

        The loss of a pair needs two whole attempts, and that of a task all of them. So their scores are computed first,
        without gradient and dropout; what the loss says of each score then goes back through one attempt at a time.
        """
        attempts = [a for task in tasks for a in task]
        budget = self._stage.max_tokens_per_microbatch
        self.model.eval()
        with torch.no_grad():
            now = self._each(attempts, self.model.live)
            scores = torch.cat([self._score(n - a.before, [a]) for n, a in zip(now, attempts, strict=True)])
        scores.requires_grad_(True)
        parts = torch.split(scores, [len(task) for task in tasks])
        earned = [[a.score for a in task] for task in tasks]
        losses = [pair_loss(s, e, self.settings.beta) for s, e in zip(parts, earned, strict=True)]
        loss = torch.stack(losses).mean()
        [slopes] = torch.autograd.grad(loss, scores)
        self.model.train()
        self._stepper.optimizer.zero_grad(set_to_none=True)
        at = 0
        for part in packed(attempts, budget):
            gained = self._logprobs(part, self.model.live) - torch.cat([a.before for a in part])
            pulled = (self._score(gained, part) * slopes[at : at + len(part)]).sum()
            pulled.backward()  # type: ignore[no-untyped-call]
            at += len(part)
        norm = self._stepper.step()
        self.model.eval()
        return {"critic/pair_loss": float(loss.detach()), "critic/grad_norm": norm, "critic/lr": self._stepper.lr}


def _after(told: Ints, row: Sample) -> Sample:
    """Return a row of which nothing is known but its tokens, with `told` before it."""
    n = len(told)
    nothing = np.zeros(n + len(row), np.float32)
    mask = np.append(np.zeros(n, np.bool_), row.mask)
    return Sample(np.append(told, row.token_ids), mask, nothing, nothing, row.sequence, row.group)


def _of_turns(values_N: Tensor, attempt: Attempt) -> Tensor:
    """Return `[K]`, the mean of `values_N` over the tokens of each turn."""
    tokens_K = torch.from_numpy(attempt.tokens_K)
    turns = torch.arange(len(tokens_K)).repeat_interleave(tokens_K).to(values_N.device)
    return sequence_sums(values_N, turns, len(tokens_K), "mean").cpu()


def _figures(tasks: Sequence[tuple[Sequence[float], Sequence[float]]]) -> dict[str, float]:
    """Ranking accuracy of critic scores against earned ones at each task; ties count half."""
    right, n = 0.0, 0
    for scores, earned in tasks:
        pairs = list(zip(*_pairs(earned), strict=True))
        right += sum((scores[i] > scores[j]) + 0.5 * (scores[i] == scores[j]) for i, j in pairs)
        n += len(pairs)
    return {"critic/n_pairs": float(n), **({"critic/pair_accuracy": right / n} if n else {})}
