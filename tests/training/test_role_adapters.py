"""Adapters of roles: one forward pass, one batch and one checkpoint hold them all, and none reads another's rows."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agents.chat import ChatAgent
from agents.memory.summary import Summary
from agents.planner import PLAN, PlannerExecutor
from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import Sample, make_samples
from rlhf.credit.contrib.two_level import TwoLevel
from rlhf.credit.grpo import GRPO
from rlhf.data import (
    Action,
    Finish,
    Generation,
    Outcome,
    Prompt,
    SamplingParams,
    Score,
    ScoredGroup,
    Trajectory,
    Turn,
)
from rlhf.errors import CheckpointError, EngineError, ModelError, RecipeError
from rlhf.evaluation.store import read_trajectories
from rlhf.inference.embedded.attention import packed_forward
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.inference.role_adapters import adapter_names, adapter_of
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.recipe import load
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.contrib.judge_refresh import learnt
from rlhf.training.policy.lora import Lora, unadapted
from rlhf.training.policy.model import FromScratch, Policy, restore, resume
from rlhf.training.publisher import Publisher, parameters
from tests import test_resume as interrupted
from tests import test_self_play as self_play
from tests.commands import run
from tests.training import runs, words
from tests.training.tiny import Echoes, collect, credit, ones, policy

LORA = Lora(rank=4, roles=(PLAN, "memory"))
IDS = tuple(range(40, 64))
PLANNER = PlannerExecutor(plan_system="", max_turns_per_subgoal=2, executor=ChatAgent(system=""))


def moved(lora: Lora = LORA, seed: int = 1) -> Policy:
    """A policy whose adapters say something, each something else."""
    made, generator = policy(lora=lora, max_context=1024), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * 0.3)
    return made


@pytest.fixture(scope="module")
def made() -> Policy:
    return moved()


def alone(made: Policy, role: str) -> Any:
    """PEFT's own model with the adapter of one role, and nothing of ours around it."""
    from peft import LoraConfig, get_peft_model

    base = copy.deepcopy(made.model).unload()
    model: Any = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    own = dict(model.named_parameters())
    name = role or "default"
    with torch.no_grad():
        for path, p in made.model.named_parameters():
            if adapter_of(path) == role:
                own[path.replace(f".{name}.", ".default.")].copy_(p)
    return model.eval()


def forward(model: Any, rows: list[tuple[int, ...]], adapters: list[str] | None) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.tensor([i for row in rows for i in row])
        return packed_forward(model, ids, [len(row) for row in rows], None, adapters)


# --- one pass --------------------------------------------------------------------------------------------------------


def test_rows_of_several_roles_in_one_pass_are_what_peft_says_of_each(made: Policy) -> None:
    roles = ["", PLAN, "memory", PLAN]
    rows = [IDS, IDS, IDS[:20], IDS[4:]]  # one text under three adapters is no common beginning
    found = forward(made.model, rows, roles).split([len(row) for row in rows])
    for row, role, logits in zip(rows, roles, found, strict=True):
        own = forward(alone(made, role), [row], None)
        assert torch.allclose(logits, own, atol=1e-4)
    assert (found[0] - found[1]).abs().max() > 1 and (found[0][:20] - found[2]).abs().max() > 1


def test_rows_without_a_role_are_read_by_the_shared_adapter(made: Policy) -> None:
    forward(made.model, [IDS], [PLAN])  # which the next pass does not remember
    assert torch.equal(forward(made.model, [IDS], None), forward(made.model, [IDS], [""]))
    with made.model.disable_adapter():
        assert torch.equal(forward(made.model, [IDS], [PLAN]), forward(made.model, [IDS], None))


def test_the_backward_pass_may_compute_the_forward_pass_again() -> None:
    kept, again = moved(), moved()
    again.recompute(True)
    found = []
    for one in (kept, again):
        one.model.train()
        ids = torch.tensor(IDS * 2)
        packed_forward(one.model, ids, [len(IDS)] * 2, None, ["", PLAN]).square().mean().backward()
        found.append({name: p.grad for name, p in one.model.named_parameters() if p.requires_grad})
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-6) for name in found[0])
    assert any(g.abs().max() > 0 for name, g in found[1].items() if adapter_of(name) == PLAN)


def test_a_copy_of_the_model_tells_roles_apart_by_itself(made: Policy) -> None:
    other = copy.deepcopy(made.model)
    before = forward(other, [IDS], [PLAN])
    forward(made.model, [IDS], [""])
    assert torch.equal(forward(other, [IDS], [PLAN]), before)


def test_a_role_without_an_adapter_is_refused(made: Policy) -> None:
    with pytest.raises(EngineError, match="no adapter of this role") as told:
        forward(made.model, [IDS], ["plam"])
    assert told.value.expected == "'', 'memory', 'plan'" and "plan" in told.value.hint
    with pytest.raises(EngineError, match="no adapter of this role"):
        forward(policy().model, [IDS], [PLAN])


# --- the engine ------------------------------------------------------------------------------------------------------


def sampled(made: Policy, asked: list[tuple[Prompt, str]], at_once: bool) -> list[Generation]:
    engine = TransformersEngine(made.model, max_context=256)

    async def go() -> list[Generation]:
        params = [SamplingParams(max_tokens=12, seed=i) for i in range(len(asked))]
        calls = [engine.generate(p, s, session) for (p, session), s in zip(asked, params, strict=True)]
        try:
            return await asyncio.gather(*calls) if at_once else [await call for call in calls]
        finally:
            await engine.close()

    return asyncio.run(go())


def test_calls_of_several_roles_share_a_batch_and_a_session_and_no_cache(made: Policy) -> None:
    roles = ["", PLAN, "memory", "", PLAN, PLAN]
    asked = [(Prompt(IDS[: 18 + i], adapter=role), f"s{i % 2}") for i, role in enumerate(roles)]
    together, apart = sampled(made, asked, True), sampled(made, asked, False)
    for one, other, role in zip(together, apart, roles, strict=True):
        assert one.token_ids == other.token_ids and np.allclose(one.logprobs, other.logprobs, atol=1e-5)
        own = forward(alone(made, role), [one.full_ids], None).log_softmax(-1)
        said = own[len(one.prompt.token_ids) - 1 : -1].gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        assert np.allclose(one.logprobs, said.numpy(), atol=1e-4)


def test_a_session_is_released_with_all_that_its_roles_have_cached(made: Policy) -> None:
    engine = TransformersEngine(made.model, max_context=64, max_sessions=4)

    async def go() -> tuple[int, int]:
        params = SamplingParams(max_tokens=2)
        for role in adapter_names(made.model):
            await engine.generate(Prompt(IDS[:20], adapter=role), params, "s")
        again = [await engine.generate(Prompt(IDS[:20], adapter=PLAN), params, "s")]
        cached = engine.stats.n_cached_tokens
        await engine.release("s")
        again.append(await engine.generate(Prompt(IDS[:20], adapter=PLAN), params, "s"))
        assert again[0].token_ids == again[1].token_ids
        await engine.close()
        return cached, engine.stats.n_cached_tokens

    assert asyncio.run(go()) == (19, 19)


def test_the_engine_refuses_a_role_that_has_no_adapter(made: Policy) -> None:
    with pytest.raises(EngineError, match="no adapter of this role"):
        sampled(made, [(Prompt(IDS, adapter="critic"), "s")], True)


# --- rows and updates ------------------------------------------------------------------------------------------------


def episodes(made: Policy, agent: Any = PLANNER) -> list[ScoredGroup]:
    return collect(made, environment=Echoes(n_turns=4), agent=agent, n_tasks=8, group_size=2)


@pytest.mark.parametrize("layout", ["trajectory", "generation"])
@pytest.mark.parametrize("agent", ["planner", "summary"])
def test_recomputed_log_probs_are_those_sampled(made: Policy, agent: str, layout: Any) -> None:
    summary = ChatAgent(system="", memory=Summary(every=1, keep=0))
    groups = episodes(made, PLANNER if agent == "planner" else summary)
    role = PLAN if agent == "planner" else "memory"
    samples, _ = make_samples(groups, ones(groups), layout)
    assert {s.adapter for s in samples} == {"", role}
    found = TorchTrainer(made, AdamW(), 1).compute_logprobs(samples, temperature=1.0, max_tokens=300)
    gaps = [float(abs(s.sampler_logprobs[s.mask] - row).max()) for s, row in zip(samples, found, strict=True)]
    assert max(gaps) < 1e-4
    other = TorchTrainer(moved(seed=2), AdamW(), 1).compute_logprobs(samples, temperature=1.0, max_tokens=300)
    assert max(float(abs(a - b).max()) for a, b in zip(found, other, strict=True)) > 0.1


def test_a_row_ends_where_another_adapter_reads_on() -> None:
    prompt = Prompt((1, 2, 3))
    first = Generation(prompt, (4,), (-0.5,), Finish.STOP, 0)
    second = Generation(Prompt((1, 2, 3, 4, 5), adapter=PLAN), (6,), (-0.5,), Finish.STOP, 0, role=PLAN)
    shared = Generation(Prompt((1, 2, 3, 4, 5)), (6,), (-0.5,), Finish.STOP, 0, role=PLAN)
    assert [s.adapter for s in _rows(first, second)] == ["", PLAN]
    assert [s.adapter for s in _rows(first, shared)] == [""]


def _rows(*generations: Generation) -> list[Sample]:
    trajectory = Trajectory("t", 0, "o", (Turn(Action("a", generations), "r"),), Outcome.FAILED)
    groups = [ScoredGroup("t", (trajectory,), (Score({}, (0.0,), 0.0),))]
    return make_samples(groups, ones(groups))[0]


def updated(roles: tuple[str, ...] | None) -> set[str | None]:
    """Adapters that updates with weight decay move, of a planner's episodes of which `roles` are trained."""
    made = moved()
    groups = episodes(made)
    samples, _ = make_samples(groups, credit(groups, TwoLevel(planner=GRPO(), executor=GRPO())), "trajectory", roles)
    trainer = TorchTrainer(made, AdamW(lr=0.01, weight_decay=0.1), 4)
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    for batches in pack_minibatches(samples, 2, Reduction(), 400):
        trainer.update(batches, PPOClip())
    return {adapter_of(n) for n, p in made.model.named_parameters() if not torch.equal(p, before[n])}


@pytest.mark.parametrize(("roles", "expected"), [(None, {"", PLAN}), ((PLAN,), {PLAN}), (("",), {""})])
def test_an_update_moves_the_adapters_of_its_rows_and_no_other(roles: Any, expected: set[str]) -> None:
    assert updated(roles) == expected


# --- delivery, checkpoints, copies -----------------------------------------------------------------------------------


def test_every_adapter_is_asked_at_a_delivery(made: Policy) -> None:
    engine = TransformersEngine(made.model, max_context=256)
    asked: list[str] = []

    class Heard(TransformersEngine):
        async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
            asked.append(prompt.adapter)
            return await engine.generate(prompt, params, session)

    publisher = Publisher(made, Heard(made.model, max_context=256))
    asyncio.run(publisher.publish())
    assert list(dict.fromkeys(asked)) == ["", "memory", PLAN] and publisher.figures["delivery/canary_gap"] < 1e-4


def test_a_checkpoint_has_a_peft_folder_for_each_role(made: Policy, tmp_path: Path) -> None:
    from peft import PeftModel

    saved = tmp_path / "checkpoints" / "x" / "policy"
    made.save(saved)
    base = copy.deepcopy(made.model).unload()
    base.save_pretrained(tmp_path / "base")
    made.tokenizer.save_pretrained(tmp_path / "base")
    assert {p.parent.name for p in saved.rglob("adapter_model.safetensors")} == {"policy", PLAN, "memory"}
    theirs: Any = PeftModel.from_pretrained(base, str(saved / PLAN))
    rows, roles = [IDS, IDS[:20], IDS], ["", PLAN, "memory"]
    assert torch.allclose(forward(theirs, [IDS], None), forward(made.model, [IDS], [PLAN]), atol=1e-5)
    shape = {"hidden_size": 16, "n_layers": 2, "n_heads": 2, "head_dim": 8}
    settings = FromScratch(**shape, lora=LORA)
    again = resume(settings, saved, tmp_path)
    assert torch.equal(forward(again.model, rows, roles), forward(made.model, rows, roles))
    # The optimiser finds its moments by the order of what is trained.
    trained = [[n for n, p in m.named_parameters() if p.requires_grad] for m in (made.model, again.model)]
    assert trained[0] == trained[1]
    again.keep_reference(saved.parent)
    with torch.no_grad():
        for p in again.model.parameters():
            if p.requires_grad:
                p.zero_()
    with again.as_reference() as reference:
        assert torch.equal(forward(reference, rows, roles), forward(made.model, rows, roles))
    with pytest.raises(CheckpointError, match="cannot be used") as told:
        resume(FromScratch(**shape, lora=Lora(rank=4, roles=(PLAN,))), saved, tmp_path)
    assert "adapters of roles ['memory', 'plan']" in told.value.got
    assert adapter_names(restore(FromScratch(), saved, tmp_path).model) == ("", "memory", PLAN)


def test_an_older_version_has_all_adapters(made: Policy) -> None:
    assert {adapter_of(name) for name in learnt(made)} == {"", PLAN, "memory"}


@pytest.mark.parametrize("how", [lambda m: unadapted(copy.deepcopy(m)), lambda m: dict(parameters(m))])
def test_adapters_of_roles_are_never_merged(made: Policy, how: Any) -> None:
    with pytest.raises(ModelError, match="cannot be merged") as told:
        how(made.model)
    assert told.value.where == "policy.lora.roles" and "memory, plan" in told.value.got


# --- recipes ---------------------------------------------------------------------------------------------------------

SUPERVISED = {"kind": "supervised", "n_demonstrations": 16, "epochs": 1, "batch_size": 8}
GRADIENT = {"kind": "policy_gradient", "steps": 2, "tasks_per_step": 8, "group_size": 4}


def recipe(folder: Path, stages: list[dict[str, Any]] | None = None, **changes: Any) -> Path:
    lora = changes.pop("lora", {"rank": 4, "roles": [PLAN]})
    given = {
        "policy": {**runs.BASE["policy"], "max_context": 512, "lora": lora},
        "agent": {"kind": "planner", "plan_system": "", "executor": {"system": ""}},
        "rewards": {**runs.BASE["rewards"], "short": {"kind": "overlong", "max_tokens": 14, "buffer": 13}},
        **changes,
    }
    return runs.write(folder, [{**GRADIENT, "advantage": {"kind": "two_level"}}] if stages is None else stages, **given)


#: What else a stage keeps between steps.
KEPT = {
    "replay": {"max_share": 0.5},
    "reference_reset": {"max_kl": 1e-9},
    "loss": {"kind": "ppo_clip", "kl": "k3", "kl_coef": 0.1},
    "checkpoint_in_background": True,
}


@pytest.mark.parametrize("keys", [{}, KEPT], ids=["alone", "with all that a stage keeps"])
def test_a_run_trains_both_and_a_resumed_one_ends_where_it_does(tmp_path: Path, keys: dict[str, Any]) -> None:
    gradient = {**GRADIENT, "advantage": {"kind": "two_level"}, "checkpoint_every": 1, "steps": 3, **keys}
    path, calls = recipe(tmp_path, [SUPERVISED, gradient]), list[int]()
    with words.on_every_step(path, lambda: calls.append(1)):
        whole = runs.run(path, tmp_path / "whole")
    found = [r.trajectory for r in read_trajectories(whole.folder / "trajectories", phase="train")]
    asked = {(g.role, g.prompt.adapter) for t in found for g in t.generations}
    assert asked == {("", ""), (PLAN, PLAN)}
    assert set(runs.weights(runs.newest(whole.folder))) == {f"{f}adapter_model.safetensors" for f in ("", f"{PLAN}/")}
    assert interrupted.run_with_interruptions(path, tmp_path / "stopped", [2 * len(calls) // 3]) >= 1
    interrupted.assert_equal(tmp_path / "stopped", tmp_path / "whole")


def test_seats_of_a_game_may_have_adapters(tmp_path: Path) -> None:
    policy = {**runs.BASE["policy"], "lora": {"rank": 4, "roles": ["first"]}}
    stage = {**GRADIENT, "tasks_per_step": 2, "train_roles": ["first"], "advantage": {"kind": "seats"}}
    rewards = {**runs.BASE["rewards"], "short": {"kind": "overlong", "max_tokens": 6, "buffer": 5}}
    path = self_play.write(tmp_path, [stage], policy=policy, rewards=rewards, evaluation={"n_tasks": 2})
    done = runs.run(path, tmp_path / "run")
    found = [r.trajectory for r in read_trajectories(done.folder / "trajectories", phase="train")]
    asked = {(g.role, g.prompt.adapter) for t in found for g in t.generations}
    assert asked - {("second", "")} == {("first", "first")}
    checkpoints = (done.folder / "checkpoints").iterdir()
    before, after = (runs.weights(p) for p in sorted(checkpoints, key=lambda p: p.name))
    assert {name for name in before if before[name] != after[name]} == {"first/adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("changes", "where", "hint"),
    [
        ({"lora": {"roles": ["plam"]}}, "policy.lora.roles[0]", "plan"),
        ({"agent": {"kind": "chat", "system": ""}}, "policy.lora.roles[0]", "shared"),
        ({"lora": {"roles": ["default"]}}, "policy.lora", ""),
        ({"lora": {"roles": ["plan", "plan"]}}, "policy.lora", ""),
        ({"lora": {"roles": ["plan"], "dora": True}}, "policy.lora", ""),
        ({"engine": {"kind": "vllm", "lora": "merged"}}, "engine.lora", "roles"),
        (
            {"stages": [{**GRADIENT, "trainer": {"kind": "deepspeed", "zero_stage": 3}}]},
            "stages[0].trainer.zero_stage",
            "roles",
        ),
        ({"stages": [{"kind": "policy_gradient", "advantage": {"kind": "gae"}, "critic": {}}]}, "stages[0].critic", ""),
    ],
)
def test_what_does_not_go_with_adapters_of_roles_is_refused(
    changes: dict[str, Any], where: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as told:
        load(str(recipe(tmp_path, **changes)))
    assert told.value.where.startswith(where) and hint in told.value.hint


def test_an_export_says_that_adapters_of_roles_are_no_one_model(tmp_path: Path) -> None:
    done = runs.run(recipe(tmp_path / "r"), tmp_path / "run")
    checkpoint = sorted((done.folder / "checkpoints").iterdir())[-1]
    said = run("export", checkpoint, "--out", tmp_path / "model")
    assert said.exit_code != 0 and "cannot be merged" in said.output, said.output
    assert not (tmp_path / "model").exists()


def test_a_trained_run_is_evaluated_with_its_adapters(tmp_path: Path) -> None:
    done = runs.run(recipe(tmp_path / "r"), tmp_path / "run")
    said = run("evaluate", done.folder, "-n", "4", "--json", "--out", tmp_path / "e")
    assert said.exit_code == 0, said.output
    found = [r.trajectory for r in read_trajectories(tmp_path / "e" / "trajectories")]
    assert len(found) == 4 and {g.prompt.adapter for t in found for g in t.generations} == {"", PLAN}
