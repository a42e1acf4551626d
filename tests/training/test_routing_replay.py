"""Routing replay: experts recorded before the first update of a step are met in all its updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.batching.pack import collate, pack
from rlhf.batching.samples import Sample
from rlhf.errors import ModelError, RecipeError
from rlhf.inference.embedded.expert_routing import ExpertRouting
from rlhf.losses.ppo_clip import PPOClip
from rlhf.recipe import load
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.policy.model import Lora, Policy
from tests.training import runs
from tests.training.test_architectures import FAMILIES, MOE, SCORE, made, rows, tokenizer
from tests.training.together import together

EXPERTS = [name for name in FAMILIES if MOE.items() <= FAMILIES[name].items()]


def trainer_of(family: str, **how: Any) -> TorchTrainer:
    trainer = TorchTrainer(Policy.of(made(family), tokenizer(), None), AdamW(lr=1e-3), 8, **how)
    trainer.replay_routing()
    return trainer


def samples() -> list[Sample]:
    """Rows of which the first and the last begin with the same 30 tokens."""
    found = []
    for number, ids in enumerate(row.numpy() for row in rows()):
        mask = np.arange(len(ids)) >= len(ids) // 2
        values = np.where(mask, np.float32(0.5 - number), np.float32(0))
        found.append(Sample(ids, mask, values * 0 - 1.0 * mask, values, number, 0))
    return found


def scored(trainer: TorchTrainer, given: list[Sample], budget: int = 1000) -> list[Sample]:
    found = trainer.compute_token_stats(given, (), temperature=1.0, max_tokens=budget, routing=True)
    return [replace(row, routing=experts) for row, experts in zip(given, found["routing"], strict=True)]


def move_routers(trainer: TorchTrainer) -> None:
    """Make all routers choose otherwise."""
    assert trainer.routing is not None
    torch.manual_seed(3)
    with torch.no_grad():
        for router in trainer.routing.routers:
            router.weight.normal_(std=0.5)


def logprobs(trainer: TorchTrainer, given: list[Sample]) -> torch.Tensor:
    """Log-probs of all rows together, with the experts that they name."""
    batch = collate(given, np.ones(len(given)))
    with trainer._at_work():
        return trainer.read(trainer.policy.model, batch, (), temperature=1.0).logprobs


@pytest.mark.parametrize("family", EXPERTS)
def test_replayed_experts_are_met_whatever_the_routers_have_become(family: str) -> None:
    trainer = trainer_of(family)
    plain = samples()
    given = scored(trainer, plain)
    assert {row.routing.shape for row in given if row.routing is not None} == {(len(row), 3, 2) for row in plain}
    before = logprobs(trainer, plain)
    assert torch.allclose(logprobs(trainer, given), before, atol=1e-6)
    move_routers(trainer)
    met: list[torch.Tensor] = []
    assert trainer.routing is not None
    of = next(m for m in trainer.policy.model.modules() if type(m).__name__.endswith("Experts"))
    hook = of.register_forward_pre_hook(lambda _, inputs: met.extend(x for x in inputs if not x.is_floating_point()))
    [again], [own] = scored(trainer, plain[:1]), plain[:1]
    assert (again.routing != given[0].routing).any(), "the routers would choose others"
    met.clear()
    replayed = logprobs(trainer, given[:1])
    hook.remove()
    assert given[0].routing is not None
    assert (met[0].sort(-1).values.numpy() == np.sort(given[0].routing[:, 0], -1)).all()
    assert not torch.allclose(replayed, logprobs(trainer, [own]), atol=1e-4)
    n, of_all = trainer.routing.changed()
    assert 0 < n < of_all


def test_routing_does_not_depend_on_how_rows_are_packed() -> None:
    trainer = trainer_of("qwen3_moe")
    plain = samples()
    together, apart = scored(trainer, plain), scored(trainer, plain, budget=45)
    assert len(pack(plain, 1000)) == 1 < len(pack(plain, 45))
    for one, other in zip(together, apart, strict=True):
        assert one.routing is not None and other.routing is not None and (one.routing == other.routing).all()
    move_routers(trainer)
    alone = torch.cat([logprobs(trainer, [row]) for row in together])
    assert torch.allclose(logprobs(trainer, together), alone, atol=1e-5)


def test_rows_without_a_recorded_routing_choose_their_own() -> None:
    trainer = trainer_of("mixtral")
    plain = samples()
    given = scored(trainer, plain)
    move_routers(trainer)
    n = plain[1].n_policy_tokens
    mixed = logprobs(trainer, [plain[1], given[0]])
    assert torch.allclose(mixed[:n], logprobs(trainer, [plain[1]]), atol=1e-5)
    assert torch.allclose(mixed[n:], logprobs(trainer, [given[0]]), atol=1e-5)
    n = plain[3].n_policy_tokens  # it begins as the first row does, and only that one's routing is known
    for shared in ([plain[3], given[0]], [given[0], plain[3]]):
        found = logprobs(trainer, shared)
        routed = found[n:] if shared[0] is plain[3] else found[:-n]
        assert torch.allclose(routed, logprobs(trainer, [given[0]]), atol=1e-5)


def gradients(trainer: TorchTrainer, given: list[Sample], kl: float) -> dict[str, torch.Tensor]:
    kept: dict[str, torch.Tensor] = {}
    names = {p: name for name, p in trainer.policy.model.named_parameters() if p.requires_grad}

    def keep(*_: Any, **__: Any) -> None:
        kept.update({name: p.grad.clone() for p, name in names.items() if p.grad is not None})

    trainer.optimizer.register_step_pre_hook(keep)
    trainer.update(
        [collate(given, np.ones(len(given)))], PPOClip(kl="k3", kl_coef=kl) if kl else PPOClip(), temperature=1.0
    )
    return kept


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora and its reference"])
def test_gradients_go_to_the_replayed_experts_also_where_activations_are_computed_again(lora: bool) -> None:
    # The reference of an adapter is the same module, whose pass comes between forward and backward.
    def found(recomputes: bool, replays: bool = True) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        policy = Policy.of(made("qwen3_moe"), tokenizer(), Lora(rank=2) if lora else None)
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.2)
        trainer = TorchTrainer(policy, AdamW(lr=1e-3), 8, recomputes=recomputes)
        trainer.replay_routing()
        given = scored(trainer, samples()) if replays else samples()
        move_routers(trainer)
        return gradients(trainer, given, 0.1 if lora else 0.0)

    plain, again, free = found(False), found(True), found(False, replays=False)
    assert plain.keys() == again.keys() and len(plain) > 6
    for name, gradient in plain.items():
        assert torch.allclose(gradient, again[name], rtol=1e-4, atol=1e-6), name
    assert any(not torch.allclose(free[name], gradient, atol=1e-4) for name, gradient in plain.items())
    gates = [float(gradient.abs().max()) for name, gradient in plain.items() if ".gate." in name]
    assert lora or min(gates) > 0, "routers learn"


def recipe(folder: Path, family: str, **changes: Any) -> Path:
    words = tokenizer()
    words.chat_template = None
    made(family).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    policy = {"kind": "pretrained", "path": str(folder / "model"), "template": "plain"}
    stage = {"kind": "policy_gradient", "steps": 2, "tasks_per_step": 4, "group_size": 4, "minibatches": 2,
             "optimizer": {"lr": 0.05}, "filters": {"drop_zero_advantage": False}, "routing_replay": True}  # fmt: skip
    (folder / "mine.py").write_text(SCORE)
    mine = {"mine": {"kind": "./mine.py:score"}}
    return runs.write(folder, [stage | changes], policy=policy, evaluation={"n_tasks": 4}, rewards=mine)


def test_a_run_replays_and_says_how_many_choices_changed(tmp_path: Path) -> None:
    done = runs.run(recipe(tmp_path, "qwen3_moe"), tmp_path / "run")
    changed = runs.curve(done.folder, "routing/changed_share")
    assert len(changed) == 2 and 0 < min(changed) <= max(changed) < 0.9


def run_each(rank: int, folder: Path) -> None:
    for name in ("zero2", "fsdp"):
        runs.run(folder / name / "recipe.yaml", folder / name / "run")


@pytest.mark.extended
def test_two_processes_replay_what_one_does(tmp_path: Path) -> None:
    kinds = {"zero2": {"kind": "deepspeed", "zero_stage": 2}, "fsdp": {"kind": "fsdp"}}
    for name, trainer in kinds.items():
        recipe(tmp_path / name, "qwen3_moe", trainer=trainer | {"timeout_s": 120.0})
    together(run_each, tmp_path, timeout_s=300.0)
    alone = runs.run(recipe(tmp_path / "alone", "qwen3_moe"), tmp_path / "alone" / "run").folder
    for name in kinds:
        # The share counts rows of a prompt that micro-batches share once, and these are cut otherwise.
        for metric, near in (("routing/changed_share", 0.1), ("loss/total", 1e-4), ("optimizer/grad_norm", 1e-3)):
            found, one = (runs.curve(folder, metric) for folder in (tmp_path / name / "run", alone))
            assert found == pytest.approx(one, abs=near), (name, metric)


def test_a_model_without_experts_is_refused_before_a_step(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="routing of this model cannot be replayed") as caught:
        runs.run(recipe(tmp_path, "qwen3"), tmp_path / "run")
    assert "routing_replay" in caught.value.hint
    with pytest.raises(ModelError, match="of another model"):
        routing = ExpertRouting(made("mixtral"))
        routing.replay(torch.zeros(4, 9, 2, dtype=torch.int16))
        routing.begin(Any, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"minibatches": 1}, "has no effect|one update per step"),
        ({"trainer": {"kind": "torch", "compile": True}}, "does not support compilation"),
        ({"trainer": {"kind": "fsdp", "sequence_parallel": 2}}, "whole rows"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=told):
        load(recipe(tmp_path, "mixtral", **changes))
