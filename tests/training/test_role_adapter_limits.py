"""Where adapters of roles end: names they cannot have, folders that are no roles, models that have none."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from agents.planner import PLAN, PlannerExecutor
from rlhf.batching.samples import make_samples
from rlhf.build.engine import adapter_rank
from rlhf.errors import ModelError, RecipeError
from rlhf.inference.role_adapters import adapter_names
from rlhf.inference.settings import VllmSettings
from rlhf.losses.contrib.kdrl import KDRL
from rlhf.recipe import load
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.contrib.teacher import teacher_of, with_teacher_logprobs
from rlhf.training.policy.lora import Lora
from rlhf.training.policy.model import FromScratch, Policy, restore
from rlhf.training.publisher import adapter_parameters
from rlhf.training.stages.policy_gradient import PolicyGradient
from tests.training import runs
from tests.training.tiny import Echoes, collect, ones, policy

GRADIENT = {"kind": "policy_gradient", "steps": 1, "tasks_per_step": 2, "group_size": 2}


def made_with(*roles: str) -> Policy:
    return policy(lora=Lora(rank=4, roles=roles), max_context=1024)


@pytest.mark.parametrize("role", ["0", "layers", "model", "mlp", "q_proj", "weight", "lora_A", "lora_B", "update"])
def test_a_role_is_not_called_as_a_part_of_the_model(role: str) -> None:
    with pytest.raises(ModelError, match="the name of a module of the model") as told:
        made_with(PLAN, role)
    assert told.value.where == "policy.lora.roles" and told.value.got == repr(role)


@pytest.mark.parametrize("roles", [("plan", "planner"), ("player 1", "player 10"), ("self",), ("by default",)])
def test_a_name_within_another_is_its_own(roles: tuple[str, ...]) -> None:
    model = made_with(*roles).model
    n = [len(dict(adapter_parameters(model, role))) for role in adapter_names(model)]
    assert len(set(n)) == 1 and sum(n) == sum(p.requires_grad for p in model.parameters())


def test_checkpoints_that_another_trainer_left_beside_an_adapter_are_no_roles(tmp_path: Path) -> None:
    made = made_with(PLAN)
    made.save(tmp_path / "adapter")
    made.model.unload().save_pretrained(tmp_path / "base")
    made.tokenizer.save_pretrained(tmp_path / "base")
    left = shutil.copytree(tmp_path / "adapter" / PLAN, tmp_path / "adapter" / "checkpoint-5")
    (left / "trainer_state.json").write_text("{}")
    assert adapter_names(restore(FromScratch(), tmp_path / "adapter", tmp_path).model) == ("", PLAN)


def test_a_teacher_reads_the_rows_of_every_role(tmp_path: Path) -> None:
    policy(seed=3, hidden_size=32, max_context=1024).save(tmp_path)
    made, agent = made_with(PLAN), PlannerExecutor(plan_system="", max_turns_per_subgoal=2)
    groups = collect(made, environment=Echoes(n_turns=4), agent=agent)
    rows, _ = make_samples(groups, ones(groups))
    assert {row.adapter for row in rows} == {"", PLAN}
    stage = PolicyGradient(loss=KDRL(teacher=str(tmp_path)))
    trainer = TorchTrainer(made, AdamW(), 1)
    teacher = teacher_of(stage, made)
    assert teacher is not None
    found = with_teacher_logprobs(teacher, stage, trainer, rows, groups)
    assert [row.adapter for row in found] == [row.adapter for row in rows]
    plain = collect(policy(max_context=1024), environment=Echoes(n_turns=4), agent=agent)
    assert [row.token_ids.tolist() for row in make_samples(plain, ones(plain))[0]] == [
        r.token_ids.tolist() for r in rows
    ]
    alike = with_teacher_logprobs(teacher, stage, trainer, make_samples(plain, ones(plain))[0], plain)
    for one, other in zip(found, alike, strict=True):
        assert one.teacher_logprobs is not None and other.teacher_logprobs is not None
        np.testing.assert_allclose(one.teacher_logprobs, other.teacher_logprobs, atol=1e-5)


def test_an_engine_that_takes_merged_weights_is_not_started() -> None:
    merged = VllmSettings(lora="merged")
    assert adapter_rank(merged, made_with()) == 0 and adapter_rank(VllmSettings(), made_with(PLAN)) == 4
    with pytest.raises(ModelError, match="cannot be merged"):
        adapter_rank(merged, made_with(PLAN))


@pytest.mark.parametrize("is_gpu", [False, True])
def test_an_adapter_is_merged_on_a_gpu_of_this_machine_unless_roles_have_some(
    monkeypatch: pytest.MonkeyPatch, is_gpu: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: is_gpu)
    served = VllmSettings(servers=("http://127.0.0.1:1",))
    assert adapter_rank(VllmSettings(), made_with()) == (0 if is_gpu else 4)
    assert adapter_rank(VllmSettings(lora="adapter"), made_with()) == 4
    assert adapter_rank(VllmSettings(), made_with(PLAN)) == 4
    # A server and who delivers to it find the same, though one of them may have no GPU.
    assert adapter_rank(served, made_with()) == adapter_rank(VllmSettings(), made_with(), is_server=True) == 4


def test_a_critic_has_no_roles(tmp_path: Path) -> None:
    stage = {**GRADIENT, "advantage": {"kind": "gae"}, "critic": {"lora": {"roles": [PLAN]}}}
    with pytest.raises(RecipeError, match="has no roles") as told:
        load(str(runs.write(tmp_path, [stage])))
    assert told.value.where == "stages[0].critic.lora.roles"


AGENT = """
from agents.chat import ChatAgent

class Silent:
    async def act(self, history, policy):
        return await ChatAgent(system="").act(history, policy)
"""


def test_an_agent_that_does_not_say_its_roles_is_told_to(tmp_path: Path) -> None:
    path = runs.write(
        tmp_path,
        [GRADIENT],
        policy={**runs.BASE["policy"], "lora": {"rank": 4, "roles": [PLAN]}},
        agent={"kind": "./silent.py:Silent"},
    )
    (tmp_path / "silent.py").write_text(AGENT)
    with pytest.raises(RecipeError) as told:
        load(str(path))
    assert told.value.where == "policy.lora.roles[0]" and "attribute `roles`" in told.value.hint
