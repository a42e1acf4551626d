"""Memory known beforehand: exact where it can be counted, near what is measured where it cannot, and a run that cannot
fit is refused before anything is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from rewards.combinators.combine import Combine
from rewards.combinators.combine import Part as Shared
from rewards.judges.judge import Grade
from rewards.models.reward_model import RewardModelScore
from rlhf.asynchrony.pipeline import Pipeline
from rlhf.asynchrony.settings import Asynchrony
from rlhf.batching.pack import pack
from rlhf.batching.samples import Sample
from rlhf.cli import app
from rlhf.commands.output import Stopped
from rlhf.commands.trial import shortened, try_out
from rlhf.errors import RecipeError, RlhfError, TrainingError
from rlhf.estimate import memory_preflight
from rlhf.estimate.dry_run import Pass, peak_bytes
from rlhf.estimate.figures import Estimate, Part, total
from rlhf.estimate.memory import _pass_of, estimates
from rlhf.estimate.memory_preflight import check, free_memory, parts_on_gpu, refuse_too_large
from rlhf.estimate.meta import Parameter, config_of, shaped
from rlhf.estimate.trainer_memory import buffers, trainer_bytes
from rlhf.recipe import Recipe, load
from rlhf.rollout.scoring import WeightedReward
from rlhf.training.backends.fused_head import held_bytes
from rlhf.training.backends.settings import DeepSpeed, Fsdp, Torch
from rlhf.training.contrib.judge_refresh_settings import JudgeRefresh
from rlhf.training.contrib.league import League
from rlhf.training.contrib.opponent_settings import Opponents
from rlhf.training.contrib.reward_refresh import RewardRefreshHook
from rlhf.training.contrib.reward_refresh_settings import RewardRefresh
from rlhf.training.policy.model import Policy, Pretrained
from rlhf.training.reward_model_training import adapted, save, scoring_model
from tests import recipe_parts
from tests.commands import program

SEVEN_B = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
SEVEN_B |= {"num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768}
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 4000, "max_position_embeddings": 512, "head_dim": 64}
TINY = {**SMALL, "hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 16000}


def config_folder(folder: Path, shape: dict[str, Any], family: str = "qwen3") -> Path:
    """A model's folder with its configuration and nothing else."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, tie_word_embeddings=family != "qwen2", **shape)
    config.architectures = None
    config.save_pretrained(folder)
    return folder


def recipe(tmp_path: Path, shape: dict[str, Any], *overrides: str, family: str = "qwen3") -> Recipe:
    """One policy-gradient stage for a model of which there is a configuration alone."""
    model = config_folder(tmp_path / "model", shape, family)
    path = recipe_parts.write(tmp_path)
    stages = "stages=[{kind: policy_gradient, steps: 3, max_tokens_per_microbatch: 1024}]"
    return load(str(path), [f"policy={{kind: pretrained, path: {model}}}", stages, *overrides])


def parts(estimate: Estimate) -> dict[str, int]:
    return {part.name: part.n_bytes for part in estimate.parts}


# --- what can be counted -------------------------------------------------------------------------------------------

#: Of a parameter: weights, gradients, weights in float32, moments. docs/training.md has the table for bfloat16.
TABLE = [
    # plain torch: all of an update is float32
    (Torch(), 4, 1, (4, 4, 0, 8)),
    (Torch(), 2, 1, (2, 4, 4, 8)),
    (Torch(moments="bfloat16"), 2, 1, (2, 4, 4, 4)),
    (DeepSpeed(zero_stage=0), 4, 8, (4, 4, 0, 8)),
    # gradients of bfloat16 are added up in float32; 4 + 8 bytes of masters and moments, shared by 8
    (DeepSpeed(zero_stage=1), 2, 8, (2, 4, 0.5, 1)),
    (DeepSpeed(zero_stage=2), 2, 8, (2, 0.5, 0.5, 1)),
    (DeepSpeed(zero_stage=3), 2, 8, (0.25, 0.5, 0.5, 1)),
    (DeepSpeed(zero_stage=2), 2, 1, (2, 4, 4, 8)),
    (DeepSpeed(zero_stage=1, precision="float16"), 2, 8, (2, 2, 0.5, 1)),
    # the pieces of the weights are float32, and the masters
    (Fsdp(), 4, 8, (0.5, 0.5, 0, 1)),
    (Fsdp(), 2, 8, (0.5, 0.5, 0, 1)),
]


@pytest.mark.parametrize(("kind", "size", "n", "expected"), TABLE)
def test_bytes_of_a_parameter(kind: Any, size: int, n: int, expected: tuple[float, ...]) -> None:
    million = 1_000_000
    found = trainer_bytes([Parameter(million, size, is_trained=True)], kind, n)
    names = ("weights", "gradients", "masters", "moments")
    assert tuple(found[name] / million for name in names) == expected


def test_frozen_parameters_have_weights_only_and_small_ones_stay_whole() -> None:
    base, adapter = Parameter(800_000, 2, is_trained=False), Parameter(8_000, 2, is_trained=True)
    found = trainer_bytes([base, adapter], DeepSpeed(zero_stage=3), 8)
    # 2 · 800,000 / 8; the adapter, of fewer than 100,000 numbers, is whole; 4 and 12 bytes of its 8,000 numbers over 8.
    assert (found["weights"], found["gradients"]) == (200_000 + 16_000, 4_000)
    assert (found["masters"], found["moments"]) == (4_000, 8_000)


def test_fsdp_gathers_the_ends_and_two_layers() -> None:
    class Config:
        vocab_size, hidden_size, num_hidden_layers = 1000, 8, 4

        def get_text_config(self) -> Config:
            return self

    ends, layers = Parameter(8000, 2, is_trained=True), [Parameter(500, 2, is_trained=True)] * 4
    # 8,000 numbers of the embedding and two layers of 500 in 2 bytes; gradients of the embedding and a layer in 2
    # bytes, and of the embedding in 4 while they are summed.
    assert buffers([ends, *layers], Fsdp(), Config()) == 2 * 9000 + 2 * 8500 + 4 * 8000
    assert buffers([ends, *layers], Fsdp(reshard_after_forward=False), Config()) == 2 * 10_000 + 2 * 8500 + 4 * 8000
    frozen = [replace(p, is_trained=False) for p in (ends, *layers)]
    assert buffers(frozen, Fsdp(), Config()) == 2 * 9000
    assert buffers([ends, *layers], Torch(), Config()) == 0


def test_a_7b_model_on_eight_gpus(tmp_path: Path) -> None:
    # An embedding and an output layer of 152064 · 3584 numbers; in each of 28 layers queries and outputs of attention,
    # 3584² each, keys and values 512 · 3584 with biases of 3584 + 512 + 512, three of 18944 · 3584, and two norms of
    # 3584; one norm at the end: 7,615,616,512.
    n = 2 * 152064 * 3584 + 28 * (2 * 3584**2 + 2 * 512 * 3584 + 4608 + 3 * 18944 * 3584 + 2 * 3584) + 3584
    assert n == 7_615_616_512
    keys = ["policy.dtype=bfloat16", "stages.0.trainer={kind: deepspeed, zero_stage: 3, gradient_checkpointing: true}"]
    made = recipe(tmp_path, SEVEN_B, *keys, family="qwen2")
    [estimate] = estimates(made, 8)
    found = parts(estimate)
    assert found["weights"] == pytest.approx(2 * n / 8, rel=1e-3)  # norms and biases stay whole
    assert (found["gradients"], found["masters"], found["moments"]) == (4 * n // 8, 4 * n // 8, 8 * n // 8)
    assert found["engine"] == 2 * n  # the embedded engine samples from a copy
    # Keys and values of 28 layers, 4 heads of 128, 2 bytes each; 128 episodes by 8, of at most 3 turns of 8 tokens.
    assert estimate.values()["kv_cache"] == 2 * 28 * 4 * 128 * 2 * (128 // 8) * 3 * 8
    offloaded = "stages.0.trainer={kind: deepspeed, zero_stage: 3, offload_optimizer: true, offload_parameters: true}"
    [estimate] = estimates(load_again(made, tmp_path, offloaded), 8)
    on_host = {part.name for part in estimate.parts if part.on_host}
    assert on_host >= {"weights", "gradients", "masters", "moments"}


def load_again(made: Recipe, tmp_path: Path, *overrides: str) -> Recipe:
    from rlhf.recipe import dump

    (tmp_path / "again.yaml").write_text(dump(made))
    return load(str(tmp_path / "again.yaml"), list(overrides))


def test_models_beside_the_policy_are_counted(tmp_path: Path) -> None:
    made = recipe(tmp_path, SMALL)
    [plain] = estimates(made)
    weights = parts(plain)["weights"]
    teacher = config_folder(tmp_path / "teacher", TINY)
    [with_both] = estimates(
        load_again(made, tmp_path, f"stages.0.loss={{kind: kdrl, teacher: {teacher}, kl: k3, kl_coef: 0.1}}")
    )
    found = parts(with_both)
    assert found["reference"] == weights  # a whole copy in the policy's format
    (tmp_path / "other").mkdir()
    [tiny] = estimates(recipe(tmp_path / "other", TINY))
    assert found["teacher"] == parts(tiny)["weights"]
    [adapted] = estimates(load_again(made, tmp_path, "stages.0.loss={kl: k3, kl_coef: 0.1}", "policy.lora={rank: 4}"))
    assert parts(adapted)["reference"] == 0  # the base, which is there
    assert parts(adapted)["weights"] == weights + parts(adapted)["gradients"]  # and the adapter's own weights


def test_models_that_score_and_copies_that_judge_or_are_written_are_counted(tmp_path: Path) -> None:
    made = recipe(tmp_path, SMALL)
    [plain] = estimates(made)
    weights, moments = parts(plain)["weights"], parts(plain)["moments"]
    names = ("rewards", "reward_copy", "judges", "background")
    assert [parts(plain)[name] for name in names] == [0, 0, 0, 0]
    [stage] = made.stages
    judge = config_folder(tmp_path / "judge", TINY)
    (tmp_path / "other").mkdir()
    tiny = parts(estimates(recipe(tmp_path / "other", TINY))[0])["weights"]
    grade, score = Grade(path=str(judge)), RewardModelScore(path="nobody/has-this")
    within = Combine(parts={"a": Shared(reward=grade), "b": Shared(reward=score)})
    rewards = {name: WeightedReward(name, 1.0, reward) for name, reward in (("again", grade), ("both", within))}

    def beside_of(**keys: Any) -> list[int]:
        [found] = estimates(replace(made, rewards=rewards, stages=(replace(stage, **keys),)))
        return [parts(found)[name] for name in names]

    # A model is held once, however many ask it; one that cannot be read is as large as the policy.
    assert beside_of() == [tiny + weights, 0, 0, 0]
    assert beside_of(reward_refresh=RewardRefresh()) == [tiny + weights, 4 * weights, 0, 0]  # 4 + 4 + 8 bytes to 4
    # Who judges and who is next, whole; what both are trained in is kept besides.
    assert beside_of(judge_refresh=JudgeRefresh()) == [tiny + weights, 0, 2 * weights, 2 * weights]
    assert beside_of(checkpoint_in_background=True)[3] == weights + moments
    deepspeed = beside_of(checkpoint_in_background=True, trainer=DeepSpeed(zero_stage=2))
    assert deepspeed[3] == weights + 3 * weights  # weights and two moments in float32, and the weights
    undivided = beside_of(checkpoint_in_background=True, trainer=DeepSpeed(zero_stage=0))
    assert undivided[3] == weights + moments  # as plain torch has them
    [found] = estimates(replace(made, stages=(replace(stage, checkpoint_in_background=True),)))
    assert {part.name for part in found.parts if part.on_host} >= {"background"}
    assert all(found.change(part) for part in found.held if part.name in names)


def test_episodes_of_steps_that_are_played_ahead_are_alive_together(tmp_path: Path) -> None:
    def caches(*overrides: str) -> float:
        stages = "stages=[{kind: policy_gradient, steps: 20, tasks_per_step: 2, group_size: 2}]"
        [found] = estimates(recipe(tmp_path, SMALL, stages, *overrides))
        values = found.values()
        return 64 * values["kv_cache"] / (values["max_kv_cache"] / 512 * 3 * 8)  # 64 sessions, of 24 tokens or full

    assert caches() == 4
    rules = Asynchrony(staleness=7).rules(2, 20)
    pipeline = Pipeline(rules)
    while pipeline.begin() is not None:
        pass
    assert caches("asynchrony={staleness: 7}") == 2 * len(pipeline.running) == 32
    assert caches("asynchrony={staleness: 7, max_steps_ahead: 2}") == 12
    assert caches("asynchrony={staleness: 7}", "stages.0.steps=3") == 12, "there are no more steps"
    assert caches("asynchrony={staleness: 19}") == 64, "limits.max_concurrent is the bound"


# --- what is counted in real tensors ---------------------------------------------------------------------------------

TRAINED = ("weights", "gradients", "masters", "moments")
SCRATCH = "policy={kind: from_scratch, hidden_size: 64, n_layers: 2, n_heads: 2, vocab_size: 300, max_context: 256, "


def from_scratch(tmp_path: Path, keys: str, *overrides: str) -> tuple[Recipe, Policy]:
    """A recipe, and its policy as it is built, whose tokenizer finds as many tokens as it may have."""
    made = load(str(recipe_parts.write(tmp_path)), [f"{SCRATCH}{keys}}}", *overrides])
    policy = made.policy.build(0, ["walk north and take the silver key, then open every door of the attic"] * 8)
    assert policy.model.config.vocab_size == 300
    return made, policy


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def trained(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> int:
    """Bytes of parameters after an update: they, their gradients and what the optimiser keeps of them."""
    found = list(parameters)
    for p in found:
        p.grad = torch.zeros(p.shape, dtype=p.grad_dtype or p.dtype) if p.requires_grad else None
    optimizer.step()
    states = [v for p in found for v in optimizer.state.get(p, {}).values() if v.ndim]
    return nbytes([*found, *(p.grad for p in found if p.grad is not None), *states])


@pytest.mark.parametrize("keys", ["dtype: float32", "dtype: bfloat16", "dtype: bfloat16, lora: {rank: 4}"])
def test_a_policys_trainer_holds_what_is_estimated(keys: str, tmp_path: Path) -> None:
    made, policy = from_scratch(tmp_path, keys, "stages=[{kind: policy_gradient, steps: 9}]")
    [stage], [estimate] = made.stages, estimates(made)
    counted = trained(stage.optimizer.build(policy.model.parameters()), policy.model.parameters())
    assert total(part for part in estimate.parts if part.name in TRAINED) == pytest.approx(counted, rel=0.001)


CRITICS = [
    ("{kind: values}", "gae"),
    ("{kind: values, gradient: head}", "gae"),
    ("{kind: values, lora: {rank: 4}}", "gae"),
    ("{kind: archer}", "archer"),
    ("{kind: sweet, privileged_text: ''}", "sweet"),
    ("{kind: sweet, privileged_text: '', lora: {rank: 4}}", "sweet"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("critic", "advantage"), CRITICS)
def test_a_critic_holds_what_is_estimated(critic: str, advantage: str, dtype: str, tmp_path: Path) -> None:
    stages = f"stages=[{{kind: policy_gradient, steps: 9, advantage: {{kind: {advantage}}}, critic: {critic}}}]"
    made, policy = from_scratch(tmp_path, f"dtype: {dtype}", stages)
    [stage] = made.stages
    live = stage.critic.start(stage, policy, None, 0)
    parameters = [p for name, p in live.model.named_parameters() if not name.startswith("head")]
    counted = trained(live._stepper.optimizer, parameters)
    if advantage == "archer":  # a slow copy in float32
        counted += 4 * sum(p.numel() for p in parameters)
    elif advantage == "sweet" and stage.critic.lora is None:
        counted += nbytes(live.model._frozen[0].parameters())
    [estimate] = estimates(made)
    assert parts(estimate)["critic"] == pytest.approx(counted, rel=0.01)


def test_a_critic_of_another_model_and_other_adapters_is_estimated_as_such(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    keys = ["stages.0.advantage={kind: gae}", "stages.0.critic={}"]
    [tiny] = estimates(recipe(tmp_path / "other", TINY, *keys))
    path = f"stages.0.critic={{path: {tmp_path}/other/model}}"
    [beside] = estimates(recipe(tmp_path, SMALL, keys[0], path, "policy.lora={rank: 4}"))
    for name in ("critic", "critic_activations", "critic_update"):
        assert beside.values()[name] == tiny.values()[name] > 0
    [adapted] = estimates(recipe(tmp_path, SMALL, keys[0], "stages.0.critic={lora: {rank: 4}}"))
    [plain] = estimates(recipe(tmp_path, SMALL, *keys))
    assert adapted.values()["critic_activations"] != plain.values()["critic_activations"]
    assert parts(adapted)["critic"] < parts(plain)["critic"] / 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reward_model_that_is_refreshed_holds_what_is_estimated(dtype: str, tmp_path: Path) -> None:
    made, policy = from_scratch(tmp_path, f"dtype: {dtype}", "stages=[{kind: policy_gradient, steps: 9}]")
    save(tmp_path / "scores", scoring_model(policy), policy.tokenizer)
    rewards = {"learnt": WeightedReward("learnt", 1.0, RewardModelScore(path=str(tmp_path / "scores")))}
    refresher = RewardRefreshHook.of(RewardRefresh(), rewards, "0")
    assert refresher is not None
    counted = trained(refresher.stepper.optimizer, refresher.model.parameters())
    stages = (replace(made.stages[0], reward_refresh=RewardRefresh()),)
    other = replace(made.policy, dtype="float32")  # a model of a reward is loaded as it was saved
    [estimate] = estimates(replace(made, policy=other, rewards=rewards, stages=stages))
    assert parts(estimate)["reward_copy"] == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("keys", ["dtype: bfloat16", "dtype: bfloat16, lora: {rank: 4}"])
def test_versions_that_are_kept_to_play_against_are_counted_in_host_memory(keys: str, tmp_path: Path) -> None:
    made, policy = from_scratch(tmp_path, keys, "stages=[{kind: policy_gradient, steps: 40}]")

    def versions(**settings: Any) -> tuple[Part, int]:
        opponents = Opponents(by="turn", **settings)
        league, n_steps = League.of(opponents, policy, ()), made.stages[0].steps
        assert league is not None
        for step in range(1, n_steps + 1):
            league.learn((), step)
        [found] = estimates(replace(made, stages=(replace(made.stages[0], opponents=opponents),)))
        [part] = [part for part in found.held if part.name == "opponents"]
        playing = [part for group in found.on_gpu(10**9).passing for part in group if part.name == "opponents"]
        assert playing == [replace(part, on_host=False)], "on a GPU those who play are there, for a while"
        return part, nbytes(t for version in league.versions.values() for t in version.weights.values())

    for settings in ({}, {"keep": 2}, {"every": 20}):
        part, counted = versions(**settings)
        assert part.on_host and part.n_bytes == counted > 0


@pytest.mark.parametrize("own", [None, "{rank: 4}"])
@pytest.mark.parametrize("keys", ["dtype: float32", "dtype: bfloat16", "dtype: bfloat16, lora: {rank: 4}"])
def test_the_stage_of_a_reward_model_holds_what_is_estimated(keys: str, own: str | None, tmp_path: Path) -> None:
    stages = f"stages=[{{kind: reward_model, lora: {own or 'null'}}}]"
    made, policy = from_scratch(tmp_path, keys, stages)
    [stage], [estimate] = made.stages, estimates(made)
    model, _ = adapted(scoring_model(policy), stage.lora)
    optimizer = stage.optimizer.build(model.parameters())
    counted = trained(optimizer, model.parameters()) + nbytes(policy.model.parameters())
    found = {name: parts(estimate)[name] for name in TRAINED}
    assert total(part for part in estimate.parts if part.name in TRAINED) == pytest.approx(counted, rel=0.01)
    assert found["weights"] > 1.9 * nbytes(policy.model.get_input_embeddings().parameters())
    assert estimate.values()["logits"] < 0.01 * estimate.values()["activations"], "it says a number a row"
    assert "stages.0.lora={}" in estimate.change(Part("moments", 1))


def test_a_model_of_single_attempts_reads_half_as_many_rows_as_one_of_pairs(tmp_path: Path) -> None:
    of = {name: f"stages=[{{kind: reward_model, objective: {name}}}]" for name in ("pairwise", "outcome")}
    longer = "limits.max_context=512"
    found = [estimates(recipe(tmp_path, SMALL, keys, longer))[0].values()["activations"] for keys in of.values()]
    assert found[1] == pytest.approx(found[0] / 2, rel=0.02)


# --- what is measured ------------------------------------------------------------------------------------------------

#: Shape, whether activations are computed again, and how many of 1024 tokens are sampled.
CASES = [(SMALL, True, 1024), (TINY, False, 128)]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux says what was highest")
def test_the_estimate_is_within_a_quarter_of_the_measured_peak(tmp_path: Path) -> None:
    jobs, expected = [], []
    for i, (shape, recomputes, n_sampled) in enumerate(CASES):
        folder = tmp_path / str(i)
        folder.mkdir()
        keys = [f"stages.0.trainer.gradient_checkpointing={str(recomputes).lower()}", "limits.max_turns=1"]
        # 128 rows of one generation each: of 8 tokens, or of 1.
        [estimate] = estimates(recipe(folder, shape, *keys, f"limits.max_tokens={n_sampled // 128}"))
        expected.append(sum(n for name, n in parts(estimate).items() if name not in ("kv_cache", "program")))
        model = str(folder / "model")
        jobs.append({"folder": model, "recomputes": recomputes, "n_tokens": 1024, "n_sampled": n_sampled})
    # An allocator that gives back what is freed: this is about tensors.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.measured_update", json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=Path(__file__).parent.parent)
    assert not done.returncode, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    for got, found in zip(expected, measured, strict=True):
        assert got == pytest.approx(found, rel=0.25)


def test_a_critic_keeps_what_the_policy_computes_again(tmp_path: Path) -> None:
    keys = ["stages.0.advantage={kind: gae}", "stages.0.critic={}", "stages.0.trainer.gradient_checkpointing=true"]
    [estimate] = estimates(recipe(tmp_path, SMALL, *keys))
    values = estimate.values()
    assert values["critic_activations"] > 1.5 * (values["activations"] + values["logits"])
    assert "critic_activations" in parts(estimate) and "activations" not in parts(estimate)
    [frozen] = estimates(load_again(recipe(tmp_path, SMALL, *keys), tmp_path, "stages.0.critic={backbone: policy}"))
    assert frozen.values()["critic_activations"] == 0


def test_rows_are_as_long_as_episodes_can_be_and_may_be_longer_than_the_budget(tmp_path: Path) -> None:
    def activations(*overrides: str) -> int:
        [found] = estimates(recipe(tmp_path, {**SMALL, "max_position_embeddings": 32768}, *overrides))
        return int(found.values()["activations"])

    pairs = "stages=[{kind: preference, pairs_per_microbatch: 1, batch_size: 1}]"
    limits = "limits={max_turns: 2, max_tokens: 64}"
    short, long = activations(pairs, limits), activations(pairs, limits, "limits.max_context=1024")
    assert 6 * short < long < 10 * short  # 2 rows of 128 tokens, and of 1,024
    budget = "stages=[{kind: policy_gradient, steps: 3, max_tokens_per_microbatch: 256}]"
    assert activations(budget, limits) < 0.3 * activations(budget, limits, "limits.max_context=1024")
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')  # whose rows no limit bounds
    data = "stages=[{kind: supervised, data: {path: chats.jsonl}, max_tokens_per_microbatch: 256}]"
    assert activations(data, limits) == activations(data, limits, "limits.max_context=1024")


def test_a_micro_batch_is_filled_by_the_rows_of_few_trajectories(tmp_path: Path) -> None:
    def n_tokens(*overrides: str, memory: str = "full") -> int:
        stages = "stages=[{kind: policy_gradient, steps: 3, tasks_per_step: 1, group_size: 2}]"
        agent = f"agent={{kind: chat, memory: {{kind: {memory}}}}}"
        made = recipe(tmp_path, SMALL, stages, agent, "limits.max_turns=8", "limits.max_context=100", *overrides)
        return _pass_of(made, made.stages[0], config_of(made.policy)).n_tokens  # type: ignore[arg-type]

    # Two trajectories of eight turns: one row each, or eight, and packed together as the budget of 16,384 allows.
    nothing = np.zeros(100, np.float32)
    rows = [Sample(np.full(100, i), np.arange(100) > 90, nothing, nothing, i // 8, 0) for i in range(16)]
    assert n_tokens() == 2 * 100
    [members] = pack(rows, 16384)
    assert n_tokens("stages.0.layout=generation") == sum(len(rows[i]) for i in members) == 16 * 100
    assert n_tokens(memory="window") == 16 * 100, "every prompt begins a row"
    assert n_tokens("limits.max_generations_per_turn=2", memory="summary") == 32 * 100, "and a summary may be asked for"
    assert n_tokens("stages.0.layout=generation", "stages.0.max_tokens_per_microbatch=1024") == 1024


def test_keys_of_a_stage_of_pairs_are_named() -> None:
    estimate = Estimate("stages[1]", 1, (), ((),), 0, is_of_pairs=True)
    assert "stages.1.pairs_per_microbatch" in estimate.change(Part("logits", 1))
    assert "stages.1.gradient_checkpointing=true" in estimate.change(Part("activations", 1))
    assert "lower limits.max_context" in estimate.change(Part("kv_cache", 1))


def test_layers_that_are_left_out_are_added() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen3", **{**TINY, "num_hidden_layers": 5})
    asked = Pass(512, 200)

    def model_of(given: Any) -> Any:
        return shaped(given, "float32", None)

    from rlhf.estimate.dry_run import _peak

    assert peak_bytes(config, model_of, asked) == _peak(model_of(config), asked)
    again = replace(asked, recomputes=True)
    assert peak_bytes(config, model_of, again) < peak_bytes(config, model_of, asked) / 2  # type: ignore[operator]
    for share in (0.4, 0.6):  # two and three of five layers
        partly = replace(asked, recomputes=share)
        assert peak_bytes(config, model_of, partly) == pytest.approx(_peak(model_of(config), partly), rel=0.05)


def test_shared_rows_of_64k_tokens_take_a_share_of_the_activations(tmp_path: Path) -> None:
    shape = {**SEVEN_B, "max_position_embeddings": 65536}
    keys = ["stages.0.max_tokens_per_microbatch=65536", "limits.max_turns=600", "limits.max_tokens=64"]
    alone, shared = (
        estimates(
            recipe(
                tmp_path, shape, *keys, f"stages.0.trainer={{kind: deepspeed, zero_stage: 3, sequence_parallel: {n}}}"
            ),
            4,
        )[0].values()
        for n in (1, 4)
    )
    there, whole = (values["activations"] + values["logits"] for values in (shared, alone))
    assert there == pytest.approx(whole / 4, rel=0.05)
    assert shared["moments"] == alone["moments"]


def test_heads_that_rows_cannot_be_shared_by_are_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    made = recipe(tmp_path, SEVEN_B, "stages.0.trainer={kind: deepspeed, sequence_parallel: 8}")
    with pytest.raises(RecipeError, match="28 attention heads") as raised:
        estimates(made, 8)
    assert raised.value.expected == "one of 1, 2, 4, 28"


def test_a_model_that_cannot_be_gone_through_says_so(tmp_path: Path) -> None:
    shape = {**SMALL, "n_layer": 2, "n_head": 4}
    [estimate] = estimates(recipe(tmp_path, shape, family="bloom"))  # does not let its attention be replaced
    assert not estimate.is_whole and estimate.values()["activations"] == 0
    policy = f"policy={{kind: pretrained, path: {tmp_path}/model}}"
    shown = CliRunner().invoke(app, ["show", str(recipe_parts.write(tmp_path)), policy])
    assert shown.exit_code == 0, shown.output
    assert "come on top" in " ".join(shown.output.split())


# --- what cannot fit -------------------------------------------------------------------------------------------------

#: 12 bytes and more for each of some 340 billion numbers.
HUGE = {**SEVEN_B, "hidden_size": 32768, "intermediate_size": 131072, "num_hidden_layers": 20}


@pytest.mark.parametrize("more", [[], ["--nproc", "2"]])
def test_a_run_that_cannot_fit_is_refused_before_anything_is_loaded(tmp_path: Path, more: list[str]) -> None:
    recipe(tmp_path, HUGE, family="qwen2")
    kind = "stages=[{kind: policy_gradient, trainer: {kind: deepspeed}}]"
    policy = f"policy={{kind: pretrained, path: {tmp_path}/model}}"
    command = ["train", str(recipe_parts.write(tmp_path)), policy, kind, "--out", str(tmp_path / "run"), "--json"]
    refused = CliRunner().invoke(app, [*command, *more])
    assert refused.exit_code == 2
    error = json.loads(refused.stdout.splitlines()[-1])["error"]
    assert error["what"] == "this run needs more memory than is free" and error["where"] == "stages[0]"
    # 8 bytes of moments to 4 of weights; shared by two, as many of each.
    key = "policy.dtype=bfloat16" if more else "offload_optimizer"
    assert f"most is {'weights' if more else 'moments'}" in error["do"] and key in error["do"]
    assert not (tmp_path / "run").exists()
    if not more:
        anyway = CliRunner().invoke(app, [*command, "--no-memory-check"])
        assert "this run needs" not in anyway.stderr and anyway.exit_code == 2  # the folder has no weights


def test_what_is_free_is_compared_with_all_processes_of_a_machine(tmp_path: Path) -> None:
    made = recipe(tmp_path, SMALL, "stages.0.trainer={kind: deepspeed}")
    refuse_too_large(made)
    with pytest.raises(RecipeError, match="needs more memory"):
        refuse_too_large(made, n_processes=2, n_here=100_000)
    assert free_memory() > 0


@pytest.mark.parametrize(("limit", "free"), [("8000", 7300), ("700", 0), ("max", None)])
def test_cached_files_of_a_container_count_as_free(
    limit: str, free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("7900\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 7200\nactive_file 200\n")
    monkeypatch.setattr(memory_preflight, "_CGROUP", tmp_path)
    assert free_memory() == free if free is not None else free_memory() > 8000


def test_the_largest_part_is_named_with_its_key() -> None:
    estimate = Estimate("stages[1]", 1, (), ((),), 0)
    found = (Part("weights", 3_000_000_000), Part("activations", 8_000_000_000))
    check(estimate, found, 11_000_000_000, "the GPU")
    with pytest.raises(RecipeError) as raised:
        check(estimate, found, 10_999_999_999, "the GPU")
    assert raised.value.got == "11.00 GB at the highest: activations 8.00 GB, weights 3.00 GB"
    assert "most is activations: lower stages.1.max_tokens_per_microbatch" in raised.value.hint
    assert "the GPU" in raised.value.expected


# --- what a trial says -----------------------------------------------------------------------------------------------


def test_a_trial_measures_time_and_memory(tmp_path: Path) -> None:
    path = recipe_parts.write(tmp_path)
    shown = CliRunner().invoke(
        app, ["show", str(path), "stages.1.evaluate_every=1", "stages.1.patience=1", "--trial", "2", "--json"]
    )
    assert shown.exit_code == 0, shown.output
    supervised, improved = json.loads(shown.stdout.splitlines()[-1])["trial"]["stages"]
    assert len(improved["step_s"]) == 2 and improved["stage_s"] == pytest.approx(3 * improved["step_s"][-1])
    for stage in (supervised, improved):
        # Nearly all of it is interpreter and libraries, with a model this small.
        assert stage["peak_bytes"] == pytest.approx(stage["estimated_bytes"], rel=0.6)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("rlhf-trial")] == []


def test_a_trial_of_a_critic_that_is_trained_in_its_warm_up_alone_is_a_recipe(tmp_path: Path) -> None:
    path = str(recipe_parts.write(tmp_path))
    critic = "stages.1.critic={kind: contributions, warmup_steps: 1}"  # frozen unless told otherwise
    own = ["stages.1.steps=4", "stages.1.advantage={kind: progress, contributions: critic}", critic]
    found = load(path, [*own, *shortened(load(path, own), 1)]).stages[1].critic
    assert (found.warmup_steps, found.frozen) == (0, False)


@pytest.mark.parametrize(("does", "kind"), [("kill -9 $$", TrainingError), ("exit 130", Stopped)])
def test_a_trial_that_is_killed_or_stopped_leaves_nothing_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, kind: type[RlhfError]
) -> None:
    recipe = load(str(recipe_parts.write(tmp_path)))
    monkeypatch.setattr(sys, "executable", str(program(tmp_path, does)))
    with pytest.raises(kind) as raised:
        try_out(recipe, 1)
    assert raised.value.where == "--trial" and "resume" not in str(raised.value)
    assert ("memory" in raised.value.hint) == (kind is TrainingError)


@pytest.mark.extended
def test_a_trial_that_fails_says_so(tmp_path: Path) -> None:
    config_folder(tmp_path / "model", SMALL)
    path, policy = recipe_parts.write(tmp_path), f"policy={{kind: pretrained, path: {tmp_path}/model}}"
    done = CliRunner().invoke(app, ["show", str(path), policy, "--trial", "1"])
    assert done.exit_code == 2 and "did not finish" in done.stderr
    assert config_of(Pretrained(path=str(tmp_path / "model"))).num_hidden_layers == 5


# --- a GPU -----------------------------------------------------------------------------------------------------------


def test_an_engine_that_sleeps_takes_no_memory_from_an_update(tmp_path: Path) -> None:
    held = (Part("weights", 10), Part("engine", 5), Part("kv_cache", 5), Part("program", 99, on_host=True))
    estimate = Estimate("stages[0]", 1, held, ((Part("activations", 30),),), 0)

    def needed(*overrides: str) -> int:
        engine = ["engine={kind: vllm, gpu_memory_utilization: 0.7}", *overrides]
        return total(parts_on_gpu(recipe(tmp_path, SMALL, *engine), estimate, 100))

    assert needed() == 10 + 30 + 70
    assert needed("engine.sleep=true") == 10 + 70, "rollouts take most"
    assert needed("engine.sleep=true", "engine.gpu_memory_utilization=0.1") == 10 + 30, "an update takes most"
    assert needed("engine.kv_cache_gb=1") == 10 + 5 + 5 + 30, "the share is not looked at"


def test_each_part_of_an_engine_keeps_the_keys_and_values_of_its_heads(tmp_path: Path) -> None:
    def cached(tensor_parallel: int) -> float:
        engine = f"engine={{kind: vllm, tensor_parallel: {tensor_parallel}}}"
        [estimate] = estimates(recipe(tmp_path, SEVEN_B, engine, family="qwen2"))
        return estimate.values()["kv_cache"]

    assert (cached(2), cached(4)) == (cached(1) / 2, cached(1) / 4)
    assert cached(7) == cached(4), "4 heads of keys and values: from 4 parts on each has one"


def test_what_comes_and_goes_on_the_host_hides_nothing_that_does_on_the_gpu(tmp_path: Path) -> None:
    held = (Part("weights", 10), Part("engine", 0), Part("program", 99, on_host=True))
    passing = ((Part("activations", 30), Part("logits", 1)), (Part("loading", 50, on_host=True),))
    estimate = Estimate("stages[0]", 1, held, passing, 0)
    assert total(estimate.parts) == 10 + 99 + 50, "without a GPU all of it is in one place"
    assert total(estimate.parts_of(host=False)) == 10 + 31 and total(estimate.parts_of(host=True)) == 99 + 50
    assert total(parts_on_gpu(recipe(tmp_path, SMALL), estimate, 10**9)) == 10 + 31
    assert estimate.values()["on_host"] == 99 + 50


def test_logits_that_a_gpu_keeps_for_the_backward_pass_are_counted() -> None:
    row = 151_936 * 2
    assert held_bytes(8192, row, 85 * 10**9) == 8192 * row
    assert held_bytes(65_536, row, 85 * 10**9) == 2**30 // row * row, "too many to keep: a piece at a time"
    parts = ((Part("activations", 5), Part("logits", 1)), (Part("update", 7),))
    found = Estimate("stages[0]", 1, (), parts, 0, logits=(8192, row)).on_gpu(85 * 10**9)
    assert total(found.parts) == 5 + 8192 * row
