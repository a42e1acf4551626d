"""ArCHer's critic: its transitions, targets, buffer and slow copy, against their definitions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.credit.contrib.archer import ArCHer
from rlhf.credit.estimator import compute_advantages
from rlhf.credit.returns import discounted_returns
from rlhf.data import Outcome, Score, ScoredGroup, Trajectory
from rlhf.errors import CheckpointError
from rlhf.losses.value import explained_variance
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.checkpoints import store
from rlhf.training.checkpoints.store import State
from rlhf.training.contrib.critics.archer import ArcherCritic, ArcherTrainer, action_targets, following
from rlhf.training.contrib.critics.archer_model import Judged
from rlhf.training.contrib.critics.turn_buffer import Episode, TurnBuffer, episodes_of
from rlhf.training.policy.model import Lora, Policy
from rlhf.training.stages.policy_gradient import PolicyGradient
from tests.batching.batch_parts import generation, group, trajectory
from tests.training.critics import AGENTS, assert_same_gradients, ended_and_cut
from tests.training.tiny import parameters, policy

KINDS = {
    "own": ArcherCritic(),
    "own-lora": ArcherCritic(lora=Lora(rank=2)),
    "own-head": ArcherCritic(gradient="head"),
    "policy-head": ArcherCritic(backbone="policy"),
}
EVERYTHING = 1000


def critic_of(made: Policy, settings: ArcherCritic | None = None, *, awake: bool = True, **stage: Any) -> ArcherTrainer:
    """The critic of a stage, which makes one update of all it has; `awake`, its heads say something already."""
    optimizer = AdamW(lr=1e-2, max_grad_norm=None)
    settings = replace(settings or ArcherCritic(updates_per_step=1, batch_size=EVERYTHING), optimizer=optimizer)
    critic = settings.start(PolicyGradient(advantage=ArCHer(), critic=settings, **stage), made, None, 0)
    if awake:
        generator = torch.Generator().manual_seed(1)
        for parameter in critic.model.head.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        for name, values in critic.copy.items():  # the copy says something else
            shift = torch.randn(values.shape, generator=generator) / 10
            values.copy_(dict(critic.model.kept())[name].detach() + shift)
    return critic


@pytest.fixture(scope="module", params=AGENTS)
def groups(request: pytest.FixtureRequest) -> list[ScoredGroup]:
    return ended_and_cut(request.param)


# --- transitions and targets -----------------------------------------------------------------------------------------


def judged(states: list[list[float]], after: list[list[float]] | None = None) -> Judged:
    v = torch.tensor(states)
    return Judged(torch.zeros_like(v), v, torch.zeros_like(v) if after is None else torch.tensor(after))


def of_turns(n: int, *, is_cut: bool = False, first: int = 0) -> Episode:
    numbers = np.arange(2 * n) + first
    return Episode(numbers, np.array([2 * n]), numbers[::2] - first, numbers[1::2] - first,
                   np.zeros(n, np.float32), is_cut)  # fmt: skip


def test_worked_example_of_the_targets() -> None:
    # r = 0, V̄' = (.6, .5), γ = .95: .95 · .6 = .57 and .95 · .5 = .475, each head by itself.
    found = action_targets(torch.tensor([0.0]), torch.tensor([[0.6], [0.5]]), 0.95)
    assert found.flatten().tolist() == pytest.approx([0.57, 0.475])


def test_what_follows_a_turn_is_the_next_state_the_state_a_limit_cut_or_nothing() -> None:
    # Two turns that end by themselves, then two that are cut: V̄_1 of the next state, 0; of the next, after the last.
    slow = judged([[0.1, 0.2, 0.3, 0.4], [1.1, 1.2, 1.3, 1.4]], [[0.5, 0.6, 0.7, 0.8], [1.5, 1.6, 1.7, 1.8]])
    found = following(slow, [of_turns(2), of_turns(2, is_cut=True)])
    assert found.tolist() == [pytest.approx([0.2, 0.0, 0.4, 0.8]), pytest.approx([1.2, 0.0, 1.4, 1.8])]
    ended = action_targets(torch.tensor([0.0, 1.0, 0.0, 0.0]), found, 0.5)
    assert ended[0].tolist() == pytest.approx([0.1, 1.0, 0.2, 0.4])


def scored(made: Trajectory, rewards: list[float]) -> ScoredGroup:
    return ScoredGroup(made.task_id, (made,), (Score({}, tuple(rewards), sum(rewards)),))


def test_transitions_are_cut_where_the_policy_began_to_speak_and_where_it_stopped() -> None:
    # Ids 0 1 | 2 3 | 4 | 5 | 6 7 | 8: sampled are 2 3, 5 and 8. Their states end at 1, 4 and 7.
    parts = [generation([0, 1], [2, 3]), generation([0, 1, 2, 3, 4], [5]), generation([0, 1, 2, 3, 4, 5, 6, 7], [8])]
    made = trajectory(*parts, outcome=Outcome.TURN_LIMIT)
    [found] = episodes_of([scored(made, [0.0, 0.5, 1.0])], bootstrap=True)
    assert found is not None and found.is_cut and found.n_turns == 3
    assert found.token_ids.tolist() == list(range(9)) and found.lengths.tolist() == [9]
    assert found.states.tolist() == [1, 4, 7] and found.ends.tolist() == [3, 5, 8]
    assert found.rewards.tolist() == [0.0, 0.5, 1.0]
    [ended] = episodes_of([scored(made, [0.0, 0.5, 1.0])], bootstrap=False)
    assert ended is not None and not ended.is_cut
    # The second prompt is rewritten: a row of its own, and the places go on behind the first.
    parts[1] = generation([9, 9], [5])
    [found] = episodes_of([scored(trajectory(*parts[:2]), [0.0, 1.0])], bootstrap=True)
    assert found is not None and not found.is_cut
    assert found.token_ids.tolist() == [0, 1, 2, 3, 9, 9, 5] and found.lengths.tolist() == [4, 3]
    assert found.states.tolist() == [1, 5] and found.ends.tolist() == [3, 6]


def test_a_turn_in_which_nothing_was_sampled_is_none_and_its_reward_goes_to_the_one_before() -> None:
    made = trajectory(generation([0], [1]), generation([0, 1, 2], []), generation([0, 1, 2, 3], [4]))
    nothing = trajectory(generation([0], []))
    both = ScoredGroup("task", (nothing, made), (Score({}, (2.0,), 2.0), Score({}, (0.0, 0.5, 1.0), 1.5)))
    empty, found = episodes_of([both], bootstrap=True)
    assert empty is None and found is not None
    assert found.rewards.tolist() == [0.5, 1.0] and found.states.tolist() == [0, 3] and found.ends.tolist() == [1, 4]


# --- what it says ----------------------------------------------------------------------------------------------------


def by_definition(critic: ArcherTrainer, before: Sequence[int], said: Sequence[int]) -> dict[str, list[torch.Tensor]]:
    """Q-values of a turn and values of the states around it: plain forward passes of one row each."""

    def hidden(ids: Sequence[int]) -> torch.Tensor:
        out = critic.model.backbone(input_ids=torch.tensor([list(ids)]), use_cache=False)
        found: torch.Tensor = out.last_hidden_state[0, -1].float()
        return found

    o, a = hidden(before), hidden([*before, *said])
    head = critic.model.head
    return {
        "actions": [head[f"q{j}"](torch.cat([o, a]))[0] for j in (1, 2)],
        "states": [head[f"v{j}"](o)[0] for j in (1, 2)],
        "after": [head[f"v{j}"](a)[0] for j in (1, 2)],
    }


def turns_of(made: Trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What the policy had read before each turn, and what it then said."""
    return [(g.prompt.token_ids, g.token_ids) for g in made.generations]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [300, 100_000])
def test_it_reads_states_and_turns_off_the_prefixes(groups: list[ScoredGroup], kind: str, budget: int) -> None:
    critic = critic_of(policy(), KINDS[kind], max_tokens_per_microbatch=budget)
    episodes = [e for e in episodes_of(groups, bootstrap=True) if e is not None]
    parts = list(critic._packed(episodes))
    assert len(parts) == 1 if budget > 300 else len(parts) > 2
    found = [critic.model.judge(part) for part in parts]
    everything = [turn for g in groups for t in g.trajectories for turn in turns_of(t)]
    for name in ("actions", "states", "after"):
        values = torch.cat([getattr(j, name) for j in found], 1).T
        expected = [torch.stack(by_definition(critic, *turn)[name]) for turn in everything]
        torch.testing.assert_close(values, torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_the_advantage_is_the_lower_q_less_the_lower_v_of_the_updated_critic(groups: list[ScoredGroup]) -> None:
    critic = critic_of(policy())
    seen = critic.predict(groups)
    for made, values, credit in zip(
        groups, seen.values, compute_advantages(ArCHer(), groups, seen.values), strict=True
    ):
        values.check(made)
        for t, credit_NT, cut in zip(made.trajectories, credit.advantages_GNT, values.bootstrap_values_G, strict=True):
            said = [by_definition(critic, *turn) for turn in turns_of(t)]
            for s, credit_T in zip(said, credit_NT, strict=True):
                wanted = min(s["actions"]).item() - min(s["states"]).item()
                assert len(set(credit_T)) == 1 and credit_T[0] == pytest.approx(wanted, abs=1e-4)
            is_cut = t.outcome is Outcome.TURN_LIMIT
            assert cut == (pytest.approx(min(said[-1]["after"]).item(), abs=1e-4) if is_cut else 0.0)


def test_a_critic_that_has_seen_nothing_expects_nothing_of_anything(groups: list[ScoredGroup]) -> None:
    episodes = [e for e in episodes_of(groups, bootstrap=True) if e is not None]
    for settings in KINDS.values():
        found = critic_of(policy(), settings, awake=False).model.judge(episodes)
        assert not any(x.any() for x in (found.actions, found.states, found.after))


# --- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize("budget", [300, 100_000])
def test_the_gradient_is_that_of_the_definition(groups: list[ScoredGroup], bootstrap: bool, budget: int) -> None:
    # The mean over turns of Σ_j (Q_j(o, a) − r − γ V̄_j(o'))², and the mean over states of Σ_j (V_j(o) − Q̄_j(o, a))²;
    # with bootstrap, states after a turn that another one follows are such states too.
    settings = ArcherCritic(updates_per_step=1, batch_size=EVERYTHING, bootstrap=bootstrap, gamma=0.9)
    critic = critic_of(policy(), settings, max_tokens_per_microbatch=budget)
    plain = copy.deepcopy(critic)
    slow = copy.deepcopy(critic)
    for name, p in slow.model.kept():
        p.data.copy_(slow.copy[name])
    q_errors, v_errors = [], []
    for made in groups:
        for t, score in zip(made.trajectories, made.scores, strict=True):
            now, then = ([by_definition(c, *turn) for turn in turns_of(t)] for c in (plain, slow))
            for k, (n, r) in enumerate(zip(now, score.turns, strict=True)):
                is_last = k + 1 == len(now)
                is_cut = bootstrap and t.outcome is Outcome.TURN_LIMIT
                for j in (0, 1):
                    rest = (then[k]["after"][j] if is_cut else 0.0) if is_last else then[k + 1]["states"][j]
                    wanted = torch.as_tensor(r + 0.9 * rest).detach()
                    q_errors.append((n["actions"][j] - wanted).square())
                    v_errors.append((n["states"][j] - then[k]["actions"][j].detach()).square())
                    if bootstrap and not is_last:
                        v_errors.append((n["after"][j] - then[k + 1]["actions"][j].detach()).square())
    q_loss, v_loss = (2 * torch.stack(errors).mean() for errors in (q_errors, v_errors))
    (q_loss + v_loss).backward()  # type: ignore[no-untyped-call]
    figures = critic.predict(groups).figures
    assert_same_gradients(critic, plain)
    assert figures["critic/q_loss"] == pytest.approx(q_loss.item(), rel=1e-3)
    assert figures["critic/v_loss"] == pytest.approx(v_loss.item(), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_its_updates_move(groups: list[ScoredGroup], kind: str) -> None:
    made = policy()
    critic = critic_of(made, replace(KINDS[kind], updates_per_step=2, tau=0.25))
    of_policy, before = parameters(made.model), {n: p.detach().clone() for n, p in critic.model.named_parameters()}
    assert set(critic.copy) == {name for name, _ in critic.model.kept()}
    critic.predict(groups)
    assert torch.equal(parameters(made.model), of_policy)
    moved = {name for name, p in critic.model.named_parameters() if not torch.equal(p, before[name])}
    heads, backbone = ({n for n in moved if n.startswith("head.") == is_head} for is_head in (True, False))
    assert len(heads) == 16
    assert bool(backbone) == (kind in ("own", "own-lora"))
    if kind == "own-lora":
        assert all(".lora_" in name for name in backbone)


def test_the_copy_follows_by_tau(groups: list[ScoredGroup]) -> None:
    # After one update: c + τ (p − c), with p after the update.
    critic = critic_of(policy(), ArcherCritic(updates_per_step=1, tau=0.25))
    before = {name: values.clone() for name, values in critic.copy.items()}
    critic.predict(groups)
    for name, p in critic.model.kept():
        torch.testing.assert_close(critic.copy[name], before[name] + 0.25 * (p.detach() - before[name]))
        assert not torch.equal(critic.copy[name], before[name])
    # A step of τ towards weights three spacings of 16 bits away is less than half a spacing.
    short = policy()
    short.model.bfloat16()
    critic = critic_of(short, ArcherCritic(updates_per_step=1, tau=0.1))
    for _, p in critic.model.kept():
        p.data.fill_(1.0)
    for values in critic.copy.values():
        values.fill_(1.0 - 3 / 128)
    for _ in range(100):
        critic._follow()
    assert all(values.min() > 1 - 1e-5 for values in critic.copy.values())
    swift = critic_of(policy(), ArcherCritic(updates_per_step=1, tau=1.0))
    swift.predict(groups)
    assert all(torch.equal(swift.copy[name], p) for name, p in swift.model.kept())


def test_it_learns_what_a_turn_is_worth(groups: list[ScoredGroup]) -> None:
    # The same step again and again: Q of a turn comes to what followed it, V to less of it where states repeat.
    critic = critic_of(policy(), ArcherCritic(updates_per_step=20, bootstrap=False, tau=0.5), awake=False)
    groups = groups[:2]
    seen = [critic.predict(groups) for _ in range(4)]
    logged = [one.figures for one in seen]
    assert logged[0]["critic/explained_variance"] == 0.0 and logged[0]["critic/value_mean"] == 0.0
    assert logged[-1]["critic/explained_variance"] > 0.3
    assert logged[-1]["critic/value_mean"] == pytest.approx(logged[-1]["critic/return_mean"], abs=0.15)
    assert logged[-1]["critic/q_loss"] < 0.5 * logged[0]["critic/q_loss"]
    assert [x["critic/n_updates"] for x in logged] == [20.0 * (i + 1) for i in range(4)]
    pairs = [
        (row[0], wanted)
        for made, values in zip(groups, seen[-1].values, strict=True)
        for actions_NT, score in zip(values.actions_GNT or (), made.scores, strict=True)
        for row, wanted in zip(actions_NT, discounted_returns(score.turns, 0.95), strict=True)
    ]
    q, returns = (torch.tensor(numbers) for numbers in zip(*pairs, strict=True))
    assert explained_variance(q, returns) > 0.5


def test_q_is_learnt_from_earlier_steps_and_v_from_the_present_one(groups: list[ScoredGroup]) -> None:
    critic = critic_of(policy(), ArcherCritic(updates_per_step=1, batch_size=2))
    early, late = ([e for e in episodes_of(part, bootstrap=True) if e] for part in (groups[:3], groups[3:]))
    critic.predict(groups[:3])
    critic.buffer.add(late)
    drawn = [critic._drawn(late, np.random.default_rng(i)) for i in range(40)]
    for shares in drawn:
        assert shares.for_actions.sum() == 2 and shares.for_states.sum() == 2
        states = [e for e, is_of in zip(shares.episodes, shares.for_states, strict=True) if is_of]
        assert all(any(e is one for one in late) for e in states)
        used = zip(shares.episodes, shares.for_actions, strict=True)
        assert shares.n_actions == sum(e.n_turns for e, is_of in used if is_of)
        assert shares.n_states == sum(2 * e.n_turns - 1 for e in states)
    used_for_q = {id(e) for s in drawn for e, is_of in zip(s.episodes, s.for_actions, strict=True) if is_of}
    assert used_for_q == {id(e) for e in critic.buffer.kept} and len(critic.buffer.kept) == len(early) + len(late)


def test_a_step_without_tokens_changes_nothing() -> None:
    critic = critic_of(policy())
    before = critic.state_dict()["model"]["head.q1.0.weight"].clone()
    seen = critic.predict([group(trajectory(generation([0], [])))])
    assert seen.figures == {} and seen.values[0].values_GNT == (((),),) and critic.n_updates == 0
    assert not critic.buffer.kept and torch.equal(critic.state_dict()["model"]["head.q1.0.weight"], before)


# --- the buffer ------------------------------------------------------------------------------------------------------


@given(steps=st.lists(st.lists(st.integers(1, 4), max_size=4), max_size=5), capacity=st.integers(1, 12))
def test_the_oldest_trajectories_go_first_and_whole(steps: list[list[int]], capacity: int) -> None:
    buffer, every = TurnBuffer(capacity), []
    for counts in steps:
        added = [of_turns(n, is_cut=n == 2, first=len(every) + i) for i, n in enumerate(counts)]
        every += added
        buffer.add(added)
        n = len(buffer.kept)
        assert [id(e) for e in buffer.kept] == [id(e) for e in every[len(every) - n :]]
        assert buffer.n_turns <= capacity or n == 1
        # No older one would have fitted.
        assert n == len(every) or buffer.n_turns + every[-n - 1].n_turns > capacity
    again = TurnBuffer(capacity)
    again.load_state_dict(buffer.state_dict())
    for a, b in zip(again.kept, buffer.kept, strict=True):
        for name in ("token_ids", "lengths", "states", "ends", "rewards"):
            found, expected = getattr(a, name), getattr(b, name)
            assert found.dtype == expected.dtype and found.tolist() == expected.tolist()
        assert a.is_cut == b.is_cut


# --- settings and checkpoints ----------------------------------------------------------------------------------------


def test_a_shared_backbone_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="would move the policy"):
        ArcherCritic(backbone="policy", gradient="backbone")
    with pytest.raises(ValueError, match="lora has no effect"):
        ArcherCritic(gradient="head", lora=Lora())


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_happened(
    groups: list[ScoredGroup], kind: str, tmp_path: Path
) -> None:
    made = policy()
    made.save(tmp_path / "policy")
    settings = replace(KINDS[kind], updates_per_step=3, batch_size=2, capacity=12)
    critic = critic_of(made, settings, awake=False)
    for part in (groups[:2], groups[1:3]):
        critic.predict(part)
    folder = store.save(tmp_path, State(0, "policy_gradient", 2, False, 0), made, None, {"critic": critic})
    stage = critic._stage
    again = ArcherTrainer(critic.settings, critic.settings.build(copy.deepcopy(made), tmp_path, 0), stage, 0)
    store.load_trainer(folder, None, {"critic": again})
    for part in (groups[2:], groups[:3]):
        first, second = (c.predict(part) for c in (critic, again))
        assert first.figures == second.figures and first.values == second.values
    assert torch.equal(parameters(critic.model), parameters(again.model))
    assert all(torch.equal(values, again.copy[name]) for name, values in critic.copy.items())
    assert again.n_updates == 12 and again.buffer.n_turns == critic.buffer.n_turns


def test_the_state_of_another_critic_is_refused(tmp_path: Path) -> None:
    made = policy()
    state = State(0, "policy_gradient", 1, False, 0)
    folder = store.save(tmp_path, state, made, None, {"critic": critic_of(made)})
    with pytest.raises(CheckpointError, match="another model"):
        store.load_trainer(folder, None, {"critic": critic_of(policy(hidden_size=24))})
