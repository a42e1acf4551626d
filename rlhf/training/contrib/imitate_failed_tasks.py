"""ReLIFT: supervised updates on demonstrations of tasks that every attempt failed, between RL steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.batching.pack import pack_minibatches
from rlhf.checking import CheckContext, Problem
from rlhf.data import ScoredGroup, Trajectory
from rlhf.losses.reduction import Reduction
from rlhf.settings import STRICT
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.contrib.task_demonstrations import DemonstrationCache
from rlhf.training.demonstration_requirements import unshowable
from rlhf.training.hooks.base import StageHook, Step
from rlhf.training.stages.supervised_training import sft_samples


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImitateFailed:
    """Queue the tasks that a whole group failed, for SFT on their demonstrations in batches.

    A task waits once, however often it is failed, and only if the environment's oracle solves it. When `size` wait, the
    step ends with one supervised update on the demonstrations of those that wait longest, by the same optimiser:

        l = mean over their tokens of −log π − c · entropy

    It is no part of the learning rate's schedule, which knows only of updates that are certain to come: it has the rate
    of the update before it. Groups [0, 0], [1, 0], [0, 0] and a size of 2 imitate the
    first and the third task; of mean −log π .5 and 1.5 over as many tokens each, l = 1 for c = 0.

    Source: arXiv 2506.07527.
    """

    size: Annotated[int, Field(ge=1)] = 16
    """Tasks per SFT update."""
    entropy_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.001
    """Coefficient c of the entropy bonus, in units of loss per nat."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse parts that cannot demonstrate."""
        yield from unshowable(context)


@plain_dataclass
class FailedTaskQueue:
    """The tasks that wait. `put` changes nothing that is remembered; `learn` does, once, when a step is finished.

    Attributes:
        settings: the recipe keys.
        waiting: ids, the longest waiting first.
        after: what waits when the present step is finished.
        n_updates: supervised updates of the steps that are finished.
    """

    settings: ImitateFailed
    waiting: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    n_updates: int = 0

    def candidates(self, failed: Sequence[str]) -> list[str]:
        """Return the ids that wait, and those of `failed` behind them, each once."""
        return list(dict.fromkeys([*self.waiting, *failed]))

    def put(self, shown: Sequence[str]) -> list[str]:
        """Let the candidates of which there is a demonstration wait, and return those to imitate now."""
        size = self.settings.size
        chosen = list(shown[:size]) if len(shown) >= size else []
        self.after = list(shown[len(chosen) :])
        return chosen

    def learn(self, n_updates: int) -> None:
        """Take in that the step is finished, and how many supervised updates there have been."""
        self.waiting, self.n_updates = self.after, n_updates

    def state_dict(self) -> dict[str, Any]:
        """Waiting tasks and counters."""
        return {"waiting": list(self.waiting), "n_updates": self.n_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.waiting = self.after = list(state["waiting"])
        self.n_updates = int(state["n_updates"])


@plain_dataclass(frozen=True)
class FailedImitation(StageHook):
    """Imitates demonstrations of the tasks that every attempt failed, when enough of them wait.

    Attributes:
        hard: who waits.
        guide: plays the demonstrations.
    """

    key: ClassVar[str] = "hard"

    hard: FailedTaskQueue
    guide: DemonstrationCache

    def open(self, run: RunContext, parts: LiveStage) -> None:
        """Tell the trainer how many of its updates were no part of the schedule."""
        parts.trainer.n_off_schedule = self.hard.n_updates

    async def after_update(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """Take in the groups of a step after its updates, and imitate where enough tasks wait.

        Tasks that begin in the middle are left out, and so are steps in which the critic learns alone.
        """
        if not step.trains_policy:
            return
        failed = [group.task_id for group in step.all_groups if _is_failed(group)]
        candidates = self.hard.candidates(failed)
        found = await self.guide.show(candidates, run)
        chosen = self.hard.put([i for i in candidates if i in found])
        step.values |= {
            "imitate_failed/n_failed_groups": float(len(failed)),
            "imitate_failed/n_waiting": float(len(self.hard.after)),
            "imitate_failed/n_imitated": float(len(chosen)),
        }
        if chosen:
            step.values |= _imitated(parts, self.hard.settings, [found[i] for i in chosen])

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """See `FailedTaskQueue.learn`."""
        self.hard.learn(parts.trainer.n_off_schedule)

    def state_dict(self) -> dict[str, Any]:
        """Waiting tasks and counters."""
        return self.hard.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.hard.load_state_dict(state)


def _is_failed(group: ScoredGroup) -> bool:
    return bool(group.trajectories) and not any(t.solved or t.n_given for t in group.trajectories)


def _imitated(parts: LiveStage, settings: ImitateFailed, shown: Sequence[Trajectory]) -> dict[str, float]:
    stage, trainer = parts.stage, parts.trainer
    samples = sft_samples(shown)
    budget, n_least = stage.max_tokens_per_microbatch, trainer.n_processes
    [batches] = pack_minibatches(samples, 1, Reduction(kind="token_mean"), budget, None, n_least=n_least)
    values = trainer.sft_update(batches, entropy_coef=settings.entropy_coef, off_schedule=True)
    return {
        "imitate_failed/loss": values["supervised/loss"],
        "imitate_failed/grad_norm": values["optimizer/grad_norm"],
        "optimizer/n_updates": float(trainer.n_updates),
    }
