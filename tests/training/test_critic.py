"""The critic: which states it judges, what it learns from, and that the policy is none of its business."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.batching.pack import collate, pack_minibatches
from rlhf.batching.samples import Sample, make_samples
from rlhf.credit.estimator import compute_advantages
from rlhf.credit.gae import GAE
from rlhf.data import Credit, Outcome, ScoredGroup
from rlhf.errors import CheckpointError, ModelError, TrainingError
from rlhf.inference.embedded.attention import packed_forward
from rlhf.losses.reduction import Reduction
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.checkpoints import store
from rlhf.training.checkpoints.store import State
from rlhf.training.critics.value_model import backbone_of
from rlhf.training.critics.values import Critic, CriticTrainer, ValuePredictions, _with_returns, value_rows
from rlhf.training.policy.model import Lora, Policy
from rlhf.training.stages.policy_gradient import PolicyGradient
from tests.batching.batch_parts import generation, group, trajectory
from tests.training import test_architectures as architectures
from tests.training.critics import AGENTS, ended_and_cut
from tests.training.tiny import gradient, parameters, policy

KINDS = {
    "own": Critic(),
    "own-lora": Critic(lora=Lora(rank=2)),
    "own-head": Critic(gradient="head"),
    "policy-head": Critic(backbone="policy"),
    "policy-backbone": Critic(backbone="policy", gradient="backbone"),
}


def critic_of(made: Policy, settings: Critic | None = None, *, awake: bool = True, **stage: Any) -> CriticTrainer:
    """The critic of a stage with GAE; `awake`, its head says something already."""
    settings = replace(settings or Critic(), optimizer=AdamW(lr=1e-2, max_grad_norm=None))
    critic = settings.start(PolicyGradient(advantage=GAE(), critic=settings, **stage), made, None, 0)
    if awake:
        generator = torch.Generator().manual_seed(1)
        for parameter in critic.model.head.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return critic


@pytest.fixture(scope="module", params=AGENTS)
def groups(request: pytest.FixtureRequest) -> list[ScoredGroup]:
    return ended_and_cut(request.param)


def test_a_row_that_fills_the_context_has_values_where_positions_are_learnt() -> None:
    shape = {"n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    words = policy().tokenizer
    config = AutoConfig.for_model("gpt2", vocab_size=len(words), bos_token_id=None, eos_token_id=None, **shape)
    critic = critic_of(Policy.of(AutoModelForCausalLM.from_config(config), words, None), Critic(backbone="policy"))
    said = [generation([20 + i for i in range(10)], [30 + i for i in range(n)]) for n in (5, 6)]  # of 15 and 16 tokens
    shorter, full = (critic.predict([group(trajectory(one, outcome=Outcome.TOKEN_LIMIT))]).values[0] for one in said)
    assert full.values_GNT[0][0][:5] == pytest.approx(shorter.values_GNT[0][0], abs=1e-6)
    assert full.values_GNT[0][0][5] == pytest.approx(shorter.bootstrap_values_G[0], abs=1e-6), (
        "of the state after 15 tokens"
    )
    assert full.bootstrap_values_G[0] != 0


@pytest.mark.parametrize("backbone", ["own", "policy"])
def test_a_row_that_fills_the_context_leaves_the_short_positions_of_longrope(backbone: Any) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    made = architectures.made("phi3", rope_parameters=rope, original_max_position_embeddings=16)
    critic = critic_of(Policy.of(made, architectures.tokenizer(), None), Critic(backbone=backbone))
    said = [generation([20 + i for i in range(10)], [30 + i for i in range(n)]) for n in (5, 6)]  # of 15 and 16 tokens
    shorter, full = (critic.predict([group(trajectory(one, outcome=Outcome.TOKEN_LIMIT))]).values[0] for one in said)
    assert full.values_GNT[0][0][:5] == pytest.approx(shorter.values_GNT[0][0], abs=1e-4)


def by_definition(critic: CriticTrainer, ids: Sequence[int]) -> torch.Tensor:
    """The value of the state after all of `ids`: a plain forward pass of one row."""
    row = torch.tensor([list(ids)])
    hidden = critic.model.backbone(input_ids=row, use_cache=False).last_hidden_state[0, -1]
    found: torch.Tensor = critic.model.head(hidden.float())[0]
    return found


# --- which states ----------------------------------------------------------------------------------------------------


def test_a_row_asks_for_a_value_before_each_token_and_after_each_generation() -> None:
    # Ids 0 1 | 2 3 | 4 | 5 | 6 7 | 8: sampled are 2 3, 5 and 8. A value is wanted before each of these, which is at
    # their own places, and after each generation, at the places behind 3, 5 and 8. That behind 8 is an added one.
    made = group(trajectory(generation([0, 1], [2, 3]), generation([0, 1, 2, 3, 4], [5]),
                            generation([0, 1, 2, 3, 4, 5, 6, 7], [8])))  # fmt: skip
    [row], [sampled] = value_rows([made], "trajectory")
    assert row.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert np.flatnonzero(row.mask).tolist() == [2, 3, 4, 5, 6, 8, 9]
    assert np.flatnonzero(sampled).tolist() == [2, 3, 5, 8]
    rows, _ = value_rows([made], "generation")
    assert [np.flatnonzero(r.mask).tolist() for r in rows] == [[2, 3, 4], [5, 6], [8, 9]]


def test_what_a_value_should_have_been() -> None:
    # Returns 1 2 | 3 | 4 of the sampled tokens. After a generation nothing is earned until the next token is sampled:
    # 3 behind the first, 4 behind the second. Behind the last nobody knows.
    made = group(trajectory(generation([0, 1], [2, 3]), generation([0, 1, 2, 3, 4], [5]),
                            generation([0, 1, 2, 3, 4, 5, 6, 7], [8])))  # fmt: skip
    credit = Credit((((0.0, 0.0), (0.0,), (0.0,)),), {}, (((1.0, 2.0), (3.0,), (4.0,)),))
    for layout, expected in (
        ("trajectory", [[(2, 1), (3, 2), (4, 3), (5, 3), (6, 4), (8, 4)]]),
        ("generation", [[(2, 1), (3, 2), (4, 3)], [(5, 3), (6, 4)], [(8, 4)]]),
    ):
        critic = critic_of(policy(), layout=layout)
        rows = learnt_rows(critic, [made], [credit])
        found = [[(int(i), float(r.returns[i])) for i in np.flatnonzero(r.mask)] for r in rows if r.returns is not None]
        assert found == expected


def learnt_rows(critic: CriticTrainer, groups: list[ScoredGroup], credits: list[Credit]) -> list[Sample]:
    """The rows that the critic is trained on."""
    samples, _ = make_samples(groups, credits, critic._stage.layout)
    return _with_returns(critic.predict(groups), samples, bootstrap=critic.settings.bootstrap)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["trajectory", "generation"])
def test_values_are_those_of_the_prefixes(groups: list[ScoredGroup], kind: str, layout: Any) -> None:
    critic = critic_of(policy(), KINDS[kind], layout=layout, max_tokens_per_microbatch=300)
    seen = critic.predict(groups)
    for made, values in zip(groups, seen.values, strict=True):
        values.check(made)
        for attempt, values_NT, cut in zip(
            made.trajectories, values.values_GNT, values.bootstrap_values_G, strict=True
        ):
            for sampled, values_T in zip(attempt.generations, values_NT, strict=True):
                for i, value in enumerate(values_T):
                    ids = sampled.prompt.token_ids + sampled.token_ids[:i]
                    assert value == pytest.approx(by_definition(critic, ids).item(), abs=1e-4)
            last = by_definition(critic, attempt.generations[-1].full_ids).item()
            is_cut = attempt.outcome is Outcome.TURN_LIMIT
            assert cut == (pytest.approx(last, abs=1e-4) if is_cut else 0.0)


def test_a_critic_that_has_seen_nothing_expects_nothing(groups: list[ScoredGroup]) -> None:
    for settings in KINDS.values():
        seen = critic_of(policy(), settings, awake=False).predict(groups)
        assert {x for v in seen.values for rows in v.values_GNT for row in rows for x in row} == {0.0}


def values_at(critic: CriticTrainer, rows: list[Sample]) -> list[list[float]]:
    batch = collate(rows, np.ones(len(rows)))
    with torch.no_grad():
        out = packed_forward(critic.model, batch.token_ids, batch.lengths.tolist(), batch.select)[:, 0]
    return [part.tolist() for part in torch.split(out, [r.n_policy_tokens for r in rows])]


@pytest.mark.parametrize("kind", ["own", "policy-head"])
def test_a_value_sees_neither_what_comes_after_nor_other_rows(groups: list[ScoredGroup], kind: str) -> None:
    critic = critic_of(policy(), KINDS[kind])
    rows, _ = value_rows(groups, "trajectory")
    poison = int(rows[0].token_ids[0])
    before = values_at(critic, rows)
    for at in np.flatnonzero(rows[0].mask)[:-1]:
        later = rows[0].token_ids.copy()
        later[at:] = poison  # the value at a place is that of the state before it
        changed = values_at(critic, [replace(rows[0], token_ids=later), *rows[1:]])
        n = int(rows[0].mask[: at + 1].sum())
        assert changed[0][:n] == pytest.approx(before[0][:n], abs=1e-5)
        assert changed[0][n:] != pytest.approx(before[0][n:], abs=1e-3), "this test can fail"
        assert changed[1:] == [pytest.approx(row, abs=1e-5) for row in before[1:]]


# --- learning --------------------------------------------------------------------------------------------------------


def step_of(
    critic: CriticTrainer, groups: list[ScoredGroup], step: int = 0
) -> tuple[dict[str, float], ValuePredictions]:
    """Values, credit, and the critic's updates, as in a step of a run."""
    seen = critic.predict(groups)
    credits = compute_advantages(GAE(), groups, seen.values)
    samples, _ = make_samples(groups, credits, critic._stage.layout)
    return critic.learn(seen, samples, np.random.default_rng(0), step), seen


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_value_loss_moves(groups: list[ScoredGroup], kind: str) -> None:
    made = policy()
    critic = critic_of(made, KINDS[kind])
    of_policy, of_head = parameters(made.model), parameters(critic.model.head)
    own = {name: p.detach().clone() for name, p in critic.model.named_parameters() if not name.startswith("head")}
    step_of(critic, groups)
    assert not torch.equal(parameters(critic.model.head), of_head)
    assert torch.equal(parameters(made.model), of_policy) == (kind != "policy-backbone")
    moved = {name for name, p in critic.model.named_parameters() if name in own and not torch.equal(p, own[name])}
    if kind == "own":
        # A row of the embedding moves only if its token was read.
        assert moved == set(own)
    elif kind == "own-lora":
        assert moved and all(".lora_" in name for name in moved)
    else:
        assert not moved


@pytest.mark.parametrize(
    ("kind", "budget"), [("own", 100_000), ("own", 300), ("policy-head", 300), ("policy-backbone", 300)]
)
def test_the_gradient_is_that_of_the_definition(groups: list[ScoredGroup], kind: str, budget: int) -> None:
    # Σ ½ (V − G)² / N over sampled tokens and over places after generations whose next token is known, without packing.
    critic = critic_of(policy(), KINDS[kind], max_tokens_per_microbatch=budget)
    plain = copy.deepcopy(critic)
    credits = compute_advantages(GAE(), groups, plain.predict(groups).values)
    errors = []
    for made, credit in zip(groups, credits, strict=True):
        assert credit.returns_GNT is not None
        for attempt, returns_NT in zip(made.trajectories, credit.returns_GNT, strict=True):
            for i, sampled in enumerate(attempt.generations):
                for j, wanted in enumerate(returns_NT[i]):
                    ids = sampled.prompt.token_ids + sampled.token_ids[:j]
                    errors.append(by_definition(plain, ids) - wanted)
                if i + 1 < len(attempt.generations):
                    errors.append(by_definition(plain, sampled.full_ids) - returns_NT[i + 1][0])
    (torch.stack(errors).square().mean() / 2).backward()  # type: ignore[no-untyped-call]
    logged, _ = step_of(critic, groups)
    found, expected = ([*c.model.head.parameters(), *c.model.trained_backbone()] for c in (critic, plain))
    assert len(found) == 2 if kind == "policy-head" else len(found) > 10
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-3)
    assert logged["critic/loss"] == pytest.approx(float(torch.stack(errors).detach().square().mean() / 2), rel=1e-4)
    assert logged["critic/clipped_share"] == 0.0 and logged["critic/n_updates"] == 1.0


def test_a_trained_critic_explains_the_returns(groups: list[ScoredGroup]) -> None:
    critic = critic_of(policy(), Critic(bootstrap=False), awake=False, epochs=4)
    logged = [step_of(critic, groups)[0] for _ in range(12)]
    assert logged[0]["critic/explained_variance"] == 0.0 and logged[0]["critic/value_mean"] == 0.0
    assert logged[-1]["critic/explained_variance"] > 0.8
    assert logged[-1]["critic/value_mean"] == pytest.approx(logged[-1]["critic/return_mean"], abs=0.15)
    assert logged[-1]["critic/loss"] < 0.2 * logged[0]["critic/loss"]
    assert logged[-1]["critic/n_updates"] == 48.0 and logged[-1]["critic/n_skipped"] == 0.0


def test_values_that_moved_as_far_as_they_may_stop_there(groups: list[ScoredGroup]) -> None:
    def moved(clip: float | None) -> tuple[float, float]:
        critic = critic_of(policy(), Critic(clip=clip), awake=False, epochs=30)
        logged, before = step_of(critic, groups)
        after = critic.predict(groups)
        pairs = zip(before.rows, after.rows, strict=True)
        far = [np.abs(a.values - b.values).max() for a, b in pairs if a.values is not None and b.values is not None]
        return max(far), logged["critic/clipped_share"]

    (bounded, share), (free, none) = moved(0.05), moved(None)
    assert share > 0.3 and none == 0.0
    assert bounded < 0.5 * free


def test_the_head_may_have_a_rate_of_its_own(groups: list[ScoredGroup]) -> None:
    # Without momentum of earlier steps, Adam's first step is the learning rate, whatever the gradient.
    settings = Critic(head_lr=0.5, optimizer=AdamW(lr=1e-3))
    critic = settings.start(PolicyGradient(advantage=GAE(), critic=settings), policy(), None, 0)
    begin = copy.deepcopy(critic.model)
    logged, _ = step_of(critic, groups)
    head = (critic.model.head.weight - begin.head.weight).abs()
    assert head.max().item() == pytest.approx(0.5, rel=1e-3) and logged["critic/lr"] == 1e-3
    # The head was 0: no gradient reached the backbone. In the next step one does.
    own = parameters(critic.model.backbone)
    step_of(critic, groups)
    assert (parameters(critic.model.backbone) - own).abs().max().item() < 2e-3


def test_while_it_warms_up_a_shared_backbone_is_held(groups: list[ScoredGroup]) -> None:
    made = policy()
    critic = critic_of(made, replace(KINDS["policy-backbone"], warmup_steps=2))
    begin = parameters(made.model)
    for step in range(2):
        assert critic.is_warming(step)
        step_of(critic, groups, step)
        assert torch.equal(parameters(made.model), begin)
    assert not critic.is_warming(2)
    step_of(critic, groups, 2)
    assert not torch.equal(parameters(made.model), begin)


def test_dropout_of_a_policy_that_is_not_trained_is_off(groups: list[ScoredGroup]) -> None:
    made = policy(lora=Lora(rank=2, dropout=0.5))
    for p in made.model.parameters():
        if p.requires_grad:
            p.data.normal_(generator=torch.Generator().manual_seed(0))
    critic = critic_of(made, Critic(backbone="policy"))
    critic.model.train()
    assert not made.model.get_base_model().model.training
    rows, _ = value_rows(groups, "trajectory")
    assert values_at(critic, rows) == values_at(critic, rows)
    other = critic_of(made, KINDS["policy-backbone"])
    other.model.train()
    assert values_at(other, rows) != values_at(other, rows), "this test can fail"


def test_no_returns_are_an_error_and_no_tokens_are_none(groups: list[ScoredGroup]) -> None:
    critic = critic_of(policy())
    seen = critic.predict(groups)
    credits = [replace(c, returns_GNT=None) for c in compute_advantages(GAE(), groups, seen.values)]
    samples, _ = make_samples(groups, credits)
    with pytest.raises(TrainingError, match="GAE gave credit without returns"):
        critic.learn(seen, samples, np.random.default_rng(0), 0)
    nothing = group(trajectory(generation([0, 1], [])))
    begin = parameters(critic.model)
    logged, seen = step_of(critic, [nothing])
    assert seen.rows == [] and torch.equal(parameters(critic.model), begin) and "critic/loss" not in logged


def test_values_and_returns_stay_with_their_tokens(groups: list[ScoredGroup]) -> None:
    critic = critic_of(policy())
    credits = compute_advantages(GAE(), groups, critic.predict(groups).values)
    samples, _ = make_samples(groups, credits)
    given = [list(row) for c in credits for rows in c.returns_GNT or () for row in rows if row]
    flat = [x for s in samples if s.returns is not None for x in s.returns[s.mask].tolist()]
    assert flat == pytest.approx([x for row in given for x in row])
    some = samples[0].mask & (np.arange(len(samples[0])) % 2 == 0)
    kept = samples[0].masked(some)
    assert kept.returns is not None and samples[0].returns is not None
    assert kept.returns[~some].tolist() == [0.0] * int((~some).sum())
    assert kept.returns[some].tolist() == samples[0].returns[some].tolist()
    [[batch]] = pack_minibatches(samples, 1, Reduction(), 100_000)
    assert batch.returns is not None and batch.values is None and batch.returns.tolist() == flat


def test_demonstrations_say_nothing_of_what_the_policy_may_expect(groups: list[ScoredGroup]) -> None:
    critic = critic_of(policy())
    seen = critic.predict(groups)
    samples, _ = make_samples(groups, compute_advantages(GAE(), groups, seen.values))
    shown = samples[0].sequence
    marked = [replace(s, off_policy=s.mask) if s.sequence == shown else s for s in samples]
    rows, fewer = (_with_returns(seen, given, bootstrap=True) for given in (samples, marked))
    assert shown in {r.sequence for r in rows}
    kept = [r for r in rows if r.sequence != shown]
    assert [r.sequence for r in fewer] == [r.sequence for r in kept]
    assert all((a.mask == b.mask).all() and (a.returns == b.returns).all() for a, b in zip(fewer, kept, strict=True))
    logged = critic.learn(seen, marked, np.random.default_rng(0), 0)
    means = np.concatenate([s.returns[s.mask] for s in marked if s.returns is not None and s.sequence != shown])
    assert logged["critic/return_mean"] == pytest.approx(float(means.mean()), rel=1e-4)


def test_without_bootstrap_a_limit_is_an_end(groups: list[ScoredGroup]) -> None:
    critic = critic_of(policy(), Critic(bootstrap=False))
    seen = critic.predict(groups)
    assert {cut for v in seen.values for cut in v.bootstrap_values_G} == {0.0}
    rows = learnt_rows(critic, groups, compute_advantages(GAE(), groups, seen.values))
    assert sum(r.n_policy_tokens for r in rows) == sum(t.n_tokens for g in groups for t in g.trajectories)


# --- where it comes from ---------------------------------------------------------------------------------------------


def test_an_own_trunk_begins_as_the_policy_of_the_stages_begin(tmp_path: Path) -> None:
    made = policy()
    begin = {name: p.detach().clone() for name, p in backbone_of(made.model).named_parameters()}
    made.save(tmp_path / "policy")
    for p in made.model.parameters():
        p.data.add_(1.0)
    later = Critic().value_model(made, tmp_path, 0)
    assert all(torch.equal(p, begin[name]) for name, p in later.backbone.named_parameters())
    assert all(p.requires_grad for p in later.parameters())
    now = Critic().value_model(made, None, 0)
    assert not torch.equal(next(now.backbone.parameters()), next(iter(begin.values())))


def test_under_adapters_an_own_trunk_begins_as_the_model_below(groups: list[ScoredGroup]) -> None:
    made, plain = policy(lora=Lora(rank=2)), policy()
    for p in made.model.parameters():
        if p.requires_grad:
            p.data.normal_()
    before = parameters(made.model)
    critic = critic_of(made)
    expected = dict(backbone_of(plain.model).named_parameters())
    found = dict(critic.model.backbone.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(p, expected[name]) and p.requires_grad for name, p in found.items())
    step_of(critic, groups)
    assert torch.equal(parameters(made.model), before)


def test_another_model_may_be_the_trunk_if_it_reads_the_same_tokens(tmp_path: Path) -> None:
    made, wider = policy(), policy(seed=3, hidden_size=24)
    wider.save(tmp_path / "wider")
    model = Critic(path=str(tmp_path / "wider")).value_model(made, None, 0)
    assert model.head.in_features == 24
    assert torch.equal(next(model.backbone.parameters()), next(backbone_of(wider.model).parameters()))
    other = policy()
    other.tokenizer.add_tokens(["strange"])
    with pytest.raises(ModelError, match="would misread") as error:
        Critic(path=str(tmp_path / "wider")).value_model(other, None, 0)
    assert "'strange'" in error.value.got and error.value.where.startswith("critic.path")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"backbone": "policy", "path": "x"}, "path and lora have no effect"),
        ({"backbone": "policy", "lora": Lora()}, "path and lora have no effect"),
        ({"gradient": "head", "lora": Lora()}, "lora has no effect"),
        ({"backbone": "policy", "head_lr": 1.0}, "head_lr has no effect"),
    ],
)
def test_keys_without_effect_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Critic(**keys)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_happened(
    groups: list[ScoredGroup], kind: str, tmp_path: Path
) -> None:
    made = policy()
    made.save(tmp_path / "policy")
    critic = critic_of(made, KINDS[kind], awake=False)
    for step in range(2):
        step_of(critic, groups, step)
    folder = store.save(tmp_path, State(0, "policy_gradient", 2, False, 0), made, None, {"critic": critic})
    saved = torch.load(folder / "trainer.pt", weights_only=True)["kept"]["critic"]
    of_trunk = [name for name in saved["model"] if not name.startswith("head")]
    assert bool(of_trunk) == (kind in ("own", "own-lora")), "the policy's weights are saved once"
    moved = copy.deepcopy(made)
    again = CriticTrainer(critic.settings, critic.settings.value_model(moved, tmp_path, 1), critic._stage)
    store.load_trainer(folder, None, {"critic": again})
    for step in (2, 3):
        first, second = (step_of(c, groups, step)[0] for c in (critic, again))
        names = [name for name in first if not name.startswith("time/")]
        assert [first[name] for name in names] == [second[name] for name in names]
    assert torch.equal(parameters(critic.model), parameters(again.model))
    assert torch.equal(parameters(made.model), parameters(moved.model))


def test_the_state_of_another_critic_is_refused(tmp_path: Path) -> None:
    made = policy()
    state = State(0, "policy_gradient", 1, False, 0)
    folder = store.save(tmp_path, state, made, None, {"critic": critic_of(made)})
    with pytest.raises(CheckpointError, match="another model"):
        store.load_trainer(folder, None, {"critic": critic_of(policy(hidden_size=24))})
    with pytest.raises(CheckpointError, match="another model"):
        store.load_trainer(folder, None, {"critic": critic_of(made, KINDS["policy-head"])})


def test_the_space_that_a_checkpoint_needs_counts_the_critic(tmp_path: Path) -> None:
    made = policy()
    (tmp_path / "file").touch()
    sizes = []
    for kept in ({}, {"critic": critic_of(made)}):
        with pytest.raises(CheckpointError) as error:
            store.save(tmp_path / "file", State(0, "x", 1, False, 0), made, None, kept)
        sizes.append(float(error.value.expected.split()[0]))
    n = sum(p.numel() for p in backbone_of(made.model).parameters())
    assert sizes[1] - sizes[0] == pytest.approx(4 * n / 1e6, abs=0.06)


def test_gradient_of_the_policy_is_left_alone(groups: list[ScoredGroup]) -> None:
    made = policy()
    made.model.lm_head.weight.grad = torch.ones_like(made.model.lm_head.weight)
    step_of(critic_of(made), groups)
    assert torch.equal(gradient(made.model), torch.ones_like(gradient(made.model)))
