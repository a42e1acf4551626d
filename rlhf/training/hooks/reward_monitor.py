"""Reward monitor: detects a rising trained reward with a falling held-out reward.

A policy finds what a reward pays for without its being done: the reward rises and the quality falls. A second reward
that is never trained on shows it, as long as nothing is chosen by it. Over the last `window` steps, and over twice and
four times as many and so on, as far as the stage goes back, a line is fitted to the mean of each reward per step. The
alarm is raised where the 99.9% interval of the trained reward's slope lies above 0 and that of the monitored one's
below.

The interval is b ± t s / √Σ(x − x̄)², with s² = Σ residuals² / (n − 2) and Student's t of n − 2 degrees of freedom. The
rule and its constants are our own; docs/rewards.md says how often it is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import correlation, fmean
from typing import Any, ClassVar

from rlhf.data import Score, ScoredGroup
from rlhf.errors import TrainingError
from rlhf.rollout.reward_monitor import RewardMonitor
from rlhf.rollout.scoring import WeightedReward
from rlhf.stats import t_quantile
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.hooks.base import StageHook, Step

#: Of each slope's interval; both have to leave out 0, at every step of a run.
CONFIDENCE = 0.999


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through the means of consecutive steps.

    Attributes:
        first: value of the line at the first step.
        last: value of the line at the last step.
        low: lower end of the slope's interval, per step.
        high: its upper end.
    """

    first: float
    last: float
    low: float
    high: float


def trend(values: Sequence[float], confidence: float = CONFIDENCE) -> Trend:
    """Fit a line to at least 8 values that are one step apart.

    0, 1, 2, ..., 9 give the slope 1, without any doubt; values that alternate give an interval around 0.
    """
    n = len(values)
    middle, mean = (n - 1) / 2, fmean(values)
    spread = n * (n * n - 1) / 12  # Σ (x − x̄)² of 0, 1, ..., n − 1
    slope = math.fsum((x - middle) * (y - mean) for x, y in enumerate(values)) / spread
    residual = math.fsum((y - mean - slope * (x - middle)) ** 2 for x, y in enumerate(values))
    half = t_quantile(0.5 + confidence / 2, n - 2) * math.sqrt(residual / (n - 2) / spread)
    return Trend(mean - slope * middle, mean + slope * middle, slope - half, slope + half)


@dataclass
class RewardMonitorHook(StageHook):
    """Monitor of each step's rewards; its state is in checkpoints.

    Attributes:
        settings: of each monitored reward, by its name in the recipe.
        trained: name -> mean of the trained reward in each step of the stage that the monitored one judged.
        monitored: name -> mean of the monitored reward in the same steps.
        due: what to stop for before the next step, by name.
        stopped: names that the stage was stopped for; each does so once.
    """

    key: ClassVar[str] = "watches"  # as checkpoints have it, and `watched` in them

    settings: Mapping[str, RewardMonitor]
    trained: dict[str, list[float]] = field(default_factory=dict)
    monitored: dict[str, list[float]] = field(default_factory=dict)
    due: dict[str, str] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, rewards: Mapping[str, WeightedReward]) -> RewardMonitorHook:
        """Monitor those of a recipe's rewards that it says are monitored."""
        return cls({name: weighted.monitor for name, weighted in rewards.items() if weighted.monitor is not None})

    def before_step(self, run: RunContext, step: Step) -> None:
        """See `check`."""
        self.check(step.where)

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """See `learn`."""
        figures, cautions = self.learn(step.all_groups, step.where)
        step.metrics |= figures
        step.cautions |= cautions

    def learn(self, groups: Sequence[ScoredGroup], where: str) -> tuple[dict[str, float], dict[str, str]]:
        """Update on a finished step. Returns what is logged of it, and cautions by name.

        Args:
            groups: all that were drawn in it.
            where: the step, for the reader.
        """
        scores = [score for group in groups for score in group.scores]
        figures: dict[str, float] = {}
        cautions: dict[str, str] = {}
        for name, settings in self.settings.items():
            failures = [score.monitor_errors[name] for score in scores if name in score.monitor_errors]
            figures[f"monitor_failures/{name}"] = float(len(failures))
            if failures:
                cautions[f"monitor_failures/{name}"] = (
                    f"caution: the monitored reward {name} could not judge {len(failures)} of {len(scores)} attempts "
                    f"of {where}, which are trained on all the same: {failures[0]}"
                )
            both = [s for s in scores if name in s.monitored and settings.compare_with in (None, *s.parts)]
            pairs = [(_trained(s, settings), s.monitored[name].value) for s in both]
            if pairs:
                figures |= self._compared(name, *zip(*pairs, strict=True))
                if alarm := self._alarm(name, where):
                    cautions[f"monitor/{name}"] = f"caution: {alarm}"
                    if settings.stop and name not in self.stopped:
                        self.due[name] = alarm
                figures[f"monitor_alarm/{name}"] = float(bool(alarm))
        return figures, cautions

    def _compared(self, name: str, trained: Sequence[float], monitored: Sequence[float]) -> dict[str, float]:
        """Keep the means of a step; returns what is logged of it."""
        means = fmean(trained), fmean(monitored)
        for values, mean in zip((self.trained, self.monitored), means, strict=True):
            values.setdefault(name, []).append(mean)
        figures = {f"monitor/{name}": means[1], f"monitor_gap/{name}": means[0] - means[1]}
        if len({*trained}) > 1 and len({*monitored}) > 1:  # else there is no correlation
            figures[f"monitor_correlation/{name}"] = correlation(trained, monitored)
        return figures

    def _alarm(self, name: str, where: str) -> str:
        """Say how the trained reward and the monitored one part, if they do."""
        settings = self.settings[name]
        what = f"the reward {settings.compare_with}" if settings.compare_with else "the score"
        for n in _windows(settings.window, len(self.trained[name])):
            trained, monitored = (trend(values[name][-n:]) for values in (self.trained, self.monitored))
            if trained.low > 0 and monitored.high < 0:
                return (
                    f"is the reward being hacked? Over {n} steps up to {where}, {what}, which is trained on, rose from "
                    f"{trained.first:.3g} to {trained.last:.3g}, and the monitored reward {name} fell from "
                    f"{monitored.first:.3g} to {monitored.last:.3g}; read attempts that the one likes and the other "
                    "does not (`rlhf trajectories`), fix the reward, and go back to an earlier checkpoint"
                )
        return ""

    def check(self, where: str) -> None:
        """Raise TrainingError, once for each monitored reward that says `stop: true`, where its alarm was raised."""
        if not self.due:
            return
        name, alarm = next(iter(self.due.items()))
        self.stopped, self.due = [*self.stopped, *self.due], {}
        raise TrainingError(
            f"stopped, as rewards.{name}.monitor.stop asks: {alarm}",
            where=where,
            got="a trained reward that rises while a monitored one falls",
            expected="rewards that agree",
            hint="`rlhf train --resume RUN` continues anyway",
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything it compares with."""
        return {"trained": self.trained, "watched": self.monitored, "stopped": [*self.stopped, *self.due]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. A resumed run does not stop again for the same reward."""
        self.trained = {name: list(values) for name, values in state["trained"].items()}
        self.monitored = {name: list(values) for name, values in state["watched"].items()}
        self.stopped, self.due = list(state["stopped"]), {}


def _trained(score: Score, settings: RewardMonitor) -> float:
    return score.total if settings.compare_with is None else score.parts[settings.compare_with].value


def _windows(window: int, n_steps: int) -> Iterator[int]:
    """The window, twice, four times, ... as many steps, as far as there are steps."""
    while window <= n_steps:
        yield window
        window *= 2
