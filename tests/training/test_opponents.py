"""Older versions of the policy in a seat of its games: what they sample, who plays when, and what is trained on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agents.chat import ChatAgent
from agents.contrib.self_play import SelfPlay
from environments.base import Properties, StepResult
from rlhf.batching.samples import make_samples
from rlhf.build.train import train
from rlhf.commands.trial import shortened
from rlhf.credit.contrib.self_play import Seats, seat_of
from rlhf.credit.dr_grpo import DrGRPO
from rlhf.data import Generation, PolicyWeights, Prompt, SamplingParams, ScoredGroup, Task
from rlhf.errors import DeliveryError, RecipeError
from rlhf.evaluation.store import read_trajectories
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.inference.embedded.swapped_weights import SwappedWeightsEngine, having, held_by
from rlhf.recipe import load
from rlhf.recipe.checks import cautions
from rlhf.recipe.compatibility import check_processes
from rlhf.rollout.opponent_engine import OpponentEngine
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.contrib.judge_refresh import learnt
from rlhf.training.contrib.league import League, Version, _Drawn
from rlhf.training.contrib.opponent_settings import Opponents
from rlhf.training.policy.model import Lora, Policy
from rlhf.training.stages.policy_gradient import PolicyGradient
from tests import test_resume as resume
from tests import test_self_play as self_play
from tests.commands import run
from tests.environments import heap
from tests.training import runs, tiny, words

SEATS = ("black", "white")
ADAPTERS = pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["full", "lora"])


def moved(policy: Policy) -> Mapping[str, torch.Tensor]:
    """Another policy than before in the same module; returns what it was."""
    with torch.no_grad():
        if policy.is_lora:  # an adapter begins as nothing
            for name, p in policy.model.named_parameters():
                if "lora_B" in name:
                    p.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
        before = learnt(policy)
        for p in policy.model.parameters():
            if p.requires_grad:
                p.mul_(-0.7).add_(0.05)
    return before


# --- the engine ------------------------------------------------------------------------------------------------------


@ADAPTERS
def test_an_older_version_samples_what_it_sampled_then_while_the_present_one_does_too(lora: Lora | None) -> None:
    policy = tiny.policy(lora=lora)
    params = SamplingParams(8, seed=3)

    async def said(engine: Any) -> Generation:
        found: Generation = await engine.generate(Prompt((5, 6, 7)), params, "s")
        return found

    async def alone(make: Any) -> Generation:
        engine = make()
        try:
            return await said(engine)
        finally:
            await engine.close()

    def live() -> TransformersEngine:
        return TransformersEngine(policy.model, max_context=64)

    weights = moved(policy)
    with having(held_by(policy.model, weights)):
        then = asyncio.run(alone(live))
    now, at = asyncio.run(alone(live)), tiny.parameters(policy.model)
    assert now.token_ids != then.token_ids

    async def together() -> tuple[Generation, Generation]:
        present, older = live(), SwappedWeightsEngine(policy.model, weights, max_context=64, version=7)
        found = await asyncio.gather(said(older), said(present))
        with pytest.raises(DeliveryError):
            await older.load(PolicyWeights(8, ""))
        await asyncio.gather(present.close(), older.close())
        return found

    older, present = asyncio.run(together())
    assert (older.token_ids, older.logprobs, older.policy_version) == (then.token_ids, then.logprobs, 7)
    assert (present.token_ids, present.logprobs) == (now.token_ids, now.logprobs)
    assert torch.equal(tiny.parameters(policy.model), at)


# --- who plays -------------------------------------------------------------------------------------------------------


def league(versions: int = 2, **settings: Any) -> League:
    policy = tiny.policy()
    made = League.of(Opponents(**settings), policy, SEATS)
    assert made is not None
    made.versions = {10 * i: made.versions[0] for i in range(versions)}
    return made


def test_about_the_share_is_played_and_the_seat_alternates() -> None:
    drawn = _Drawn(league(share=0.25, versions=3), TransformersEngine(tiny.policy().model, max_context=64))
    names: list[str] = []
    firsts: list[str] = []
    n = 0
    for seed in range(100):
        seats = []
        for attempt in range(16):
            found = drawn(seed, attempt)
            assert drawn(seed, attempt) == found  # a retry plays with the same
            n += 1
            seats += found
            names += [player.name for player in found.values()]
        assert all(a != b for a, b in itertools.pairwise(seats))
        firsts += seats[:1]
    assert 0.2 < len(names) / n < 0.3
    assert {names.count(f"step {i}") > len(names) / 5 for i in (0, 10, 20)} == {True}
    assert 30 < firsts.count("black") < 70


# --- what is trained -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Talk:
    """Two speak in turn; who speaks last wins or loses by what is said."""

    properties = Properties(inline=True, seats=SEATS)

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"talk/{i}", seed=i) for i in range(8)]

    def start(self, task: Task) -> TalkEpisode:
        return TalkEpisode(task.seed)


class TalkEpisode:
    def __init__(self, seed: int) -> None:
        self.n = 0
        self.opening = StepResult(f"alpha {seed}", seat=SEATS[0])

    async def step(self, action: str) -> StepResult:
        self.n += 1
        over = self.n == 4
        reward = (-1.0 if sum(map(ord, action)) % 2 else 1.0) if over else 0.0
        return StepResult(f"gamma {len(action)}", reward, over, seat=SEATS[self.n % 2], success=over and reward < 0)

    async def close(self) -> None: ...


def played(policy: Policy, weights: Mapping[str, torch.Tensor]) -> list[ScoredGroup]:
    """Games in which an older version has a seat in two attempts of three."""
    older = SwappedWeightsEngine(policy.model, weights, max_context=policy.max_context)

    def opponents(seed: int, attempt: int) -> Mapping[str, OpponentEngine]:
        return {SEATS[attempt % 2]: OpponentEngine("step 3", older)} if attempt % 3 else {}

    agent = SelfPlay(player=ChatAgent(system=""))
    return tiny.collect(policy, environment=Talk(), agent=agent, n_tasks=4, group_size=6, opponents=opponents)


@ADAPTERS
@pytest.mark.parametrize("layout", ["trajectory", "generation"])
def test_what_the_policy_sampled_is_trained_on_and_the_log_probs_are_those_sampled(
    lora: Lora | None, layout: Any
) -> None:
    policy = tiny.policy(lora=lora)
    weights = moved(policy)
    groups = played(policy, weights)
    calls = [g for group in groups for t in group.trajectories for g in t.generations]
    own, others = [g for g in calls if not g.opponent], [g for g in calls if g.opponent]
    assert {g.opponent for g in others} == {"step 3"} and len(others) > 20
    assert {g.role for g in own} == {g.role for g in others} == set(SEATS)
    ones = tiny.ones(groups)
    trainer = TorchTrainer(policy, AdamW(), 1)

    def gap(credited: list[ScoredGroup]) -> tuple[float, int]:
        samples, _ = make_samples(credited, ones, layout)
        found = trainer.compute_logprobs(samples, temperature=1.0, max_tokens=300)
        pairs = [(s.sampler_logprobs[s.mask], row) for s, row in zip(samples, found, strict=True)]
        return max(float(abs(a - b).max()) for a, b in pairs), sum(len(row) for _, row in pairs)

    found, n_tokens = gap(groups)
    assert found < 1e-4 and n_tokens == sum(len(g.token_ids) for g in own)
    # What the older version sampled has its log-probs, and with its weights in the module the trainer finds them too.
    swapped = [_turned(group) for group in groups]
    assert gap(swapped)[0] > 0.1
    with having(held_by(policy.model, weights)):
        found, n_tokens = gap(swapped)
    assert found < 1e-4 and n_tokens == sum(len(g.token_ids) for g in others)


def _turned(group: ScoredGroup) -> ScoredGroup:
    """As if the older version were the policy, and the policy the older one."""
    trajectories = []
    for t in group.trajectories:
        turns = []
        for turn in t.turns:
            calls = tuple(replace(g, opponent="" if g.opponent else "other") for g in turn.generations)
            turns.append(replace(turn, action=replace(turn.action, generations=calls)))
        trajectories.append(replace(t, turns=tuple(turns)))
    return replace(group, trajectories=tuple(trajectories))


def test_a_seat_that_an_older_version_had_is_given_no_credit_and_compared_with_nobody() -> None:
    policy = tiny.policy()
    groups = played(policy, moved(policy))
    for group, credit in zip(groups, Seats(inner=DrGRPO()).over_batch(groups), strict=True):
        earned: dict[str, list[float]] = {seat: [] for seat in SEATS}
        for t, score in zip(group.trajectories, group.scores, strict=True):
            by = {seat_of(turn): turn.generations[0].opponent for turn in t.turns}
            last = {seat: 1 if seat == seat_of(t.turns[-1]) else -1 for seat in SEATS}
            for seat in SEATS:
                earned[seat] += [] if by[seat] else [last[seat] * score.total]
        for t, score, rows in zip(group.trajectories, group.scores, credit.advantages_GNT, strict=True):
            for g, row in zip(t.generations, rows, strict=True):
                sign = 1 if g.role == seat_of(t.turns[-1]) else -1
                mean = sum(earned[g.role]) / len(earned[g.role])
                assert row == pytest.approx([0.0 if g.opponent else sign * score.total - mean] * len(g.token_ids))


@pytest.mark.parametrize(("n_steps", "keep"), [(2, 1), (6, 1), (7, 4)])
def test_a_trial_that_ends_before_there_is_another_version_is_a_recipe(n_steps: int, keep: int) -> None:
    path = "textarena/nim-opponents"
    stage = load(path, shortened(load(path), n_steps)).stages[1]
    assert isinstance(stage, PolicyGradient) and stage.opponents is not None
    assert (stage.steps, stage.opponents.every, stage.opponents.keep) == (n_steps, 6, keep)


def test_a_trial_is_shorter_than_the_window_of_a_monitored_reward() -> None:
    watched = load(
        "quickstart", ["rewards.seen={kind: called, tool: move, monitor: {window: 30}}", "stages.1.steps=40"]
    )
    assert load(
        "quickstart", ["rewards.seen={kind: called, tool: move, monitor: {window: 30}}", *shortened(watched, 2)]
    )


def test_a_trial_publishes_nothing() -> None:
    published = load("quickstart", ["push_to_hub=me/small", "trackers=[{kind: wandb}]"])
    trial = load("quickstart", ["push_to_hub=me/small", "trackers=[{kind: wandb}]", *shortened(published, 2)])
    assert trial.push_to_hub is None and trial.trackers == ()


def test_turns_of_older_versions_are_drawn_read_and_never_trained_on() -> None:
    policy, made = tiny.policy(), league(by="turn", share=0.4)
    made.versions[10] = Version(moved(policy), 1)
    engine = TransformersEngine(policy.model, max_context=policy.max_context)
    drawn = _Drawn(made, engine, max_turns=4)
    groups = tiny.collect(policy, environment=Talk(), n_tasks=8, group_size=6, opponents=drawn)
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    by = [{g.opponent for g in turn.generations} for turn in turns]
    assert all(len(names) == 1 for names in by) and {"", "step 0", "step 10"} == set().union(*by)
    older = sum(names != {""} for names in by)
    assert 0.3 < older / len(turns) < 0.5 and made.learn(groups, 1)["opponents/share"] == older / len(turns)
    assert drawn(3, 1) == drawn(3, 1) != drawn(3, 2) and not set(drawn(3, 1)) - {f"turn {k}" for k in range(4)}
    # Only what the policy sampled is trained on, and its log-probs are the policy's whoever spoke before.
    samples, _ = make_samples(groups, tiny.ones(groups), "trajectory")
    found = TorchTrainer(policy, AdamW(), 1).compute_logprobs(samples, temperature=1.0, max_tokens=300)
    own = sum(len(g.token_ids) for turn in turns for g in turn.generations if not g.opponent)
    assert sum(int(s.mask.sum()) for s in samples) == own
    assert max(float(abs(s.sampler_logprobs[s.mask] - row).max()) for s, row in zip(samples, found, strict=True)) < 1e-4


def test_wins_are_counted_by_who_was_played_against_and_versions_come_and_go() -> None:
    policy = tiny.policy()
    groups = played(policy, moved(policy))
    made = League.of(Opponents(every=2, keep=2), policy, SEATS)
    assert made is not None
    won: dict[str, list[float]] = {"current": [], "step_3": []}
    for t in (t for group in groups for t in group.trajectories):
        by = {g.role: g.opponent for g in t.generations}
        winner = SEATS[1] if t.turns[-1].reward > 0 else SEATS[0]
        name = "step_3" if any(by.values()) else "current"
        own = next(seat for seat in SEATS if not by[seat])
        won[name].append(float(winner == own))
    figures = made.learn(groups, 1)
    assert figures["win_rate/current"] == pytest.approx(sum(won["current"]) / len(won["current"]))
    assert figures["win_rate/step_3"] == pytest.approx(sum(won["step_3"]) / len(won["step_3"]))
    assert figures["opponents/share"] == pytest.approx(16 / 24) and figures["opponents/n_versions"] == 1
    for n_steps in range(2, 8):
        made.learn(groups, n_steps)
    assert list(made.versions) == [4, 6]


# --- whole runs ------------------------------------------------------------------------------------------------------

STAGE = {
    "kind": "policy_gradient",
    "steps": 5,
    "tasks_per_step": 2,
    "group_size": 8,
    "minibatches": 2,
    "checkpoint_every": 1,
    "advantage": {"kind": "seats"},
    "opponents": {"every": 2, "keep": 2, "share": 0.6},
    "optimizer": {"lr": 3.0e-3},
}


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
def test_a_stopped_run_equals_one_that_was_not(tmp_path: Path, lora: Any) -> None:
    policy = runs.BASE["policy"] | {"hidden_size": 16} | ({"lora": lora} if lora else {})
    supervised = self_play.SUPERVISED | {"n_demonstrations": 32, "epochs": 4}
    again = STAGE | {"steps": 1, "opponents": None}
    path = self_play.write(tmp_path, [supervised, STAGE, again], policy=policy, evaluation={"n_tasks": 2})
    calls: list[int] = []
    with words.on_every_step(path, lambda: calls.append(1)):
        whole = runs.run(path, tmp_path / "whole")
    # Late in the run, then soon after it goes on, and again: in the stage with opponents, whose versions are kept.
    at = [2 * len(calls) // 3, len(calls) // 10, len(calls) // 10]
    assert resume.run_with_interruptions(path, tmp_path / "stopped", at) >= 2
    resume.assert_equal(tmp_path / "stopped", tmp_path / "whole")
    records = list(read_trajectories(whole.folder / "trajectories", phase="train"))
    of_stage = [r for r in records if r.stage == "1-policy_gradient"]
    played_by = {
        s: {g.opponent for r in of_stage if r.step == s for g in r.trajectory.generations} - {""} for s in range(6)
    }
    assert played_by[1] | played_by[2] == {"step 0"} and played_by[5] <= {"step 2", "step 4"} and played_by[5]
    assert not {g.opponent for r in records if r.stage == "2-policy_gradient" for g in r.trajectory.generations} - {""}
    for step, n in enumerate(runs.curve(whole.folder, "batch/n_policy_tokens")[:5], start=1):
        own = [g for r in of_stage if r.step == step for g in r.trajectory.generations if not g.opponent]
        assert n <= sum(len(g.token_ids) for g in own)
    assert runs.curve(whole.folder, "opponents/n_versions") == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert len(runs.curve(whole.folder, "win_rate/step_0")) >= 2
    files = runs.newest(whole.folder).parent / "1-policy_gradient-000004" / "trainer.pt"
    assert not lora or not files.is_file() or files.stat().st_size < 2_000_000


# --- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "changes", "says"),
    [
        ({"opponents": {"evry": 2}}, {}, ["stages[0].opponents.evry", "did you mean 'every'"]),
        ({"opponents": {"share": 0}}, {}, ["stages[0].opponents.share"]),
        ({"opponents": {"every": 5}}, {}, ["stages[0].opponents.every", "less than 5"]),
        ({}, {"engine": {"kind": "vllm"}}, ["stages[0].opponents", "engine: vllm", "transformers"]),
        ({}, {"environment": {"kind": "./words.py:Words"}, "agent": {"kind": "chat"}}, ["no seats", "opponent: self"]),
        ({"advantage": {"kind": "gae"}, "critic": {}}, {}, ["a critic would also learn"]),
        ({"rollout": {"kind": "tree"}, "group_size": 9}, {}, ["rollout: tree"]),
        ({"trainer": {"kind": "deepspeed", "zero_stage": 3}}, {}, ["trainer.zero_stage: 3"]),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(tmp_path: Path, stage: Any, changes: Any, says: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load(self_play.write(tmp_path, [STAGE | stage], **changes))
    assert all(text in str(caught.value) for text in says), str(caught.value)


def test_what_was_trained_so_can_be_measured_against_others_and_not_trained_against_them(tmp_path: Path) -> None:
    path = self_play.write(tmp_path, [STAGE])
    made = load(path, ["environment.opponent=chance"])
    [said] = [text for text in cautions(made) if "opponents" in text]
    assert "evaluated but not trained" in said and not any("opponents" in text for text in cautions(load(path)))
    with pytest.raises(RecipeError, match="no other seat"):
        train(made, tmp_path / "run")
    refused = run("train", path, "environment.opponent=chance", "--out", tmp_path / "run")
    assert refused.exit_code == 2 and "caution" not in refused.stderr  # which would say the same
    assert "play both seats: environment.opponent=self, or remove the key" in refused.stderr


def test_it_takes_one_process(tmp_path: Path) -> None:
    made = load(self_play.write(tmp_path, [STAGE | {"trainer": {"kind": "deepspeed"}}]))
    assert made.environment.properties.seats == heap.SEATS  # type: ignore[attr-defined]
    with pytest.raises(RecipeError, match="one process"):
        check_processes(made, 2)
