"""Signs of policy collapse in each step: replies, score variance and training figures.

RAGEN (arXiv 2504.20073) names the pattern that multi-turn training dies of the echo trap: attempts at one task come to
score alike, the policy grows certain of the same phrases, then gradients spike and the return is lost for good. The
paper says it in words and curves; the rule and its constants here are our own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev
from typing import Any, ClassVar

from rlhf.data import Prompt, ScoredGroup, Trajectory
from rlhf.training.backends.changed_share import NoUpdateMonitor
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.hooks.base import StageHook, Step

#: Tokens in a row that count as said again.
N_GRAM = 4
#: Trajectories whose words are looked at, spread evenly over a step: figures of text need no more.
MAX_TRAJECTORIES = 128
#: Steps that are averaged before they are compared.
WINDOW = 5
#: Steps whose median gradient norm is the usual one.
N_NORMS = 20
#: A gradient norm of so many times the usual one is a spike.
SPIKE = 5.0
#: What is left of a figure's peak when it has collapsed.
COLLAPSED = 0.5
#: How far the return lies below its best when it is falling, in deviations of the score within groups at their peak.
FALLEN = 0.25


def collapse_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the figures of one step; see `rlhf.metrics` for units.

    Deviations divide by the number of attempts. Groups of one attempt say nothing about the deviation within groups.
    The surprisal, mean −log p of the sampled tokens, estimates the entropy of the policy without bias. A 4-gram is
    echoed where it stands in the prompt of its generation, and repeated where it stands earlier in the generation;
    generations of fewer tokens have none.
    """
    deviations = [pstdev([s.total for s in group.scores]) for group in groups if len(group.scores) > 1]
    trajectories = [t for group in groups for t in group.trajectories]
    logprobs = [x for t in trajectories for g in t.generations if not g.opponent for x in g.logprobs]
    step = max(math.ceil(len(trajectories) / MAX_TRAJECTORIES), 1)
    n_grams = n_echoed = n_repeated = n_replies = n_again = 0
    for trajectory in trajectories[::step]:
        replies = [g.token_ids for g in trajectory.generations]
        n_replies += len(replies)
        n_again += len(replies) - len(set(replies))
        for grams, in_prompt in _said(trajectory):
            n_grams += len(grams)
            n_echoed += sum(gram in in_prompt for gram in grams)
            n_repeated += len(grams) - len(set(grams))
    return {
        "collapse/group_std_mean": fmean(deviations) if deviations else 0.0,
        "collapse/zero_std_groups_share": sum(d == 0 for d in deviations) / max(len(deviations), 1),
        "collapse/surprisal": -fmean(logprobs) if logprobs else 0.0,
        "collapse/echo_share": n_echoed / max(n_grams, 1),
        "collapse/repeat_share": n_repeated / max(n_grams, 1),
        "collapse/same_reply_share": n_again / max(n_replies, 1),
    }


def _said(trajectory: Trajectory) -> Iterator[tuple[list[tuple[int, ...]], set[tuple[int, ...]]]]:
    """Yield 4-grams of each generation and of its prompt; a prompt that extends the last is read once."""
    seen: Prompt | None = None
    known: set[tuple[int, ...]] = set()
    for generation in trajectory.generations:
        prompt = generation.prompt
        if seen is None or not prompt.begins_like(seen):
            seen, known = None, set()
        n_seen = 0 if seen is None else seen.n_tokens
        known.update(_grams(prompt.ids[max(n_seen - N_GRAM + 1, 0) :].tolist()))
        yield list(_grams(generation.token_ids)), known
        seen = prompt


def _grams(ids: Sequence[int]) -> Iterable[tuple[int, ...]]:
    return zip(*(ids[i:] for i in range(N_GRAM)), strict=False)


@dataclass
class CollapseHook(StageHook):
    """Collapse monitor against the best step so far; its state is in checkpoints.

    Attributes:
        recent: the last `WINDOW` values of each figure that is averaged.
        peaks: highest average of each so far.
        norms: the last `N_NORMS` gradient norms.
        stillness: counts steps that changed no weights.
    """

    key: ClassVar[str] = "monitor"

    recent: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    stillness: NoUpdateMonitor = field(default_factory=NoUpdateMonitor)

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """See `learn`; and count the step where its updates changed no weights."""
        figures, cautions = self.learn(step.all_groups, step.values, step.where)
        peak, in_place = parts.stage.optimizer.lr, parts.trainer.rounds_in_place
        step.metrics |= figures
        step.cautions |= cautions | self.stillness.learn(step.values, step.where, peak=peak, in_place=in_place)

    def learn(
        self, groups: Sequence[ScoredGroup], values: Mapping[str, float], where: str
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Update on a finished step. Returns what is logged of it, and cautions by name.

        Args:
            groups: of the step.
            values: what its updates logged.
            where: the step, for the reader.
        """
        figures = collapse_metrics(groups)
        cautions = {}
        norm = values.get("optimizer/grad_norm")
        if norm is not None and math.isfinite(norm):  # else the update was left out
            usual = median(self.norms) if len(self.norms) >= WINDOW else norm
            figures["collapse/grad_spike"] = norm / usual if usual > 0 else 1.0
            if figures["collapse/grad_spike"] > SPIKE:
                cautions["grad_spike"] = (
                    f"the gradient of {where} is {figures['collapse/grad_spike']:.0f} times the usual one "
                    f"({norm:.3g} against {usual:.3g}): if it happens again, lower optimizer.lr"
                )
            self.norms = [*self.norms, norm][-N_NORMS:]
        returns = [s.total for group in groups for s in group.scores]
        if returns:
            watched = ("collapse/group_std_mean", "collapse/surprisal")
            trap = self._trap({"return": fmean(returns), **{name: figures[name] for name in watched}})
            figures["collapse/echo_trap"] = float(bool(trap))
            if trap:
                cautions["echo_trap"] = f"echo trap at {where}: {trap}"
        return figures, {name: f"caution: {text}" for name, text in cautions.items()}

    def _trap(self, figures: Mapping[str, float]) -> str:
        """Say what has collapsed, if all has; averages are compared with the highest before."""
        for name, value in figures.items():
            self.recent[name] = [*self.recent.get(name, []), value][-WINDOW:]
        if any(len(self.recent[name]) < WINDOW for name in figures):
            return ""
        now = {name: fmean(self.recent[name]) for name in figures}
        self.peaks = {name: max(value, self.peaks.get(name, value)) for name, value in now.items()}
        deviation, surprisal = "collapse/group_std_mean", "collapse/surprisal"
        collapsed = all(now[name] < COLLAPSED * self.peaks[name] for name in (deviation, surprisal))
        if not collapsed or self.peaks["return"] - now["return"] <= FALLEN * self.peaks[deviation]:
            return ""
        return (
            f"over {WINDOW} steps the deviation of the score within groups fell from {self.peaks[deviation]:.3g} to "
            f"{now[deviation]:.3g}, the policy's surprisal from {self.peaks[surprisal]:.3g} to {now[surprisal]:.3g} "
            f"nats, and the return from {self.peaks['return']:.3g} to {now['return']:.3g}; go back to an earlier "
            "checkpoint with a lower optimizer.lr, a wider loss.clip_high, or a KL term"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything it compares with."""
        return {"recent": self.recent, "peaks": self.peaks, "norms": self.norms, "n_still": self.stillness.n}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.recent, self.peaks, self.norms = dict(state["recent"]), dict(state["peaks"]), list(state["norms"])
        self.stillness.n = int(state.get("n_still", 0))  # which older checkpoints do not have
