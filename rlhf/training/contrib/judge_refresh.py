"""Judge that is an earlier policy: its identity, audit and renewal."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from rewards.judges.asking import AsksModel
from rewards.models.local_model import hold, release
from rewards.shaping.outcome import Outcome as Solved
from rlhf.data import Action, Outcome, ScoredGroup, Trajectory, Turn
from rlhf.errors import TrainingError
from rlhf.rollout.scoring import WeightedReward, score_group
from rlhf.rollout.tasks import tasks_of
from rlhf.spans import span
from rlhf.tasks.shuffled import walk
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.contrib.judge_refresh_settings import JudgeRefresh, doubled
from rlhf.training.hooks.base import StageHook, Step
from rlhf.training.policy.lora import unadapted
from rlhf.training.policy.model import Policy
from rlhf.training.reward_model_training import asking_left, save_in

#: Folder of a run with the judges that its stages leave.
FOLDER = "judges"
#: What a policy has learnt: its trained parameters by their names, on the CPU.
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Audited:
    """Two attempts at one task by what was read and done, without tokens.

    Attributes:
        task_id: of both.
        right: what the agent was told first, and each action with its reply.
        wrong: likewise.
    """

    task_id: str
    right: tuple[str, Sequence[tuple[str, str]]]
    wrong: tuple[str, Sequence[tuple[str, str]]]

    @property
    def trajectories(self) -> list[Trajectory]:
        """The right one and the wrong one, as a judge is shown them."""
        return [_shown(self.task_id, i, *told) for i, told in enumerate((self.right, self.wrong))]


@dataclass
class JudgeRefreshHook(StageHook):
    """Present and next judge, and the audit of both. `learn` takes in a finished step.

    Attributes:
        settings: the recipe keys.
        name: of the reward.
        reward: as the recipe has it, with its first judge.
        policy: the live one.
        office: what the names of judges in memory begin with.
        next: the policy that is to judge next.
        judge: the one that judges; None is the reward's own.
        judge_step: steps after which that was the policy; 0 for the reward's own.
        next_step: likewise of the one that is to judge next.
        audit: fixed when the stage begins.
        n_audits: judges that were audited.
        n_renewals: times that another became the judge.
        is_over: whether one failed, and none is renewed any more.
        is_due: whether something is to be audited before the next step.
    """

    key: ClassVar[str] = "keeper"

    settings: JudgeRefresh
    name: str
    reward: AsksModel
    policy: Policy
    office: str
    next: Weights
    judge: Weights | None = None
    judge_step: int = 0
    next_step: int = 0
    audit: list[Audited] = field(default_factory=list)
    n_audits: int = 0
    n_renewals: int = 0
    is_over: bool = False
    is_due: bool = True

    @classmethod
    def of(
        cls, settings: JudgeRefresh | None, rewards: Mapping[str, WeightedReward], policy: Policy
    ) -> JudgeRefreshHook | None:
        """Stand before the first step of a stage; None where a stage renews no judge."""
        if settings is None:
            return None
        name, reward = renewed(settings, rewards)
        return cls(settings, name, reward, policy, f"policy {id(policy):x} as a judge", learnt(policy))

    @property
    def live(self) -> Any:
        """The reward, asking the judge of now."""
        return self.reward if self.judge is None else self._asking(self.judge, self.judge_step)

    def _asking(self, weights: Weights, step: int) -> Any:
        """The reward, asking the policy of `step`."""
        name = f"{self.office}, of step {step}"
        hold(name, model_of(self.policy, weights), self.policy.tokenizer)
        return replace(self.reward, path=name)

    def close(self) -> None:
        """Keep no judge in memory."""
        for step in (self.judge_step, self.next_step):
            release(f"{self.office}, of step {step}")

    def learn(self, n_steps: int) -> None:
        """Update on the stage's `n_steps`-th step, finished."""
        self.is_due = self.is_due or (n_steps % self.settings.every == 0 and not self.is_over)

    # --- as a hook ---

    def open(self, run: RunContext, parts: LiveStage) -> None:
        """Score with the judge of now."""
        run.replace_reward(self.name, self.live)

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """See `learn`."""
        self.learn(step.number + 1)

    async def between_steps(self, run: RunContext, parts: LiveStage) -> None:
        """Audit a judge where due, log it, and install it if it passes."""
        if not self.is_due:
            return
        with span("reward models"):
            figures, asking = await self.renew(run)
            run.log(run.state.step, figures, delivered=False)
            if asking is not None:
                run.replace_reward(self.name, asking)
            run.progress.say(self._told(figures, run.state.step, passed=asking is not None))

    def _told(self, figures: Mapping[str, float], step: int, *, passed: bool) -> str:
        """Text on an audit's result."""
        value, low, high = (figures[f"judge_refresh/audit_accuracy{end}"] for end in ("", "_low", "_high"))
        accuracy = f"{value:.1%} (95% interval {low:.1%} to {high:.1%}) of "
        accuracy += f"{figures['judge_refresh/n_audited']:.0f} audited pairs"
        if passed:
            return f"the judge of {self.name} after step {step} is right on {accuracy}"
        return (
            f"caution: the policy of step {self.next_step} does not become the judge of {self.name}, as it is right on "
            f"{accuracy} and judge_refresh.min_accuracy is {self.settings.min_accuracy:g}; "
            "the judge stays until the stage ends"
        )

    def on_stage_end(self, run: RunContext) -> None:
        """Write the judge, if another than the reward's own judges, and go on asking it."""
        where = f"{FOLDER}/{run.state.label}"
        if self.judge is not None:
            save_in(run.folder, where, model_of(run.policy, self.judge), run.policy.tokenizer)
        run.replace_reward(self.name, asking_left(self.reward, run.folder / where))
        self.close()

    # --- when it is due ---

    async def renew(self, run: RunContext) -> tuple[dict[str, float], Any]:
        """Audit the first judge, or the next, who takes the place if it passes. Nothing has changed if this is stopped.

        Returns:
            What is logged, and the reward asking whoever judges from now on.

        Raises:
            TrainingError: no task has both a right and a wrong attempt.
        """
        begun, step, is_first = time.perf_counter(), run.state.step, self.n_audits == 0
        audit = self.audit or await self._attempted(run)
        asking = self.reward if is_first else self._asking(self.next, self.next_step)
        preferred, n_unread = await _judged(run, asking, audit, self.settings.split)
        ids = [task_id for pair in audit for task_id in (pair.task_id,) * 2]
        found = run.estimate(doubled(preferred), ids)
        # From here on nothing waits.
        self.audit, self.n_audits, self.is_due = audit, self.n_audits + 1, False
        if not is_first:
            passed = found.value >= self.settings.min_accuracy
            self._decide(passed, step)
            asking = asking if passed else None
        ties = sum(x == 0.5 for x in preferred) / len(preferred)
        return {
            "judge_refresh/audit_accuracy": float(found.value),
            "judge_refresh/audit_accuracy_low": float(found.low),
            "judge_refresh/audit_accuracy_high": float(found.high),
            "judge_refresh/n_audited": float(len(audit)),
            "judge_refresh/tie_share": ties,
            "judge_refresh/n_unparsed": float(n_unread),
            "judge_refresh/n_refreshes": float(self.n_renewals),
            "judge_refresh/age": float(step - self.judge_step),
            "judge_refresh/audit_failed": float(self.is_over),
            "time/audit_s": time.perf_counter() - begun,
        }, asking

    def _decide(self, passed: bool, step: int) -> None:
        """Let the next one judge, and the present policy be the next; or end it."""
        if not passed:
            release(f"{self.office}, of step {self.next_step}")
            self.is_over, self.next = True, {}
            return
        if self.judge is not None:
            release(f"{self.office}, of step {self.judge_step}")
        self.judge, self.judge_step, self.n_renewals = self.next, self.next_step, self.n_renewals + 1
        self.next, self.next_step = learnt(self.policy), step

    async def _attempted(self, run: RunContext) -> list[Audited]:
        settings, rewards = self.settings, run.runner.rewards
        truth = WeightedReward("truth", 1.0, rewards[settings.truth].reward if settings.truth else Solved())
        tasks = tasks_of(run.runner.environment, settings.split)
        order = walk(len(tasks), f"{run.seed}/{run.state.stage}/audit")
        collected = await replace(run.runner, rewards={"truth": truth}).collect(
            [tasks[i] for _, i in zip(range(min(settings.tasks, len(tasks))), order, strict=False)],
            group_size=settings.group_size,
            sampling=run.runner.limits.sampling(1.0),
            step=0,
        )
        await run.publish(
            same_version=True
        )  # so that the engine goes on as that of a resumed run does: with nothing cached
        found = [pair for group in collected.groups if (pair := _pair(group, settings.success_threshold)) is not None]
        if not found:
            raise TrainingError(
                "the judge cannot be audited: no task has both a correct and a wrong attempt",
                where=f"judge_refresh of {run.state.label}",
                got=f"{collected.n_episodes} attempts at {len(collected.groups)} tasks",
                expected="a task that some attempts solve and others do not",
                hint="raise judge_refresh.tasks or group_size, or lower judge_refresh.success_threshold",
            )
        return found

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Current and next judge, by their trained parameters, and the audit."""
        audit = [
            [p.task_id, *([told[0], [list(t) for t in told[1]]] for told in (p.right, p.wrong))] for p in self.audit
        ]
        weights = {"next": dict(self.next), "judge": None if self.judge is None else dict(self.judge)}
        return {**weights, "audit": audit, **{name: getattr(self, name) for name in _NUMBERS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises KeyError for what is no state of such."""
        self.next, self.judge = state["next"], state["judge"]
        sides = [
            (task_id, *((told[0], tuple(map(tuple, told[1]))) for told in pair)) for task_id, *pair in state["audit"]
        ]
        self.audit = [Audited(*pair) for pair in sides]
        for name in _NUMBERS:
            setattr(self, name, state[name])


#: What is kept of a `JudgeRefreshHook` besides weights and audit.
_NUMBERS = ("judge_step", "next_step", "n_audits", "n_renewals", "is_over", "is_due")


def renewed(settings: JudgeRefresh, rewards: Mapping[str, WeightedReward]) -> tuple[str, AsksModel]:
    """Return name and reward that are meant; a recipe that was checked has it."""
    named: dict[str, object] = {
        name: weighted.reward
        for name, weighted in rewards.items()
        if weighted.monitor is None and settings.reward in (None, name)
    }
    return next((name, r) for name, r in named.items() if isinstance(r, AsksModel) and r.path is not None)


def learnt(policy: Policy) -> Weights:
    """Copy what a policy is trained in."""
    trained = ((name, p) for name, p in policy.model.named_parameters() if p.requires_grad)
    return {name: p.detach().to("cpu", copy=True) for name, p in trained}


def model_of(policy: Policy, weights: Weights) -> Any:
    """A model with the policy's architecture and these trained parameters, adapters merged, that has no gradient."""
    model = copy.deepcopy(policy.model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in weights:
                p.copy_(weights[name])
    model = unadapted(model) if policy.is_lora else model
    model.set_attn_implementation("sdpa")
    model.zero_grad(set_to_none=True)
    model.requires_grad_(False)
    return model.eval()


async def _judged(run: RunContext, reward: Any, audit: Sequence[Audited], split: str) -> tuple[list[float], int]:
    """Scores of each pair (1 if the right attempt is preferred, ½ tie, else 0), and the number of missing verdicts."""
    preferred, n_unread = [], 0
    tasks = {task.id: task for task in tasks_of(run.runner.environment, split)}
    for number, pair in enumerate(audit, start=1):
        await run.check_stop()
        run.progress.note(f"auditing the judge: {number} of {len(audit)}")
        limit = run.runner.limits.reward_timeout_s
        group = await score_group(
            tasks[pair.task_id], pair.trajectories, {"r": WeightedReward("r", 1.0, reward)}, timeout_s=limit
        )
        if group.failures:
            n_unread += 1
            preferred.append(0.0)
            continue
        right, wrong = (score.total for score in group.scores)
        preferred.append(1.0 if right > wrong else 0.5 if right == wrong else 0.0)
    return preferred, n_unread


def _pair(group: ScoredGroup, success_threshold: float) -> Audited | None:
    """The first right attempt and the first wrong one; None where there are not both."""
    scored = list(zip(group.trajectories, group.scores, strict=True))
    right = next((t for t, score in scored if score.total >= success_threshold), None)
    wrong = next((t for t, score in scored if score.total < success_threshold), None)
    if right is None or wrong is None:
        return None
    return Audited(group.task_id, _told(right), _told(wrong))


def _told(trajectory: Trajectory) -> tuple[str, tuple[tuple[str, str], ...]]:
    return trajectory.opening, tuple((turn.action.text, turn.reply) for turn in trajectory.turns)


def _shown(task_id: str, attempt: int, opening: str, turns: Sequence[tuple[str, str]]) -> Trajectory:
    said = tuple(Turn(Action(text), reply) for text, reply in turns)
    return Trajectory(task_id, attempt, opening, said, Outcome.FAILED)
