"""Refresh of a reward model during training: data collection, updates and accuracy."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from rewards.models.model_folder import SCALE, ModelReward, load, logits, pooled_at
from rlhf.data import Score, ScoredGroup, Task, Trajectory, Verdict
from rlhf.losses.preference import bradley_terry
from rlhf.rollout.scoring import WeightedReward
from rlhf.spans import span
from rlhf.training.backends.optimizer import Stepper
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.contrib.reward_model_pointwise import backward
from rlhf.training.contrib.reward_refresh_settings import RewardRefresh, kept_scale
from rlhf.training.contrib.step_labels import Labelled, labelled
from rlhf.training.hooks.base import StageHook, Step
from rlhf.training.reward_model_training import asking_left, save_in
from rlhf.training.stages.pairs import Pair, Pairs, Side

#: Folder of a run with the reward models that its stages leave.
FOLDER = "reward_model"
#: What is learnt from: pairs, or attempts with labels.
Item = Pair | Labelled
#: Confidence interval of a share, of successes and their task ids.
Estimate = Callable[[Sequence[bool], Sequence[str]], Any]


@dataclass(frozen=True)
class LiveReward:
    """Reward that scores with the reward model as it is trained so far."""

    reward: ModelReward
    model: Any

    def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Score the attempts at a task, in order. Raises RewardError where that cannot be done."""
        return self.reward.judged(trajectories, lambda: self.model)


@dataclass
class RewardRefreshHook(StageHook):
    """Copy of the recipe's reward model with its data and schedule; `learn` takes in a step.

    Attributes:
        settings: the recipe keys.
        name: of the reward.
        reward: as the recipe has it.
        model: trained in place; its `config` holds the scale that it is served with.
        stepper: of its updates.
        seed: of the run and stage.
        fresh: of the attempts since the last time, to learn from.
        held: of the same attempts, to judge by.
        old: of attempts before them.
        n_seen: items that have ever been to be learnt from, but for the fresh ones.
        n_refreshes: times that it learnt.
        is_due: whether it is to learn before the next step.
        is_incomplete: whether it has learnt a part of what it is to.
    """

    key: ClassVar[str] = "refresher"

    settings: RewardRefresh
    name: str
    reward: ModelReward
    model: Any
    stepper: Stepper
    seed: str
    fresh: list[Item] = field(default_factory=list)
    held: list[Item] = field(default_factory=list)
    old: list[Item] = field(default_factory=list)
    n_seen: int = 0
    n_refreshes: int = 0
    is_due: bool = False
    is_incomplete: bool = False

    @classmethod
    def of(
        cls, settings: RewardRefresh | None, rewards: Mapping[str, WeightedReward], seed: str
    ) -> RewardRefreshHook | None:
        """Copy the model of the reward that is meant; None where a stage trains none further."""
        if settings is None:
            return None
        name, reward = refreshed(settings, rewards)
        model = copy.deepcopy(load(reward.path)[0])
        model.requires_grad_(True)
        stepper = Stepper(settings.optimizer, settings.optimizer.build(model.parameters()), 1, "reward_refresh")
        return cls(settings, name, reward, model, stepper, seed)

    @property
    def live(self) -> LiveReward:
        """Reward that scores the policy."""
        return LiveReward(self.reward, self.model)

    @property
    def scale(self) -> tuple[float, float]:
        """The factor and the shift with which its numbers are served."""
        a, b = getattr(self.model.config, SCALE, (1.0, 0.0))
        return float(a), float(b)

    @property
    def is_of_pairs(self) -> bool:
        """True if it learns from pairs of attempts."""
        return self.reward.learnt == "pairwise"

    # --- as a hook ---

    def open(self, run: RunContext, parts: LiveStage) -> None:
        """Score with the model as it stands."""
        run.replace_reward(self.name, self.live)

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """See `learn`."""
        self.learn(step.all_groups, step.number + 1)

    async def between_steps(self, run: RunContext, parts: LiveStage) -> None:
        """Train the model further where due, log it, and caution where it became worse."""
        if not self.is_due:
            return
        await run.check_stop()
        with span("reward models"):
            run.progress.note(f"training the reward model of {self.name} further")
            figures = self.refresh(run.estimate)
            run.log(run.state.step, figures, delivered=False)
            run.warn_once(_worse(figures, self.name, run.state.step))

    def on_stage_end(self, run: RunContext) -> None:
        """Write the model, and go on scoring with it."""
        where = f"{FOLDER}/{run.state.label}"
        save_in(run.folder, where, self.model, run.policy.tokenizer)
        run.replace_reward(self.name, asking_left(self.reward, run.folder / where))
        run.progress.say(f"the reward model, trained further {self.n_refreshes} times: {run.folder / where}")

    # --- while the policy goes on ---

    def learn(self, groups: Sequence[ScoredGroup], n_steps: int) -> None:
        """Update on the attempts of a finished step, the stage's `n_steps`-th.

        Raises:
            TrainingError: an attempt was not sampled in one row, and pairs of attempts are.
        """
        for item in self._items([_told(group, self.settings.truth) for group in groups], n_steps):
            (self.held if self._is_held_out(item.task_id) else self.fresh).append(item)
        self.is_due = self.is_due or n_steps % self.settings.every == 0

    def _items(self, groups: Sequence[ScoredGroup], n_steps: int) -> Iterable[Item]:
        settings = self.settings
        if self.is_of_pairs:
            return Pairs(max_per_task=settings.max_per_task).of(groups, f"{self.seed}/{n_steps}")
        return labelled(
            groups,
            steps=self.reward.learnt == "process",
            success_threshold=settings.success_threshold,
            eta=settings.eta,
        )

    def _is_held_out(self, task_id: str) -> bool:
        return random.Random(f"{self.seed}/held_out/{task_id}").random() < self.settings.held_out

    # --- when it is due ---

    def refresh(self, estimate: Estimate) -> dict[str, float]:
        """Learn from what was collected and judge by what was held out; returns what is logged.

        Raises:
            TrainingError: too many gradients in a row were not finite.
        """
        begun, rng = time.perf_counter(), random.Random(f"{self.seed}/{self.n_refreshes}")
        kept = round(len(self.fresh) * self.settings.replay_share / (1 - self.settings.replay_share))
        again = rng.sample(self.old, min(kept, len(self.old)))
        figures = self._accuracy("before", estimate)
        anchors = self._sides(self.held or self.fresh)
        numbers, self.is_incomplete = self._numbers(anchors), True
        figures |= self._train([*self.fresh, *again], rng)
        if self.is_of_pairs and anchors:
            setattr(self.model.config, SCALE, list(kept_scale(numbers, self._numbers(anchors), self.scale)))
        figures |= self._accuracy("after", estimate)
        figures |= {"reward_refresh/n_new": float(len(self.fresh)), "reward_refresh/n_replayed": float(len(again))}
        self._remember(rng)
        self.n_refreshes, self.is_due, self.is_incomplete = self.n_refreshes + 1, False, False
        figures |= {
            "reward_refresh/n_refreshes": float(self.n_refreshes),
            "time/reward_refresh_s": time.perf_counter() - begun,
        }
        return figures | dict(zip(("reward_refresh/scale", "reward_refresh/shift"), self.scale, strict=True))

    def _train(self, items: Sequence[Item], rng: random.Random) -> dict[str, float]:
        losses, norms, size = [], [], self.settings.batch_size
        with torch.random.fork_rng():
            torch.manual_seed(rng.getrandbits(32))
            for _ in range(self.settings.epochs):
                order = rng.sample(range(len(items)), len(items))
                for i in range(0, len(order), size):
                    self.model.train()
                    self.stepper.optimizer.zero_grad(set_to_none=True)
                    losses.append(self._backward([items[k] for k in order[i : i + size]]))
                    norms.append(self.stepper.step())
        self.stepper.optimizer.zero_grad(set_to_none=True)
        self.model.eval()
        if not losses:
            return {}
        return {"reward_refresh/loss": sum(losses) / len(losses), "reward_refresh/grad_norm": sum(norms) / len(norms)}

    def _backward(self, items: Sequence[Item]) -> float:
        """Add the gradient of the mean loss; returns that mean."""
        at_once, total = min(self.settings.pairs_per_microbatch, len(items)), 0.0
        if not self.is_of_pairs:
            return backward(self.model, [item for item in items if isinstance(item, Labelled)], at_once)
        for i in range(0, len(items), at_once):
            said = self._said(self._sides(items[i : i + at_once]))
            loss = bradley_terry(said[0::2], said[1::2], centring=self.settings.centring).sum() / len(items)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def _remember(self, rng: random.Random) -> None:
        """Let the fresh ones be old. Each that ever was is as likely to be kept: Vitter's algorithm R."""
        for item in self.fresh:
            self.n_seen += 1
            if len(self.old) < self.settings.capacity:
                self.old.append(item)
            elif (place := rng.randrange(self.n_seen)) < self.settings.capacity:
                self.old[place] = item
        self.fresh, self.held = [], []

    # --- what it says ---

    @staticmethod
    def _sides(items: Sequence[Item]) -> list[Sequence[int]]:
        """Both sides of each pair, one after the other; nothing of what are no pairs."""
        return [side.token_ids for p in items if isinstance(p, Pair) for side in (p.chosen, p.rejected)]

    def _said(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """`[N]` what the model says of rows where it looks by itself, unscaled; one forward pass."""
        said: torch.Tensor = pooled_at(self.model, rows)
        return said

    @torch.no_grad()
    def _numbers(self, rows: Sequence[Sequence[int]]) -> list[float]:
        self.model.eval()
        n = self.settings.pairs_per_microbatch
        return [x for i in range(0, len(rows), n) for x in self._said(rows[i : i + n]).tolist()]

    def _accuracy(self, when: str, estimate: Estimate) -> dict[str, float]:
        """Pairwise accuracy on held-out attempts, with its interval; empty without any."""
        ahead = self._compared()
        if not ahead:
            return {"reward_refresh/n_held_out": 0.0}
        found = estimate([right for right, _ in ahead], [task for _, task in ahead])
        figures = {"": found.value, "_low": found.low, "_high": found.high}
        named = {f"reward_refresh/accuracy_{when}{end}": float(value) for end, value in figures.items()}
        return named | {"reward_refresh/n_held_out": float(len(ahead))}

    def _compared(self) -> list[tuple[bool, str]]:
        from rlhf.training.contrib.reward_model_pointwise import right_before_wrong  # as above

        if self.is_of_pairs:
            said = self._numbers(self._sides(self.held))
            return [(a > b, p.task_id) for a, b, p in zip(said[0::2], said[1::2], self.held, strict=True)]
        rows = [item for item in self.held if isinstance(item, Labelled)]
        ends = logits(self.model, [(row.token_ids, row.ends[-1:]) for row in rows], self.settings.pairs_per_microbatch)
        return list(right_before_wrong(rows, [xs[-1] for xs in ends]))

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Weights, scale, optimiser, and everything collected."""
        return {
            "model": {name: value.detach() for name, value in self.model.state_dict().items()},
            "scale": list(self.scale),
            "optimizer": self.stepper.optimizer.state_dict(),
            "n_updates": self.stepper.n_updates,
            **{name: [_stored(item) for item in getattr(self, name)] for name in _LISTS},
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises RuntimeError or ValueError for the state of another model."""
        self.model.load_state_dict(state["model"])
        setattr(self.model.config, SCALE, list(state["scale"]))
        self.stepper.optimizer.load_state_dict(state["optimizer"])
        self.stepper.n_updates = int(state["n_updates"])
        for name in _LISTS:
            setattr(self, name, [_restored(item) for item in state[name]])
        for name in _NUMBERS:
            setattr(self, name, state[name])


#: What is kept of a `RewardRefreshHook` besides its model.
_LISTS, _NUMBERS = ("fresh", "held", "old"), ("n_seen", "n_refreshes", "is_due")


def refreshed(settings: RewardRefresh, rewards: Mapping[str, WeightedReward]) -> tuple[str, ModelReward]:
    """Return name and reward that are meant; a recipe that was checked has it."""
    found = [
        (name, weighted.reward)
        for name, weighted in rewards.items()
        if isinstance(weighted.reward, ModelReward) and settings.reward in (None, name) and weighted.monitor is None
    ]
    return found[0]


def _worse(figures: Mapping[str, float], name: str, step: int) -> dict[str, str]:
    """Say that a reward model is surely worse after it learnt than before, if it is."""
    low, high = (figures.get(f"reward_refresh/accuracy_{end}") for end in ("before_low", "after_high"))
    if low is None or high is None or high >= low:
        return {}
    text = (
        f"caution: the reward model of {name} became worse by what it learnt after step {step}, from "
        f"{figures['reward_refresh/accuracy_before']:.1%} to {figures['reward_refresh/accuracy_after']:.1%} of "
        "held-out pairs; lower reward_refresh.optimizer.lr"
    )
    return {"a reward model became worse": text}


def _told(group: ScoredGroup, truth: str | None) -> ScoredGroup:
    """The attempts with what they are truly worth as their scores."""
    values = [
        float(trajectory.solved) if truth is None else score.parts[truth].value
        for trajectory, score in zip(group.trajectories, group.scores, strict=True)
    ]
    scores = (Score({}, (0.0,) * len(t.turns), x) for t, x in zip(group.trajectories, values, strict=True))
    return replace(group, scores=tuple(scores))


def _stored(item: Item) -> dict[str, Any]:
    if isinstance(item, Pair):
        sides = {"chosen": item.chosen, "rejected": item.rejected}
        return {"task_id": item.task_id, **{k: torch.tensor(s.token_ids, dtype=torch.int32) for k, s in sides.items()}}
    ids = {"token_ids": torch.tensor(item.token_ids, dtype=torch.int32), "ends": list(item.ends)}
    told = {"labels": list(item.labels), "right": item.right, "is_last": item.is_last}
    return {"task_id": item.task_id, "attempt": item.attempt, **ids, **told}


def _restored(values: Mapping[str, Any]) -> Item:
    if "chosen" in values:
        chosen, rejected = (tuple(values[name].tolist()) for name in ("chosen", "rejected"))
        sides = [Side(ids, (True,) * len(ids)) for ids in (chosen, rejected)]
        return Pair(values["task_id"], sides[0], sides[1])
    kept: dict[str, Any] = {name: values[name] for name in ("task_id", "attempt", "right", "is_last")}
    kept |= {name: tuple(values[name]) for name in ("ends", "labels")}
    return Labelled(token_ids=tuple(values["token_ids"].tolist()), **kept)
