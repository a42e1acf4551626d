"""ArCHer critic: trained on a turn replay buffer, then valuing the turns of a step.

Unlike a critic of the present step's values, it learns before it is asked: its values of a turn are then to know what
became of it. What is logged of how well it knew the step is measured before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from rlhf.batching.samples import Bools, Sample
from rlhf.checking import CheckContext, Problem
from rlhf.credit.estimator import without_given
from rlhf.credit.flat_tokens import FlatTokens, nested, scan, shape_of
from rlhf.data import ScoredGroup, Values
from rlhf.inference.embedded.swapped_weights import having, held_by
from rlhf.settings import STRICT
from rlhf.training.context import StageKeys
from rlhf.training.contrib.critics.archer_model import Judged, TurnModel
from rlhf.training.contrib.critics.turn_buffer import Episode, TurnBuffer, episodes_of, packed
from rlhf.training.critics.base import CriticTrainerBase, StepPredictions, means, optimizer_of, value_metrics
from rlhf.training.critics.value_model import ValueHeadSettings
from rlhf.training.policy.model import Policy

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ArcherCritic(ValueHeadSettings):
    """Turn-level critic (ArCHer): Q-values and state values, trained on the trajectories of many steps.

    Two Q-heads read a turn, two V-heads its state. A copy of the critic that follows it slowly says what they should
    have said: Q_j(o, a) should be r + γ V̄_j(o') and V_j(o) should be Q̄_j(o, a) with a of the present policy.

    Source: ArCHer, arXiv 2402.19446.
    """

    bootstrap: bool = True
    """Bootstrap truncated trajectories with the critic's value; false treats truncation as termination."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Discount per turn."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Polyak rate of the target critic per update; 1 disables the target."""
    updates_per_step: Annotated[int, Field(ge=1)] = 50
    """Critic updates per step."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Trajectories per update from the buffer, and as many from the step."""
    capacity: Annotated[int, Field(ge=1)] = 100_000
    """Buffer capacity in turns; the oldest trajectories are dropped first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone == "policy" and self.trains_backbone:
            raise ValueError(
                "gradient: backbone would move the policy in every update of the critic; "
                "use backbone: own, or gradient: head"
            )

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse, too, a buffer that does not hold one step."""
        yield from super().check(context)
        n_episodes = context.stage.tasks_per_step * context.stage.group_size
        if self.capacity < n_episodes:
            yield Problem(
                "the critic's buffer does not hold one step",
                where=context.at("capacity"),
                got=f"{self.capacity} turns",
                expected=f"at least tasks_per_step x group_size = {n_episodes}, for trajectories of one turn",
                do="raise it to the turns of several steps",
            )

    def start(self, stage: StageKeys, policy: Policy, start: Path | None, seed: int) -> ArcherTrainer:
        """Return what trains it through a stage; see `CriticKind.start`."""
        return ArcherTrainer(self, self.build(policy, start, seed), stage, seed)

    def build(self, policy: Policy, start: Path | None, seed: int) -> TurnModel:
        """Return the critic's model before its first update: every value is 0. See `backbone_for`."""
        backbone = self.backbone_for(policy, start, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = TurnModel(backbone, shared=self.backbone == "policy", trains_backbone=self.trains_backbone)
        return model.to(next(policy.model.parameters()).device)


@plain_dataclass(frozen=True)
class Shares:
    """Trajectories of an update, and the number of places it divides by.

    Attributes:
        episodes: each once.
        for_actions: `[E]`, those that the buffer gave.
        for_states: `[E]`, those of the step.
        n_actions: turns of the former.
        n_states: states of the latter whose value is trained.
    """

    episodes: Sequence[Episode]
    for_actions: Bools
    for_states: Bools
    n_actions: int
    n_states: int


def action_targets(rewards_K: Tensor, following_2K: Tensor, gamma: float) -> Tensor:
    """Return `[2, K]`, what Q_j of each turn should be: r + γ V̄_j(o').

    Each head follows the same head of the copy, not the lower of the two. r = 0, V̄ = (.6, .5), γ = .95: (.57, .475).

    Args:
        rewards_K: of each turn.
        following_2K: what the copy says of the state that each led to; 0 where nothing follows.
        gamma: discount per turn.
    """
    return rewards_K + gamma * following_2K


def following(judged: Judged, episodes: Sequence[Episode]) -> Tensor:
    """Return `[2, K]`, the value of the state that each turn led to.

    That is the state of the next turn. After the last turn of a trajectory that was cut it is the state after its last
    token, for the policy was never shown the environment's reply; after one that ended by itself it is 0.
    """
    is_last, is_cut = (torch.from_numpy(x).to(judged.states.device) for x in _ends(episodes))
    at_end = torch.where(is_cut, judged.after, torch.zeros_like(judged.after))
    return torch.where(is_last, at_end, judged.states.roll(-1, 1))


def _ends(episodes: Sequence[Episode]) -> tuple[Bools, Bools]:
    """Return for each turn whether it is the last of its trajectory, and whether that was cut."""
    counts = [e.n_turns for e in episodes]
    is_last = np.zeros(sum(counts), np.bool_)
    is_last[np.cumsum(counts) - 1] = True
    return is_last, np.repeat([e.is_cut for e in episodes], counts)


class ArcherTrainer(CriticTrainerBase[ArcherCritic, TurnModel]):
    """Updates a model of turns in place; see `CriticTrainerBase`.

    Attributes:
        copy: the parameters that the critic trains, as the slow copy has them, by name.
        buffer: turns of this step and of earlier ones.
    """

    def __init__(self, settings: ArcherCritic, model: TurnModel, stage: StageKeys, seed: int) -> None:
        super().__init__(settings, model, optimizer_of(settings, model), stage.steps * settings.updates_per_step)
        self._stage, self._seed = stage, seed
        # In float32: 16 bits round a step of τ towards weights that are a few spacings away to none.
        self.copy = {name: p.detach().float().clone() for name, p in model.kept()}
        self.buffer = TurnBuffer(settings.capacity)
        self._n_tried = 0

    @property
    def n_updates(self) -> int:
        """Updates made or tried so far, of the stage."""
        return self._n_tried

    def predict(self, groups: Sequence[ScoredGroup]) -> StepPredictions:
        """Add a step's turns to the buffer, update the critic, and return its values of them."""
        begun = time.perf_counter()
        of_each = episodes_of(groups, bootstrap=self.settings.bootstrap)
        fresh = [e for e in of_each if e is not None]
        if not fresh:
            values = _values_of(groups, of_each, np.zeros((3, 0)))
            return StepPredictions(values=values, time_s=time.perf_counter() - begun)
        figures = self._surprise(fresh)
        figures |= self._learn(fresh)
        values = _values_of(groups, of_each, self._lower(fresh))
        return StepPredictions(values=values, figures=figures, time_s=time.perf_counter() - begun)

    def learn(
        self, seen: StepPredictions, samples: Sequence[Sample], rng: np.random.Generator, step: int
    ) -> dict[str, float]:
        """Return what is logged of the step; the updates are made by now."""
        return {**seen.figures, "time/critic_s": seen.time_s}

    # --- what it expects ---

    @torch.no_grad()
    def _lower(self, episodes: Sequence[Episode]) -> Doubles:
        """Minimum of two heads, `[3, K]`: for every turn, its state, and the next state."""
        self.model.eval()
        found = [self.model.judge(part) for part in self._packed(episodes)]
        parts = ("actions", "states", "after")
        return np.stack([torch.cat([getattr(j, n).amin(0) for j in found]).double().cpu().numpy() for n in parts])

    def _packed(self, episodes: Sequence[Episode]) -> Iterator[list[Episode]]:
        return packed(episodes, self._stage.max_tokens_per_microbatch)

    def _surprise(self, fresh: Sequence[Episode]) -> dict[str, float]:
        """Compare what the critic expects of states that it has not learnt from with what followed them."""
        _, states, after = self._lower(fresh)
        is_last, is_cut = _ends(fresh)
        earned = np.concatenate([e.rewards for e in fresh]).astype(np.float64)
        earned[is_last & is_cut] += self.settings.gamma * after[is_last & is_cut]
        lengths = np.array([e.n_turns for e in fresh], np.int64)
        v, g = (torch.from_numpy(x) for x in (states, scan(earned, lengths, self.settings.gamma)))
        return value_metrics(v, g)

    # --- what it learns ---

    def _learn(self, fresh: Sequence[Episode]) -> dict[str, float]:
        rng = np.random.default_rng([self._seed, self.n_updates])
        torch.manual_seed(int(rng.integers(2**62)))  # dropout; the loop sets it anew before the policy's updates
        self.buffer.add(fresh)
        n_skipped = self._stepper.n_skipped
        return {
            **means(self._update(self._drawn(fresh, rng)) for _ in range(self.settings.updates_per_step)),
            "critic/n_stored": float(self.buffer.n_turns),
            "critic/n_updates": float(self._stepper.n_updates),
            "critic/n_skipped": float(self._stepper.n_skipped - n_skipped),
        }

    def _drawn(self, fresh: Sequence[Episode], rng: np.random.Generator) -> Shares:
        """Sample an update's trajectories without replacement: of the buffer for Q, of the step for V."""
        size = self.settings.batch_size
        pools = (self.buffer.kept, fresh)
        chosen = [[pool[i] for i in rng.choice(len(pool), min(size, len(pool)), replace=False)] for pool in pools]
        episodes = list({id(e): e for part in chosen for e in part}.values())
        wanted = [{id(e) for e in part} for part in chosen]
        for_actions, for_states = (np.array([id(e) in part for e in episodes]) for part in wanted)
        n_states = sum(e.n_turns + (e.n_turns - 1 if self.settings.bootstrap else 0) for e in chosen[1])
        return Shares(episodes, for_actions, for_states, sum(e.n_turns for e in chosen[0]), n_states)

    def _update(self, shares: Shares) -> dict[str, float]:
        self._n_tried += 1
        self.model.train()
        self._stepper.optimizer.zero_grad(set_to_none=True)
        losses, targets, at = np.zeros(2), [], 0
        for part in self._packed(shares.episodes):
            span = slice(at, at + len(part))
            counts, at = [e.n_turns for e in part], span.stop
            masks = (np.repeat(x[span], counts) for x in (shares.for_actions, shares.for_states))
            q_loss, v_loss, wanted = self._losses(part, *masks)
            loss = q_loss / shares.n_actions + v_loss / shares.n_states
            loss.backward()  # type: ignore[no-untyped-call]
            losses += (float(q_loss.detach()) / shares.n_actions, float(v_loss.detach()) / shares.n_states)
            targets.append(wanted)
        norm = self._stepper.step()
        self.model.eval()
        self._follow()
        figures = {"q_loss": losses[0], "v_loss": losses[1], "grad_norm": norm, "lr": self._stepper.lr}
        figures["target_std"] = float(torch.cat(targets).std(correction=0))
        return {f"critic/{name}": float(value) for name, value in figures.items()}

    def _losses(self, episodes: Sequence[Episode], actions_K: Bools, states_K: Bools) -> tuple[Tensor, Tensor, Tensor]:
        """Summed squared errors of both Q-heads and both V-heads, and the targets of Q."""
        with torch.no_grad(), having(held_by(self.model, self.copy)):
            self.model.eval()
            slow = self.model.judge(episodes)
            self.model.train()
        now = self.model.judge(episodes)
        device = now.states.device
        rewards = torch.from_numpy(np.concatenate([e.rewards for e in episodes])).to(device)
        of_actions, of_states = (torch.from_numpy(x).to(device) for x in (actions_K, states_K))
        wanted = action_targets(rewards, following(slow, episodes), self.settings.gamma)
        q_loss = ((now.actions - wanted).square() * of_actions).sum()
        v_loss = ((now.states - slow.actions).square() * of_states).sum()
        if self.settings.bootstrap:
            # The state in which a limit cuts is one before the environment's reply: what it is worth is learnt where a
            # trajectory goes on, from the turn that follows.
            goes_on = of_states & ~torch.from_numpy(_ends(episodes)[0]).to(device)
            v_loss = v_loss + ((now.after - slow.actions.roll(-1, 1)).square() * goes_on).sum()
        return q_loss, v_loss, wanted[:, of_actions].flatten()

    @torch.no_grad()
    def _follow(self) -> None:
        for name, parameter in self.model.kept():
            self.copy[name].lerp_(parameter.float(), self.settings.tau)

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Critic, copy, optimiser and buffer; the policy's weights are saved with the policy."""
        own = {"copy": self.copy, "n_tried": self._n_tried, "buffer": self.buffer.state_dict()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises ValueError for the state of another model."""
        super().load_state_dict(state)
        for name, values in self.copy.items():
            values.copy_(state["copy"][name])
        self._n_tried = int(state["n_tried"])
        self.buffer.load_state_dict(state["buffer"])


def _values_of(groups: Sequence[ScoredGroup], of_each: Sequence[Episode | None], found: Doubles) -> list[Values]:
    """Values for all tokens of each turn from `found`, `[3, K]` over all groups, cut by group."""
    tokens_K = FlatTokens.of([without_given(group) for group in groups]).tokens_K
    shapes = [shape_of(group) for group in groups]
    actions, states = (nested(shapes, np.repeat(values, tokens_K)) for values in found[:2])
    cuts, at = [], 0
    for episode in of_each:
        at += episode.n_turns if episode else 0
        cuts.append(float(found[2][at - 1]) if episode and episode.is_cut else 0.0)
    bootstrap_values_G = iter(cuts)
    return [
        Values(v, tuple(next(bootstrap_values_G) for _ in group.trajectories), q)
        for group, v, q in zip(groups, states, actions, strict=True)
    ]
