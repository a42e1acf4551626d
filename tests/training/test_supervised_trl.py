"""The supervised stage's update is that of TRL's SFTTrainer on the same rows."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agents.chat import ChatAgent
from agents.memory.window import Window
from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import Sample
from rlhf.errors import MissingPackageError
from rlhf.losses.reduction import Reduction
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.policy.model import Lora, Policy
from rlhf.training.stages.supervised_training import sft_samples
from rlhf.training.stages.trl_trainers import load_trl
from tests.training.tiny import Echoes, collect, parameters, policy

try:
    load_trl()
except MissingPackageError:
    pytest.skip("needs the extra trl", allow_module_level=True)

#: One row for each demonstration, or one for each of its turns.
AGENTS = {"grows": ChatAgent(system=""), "is rewritten": ChatAgent(system="", memory=Window(turns=0))}


def rows_of(agent: str) -> list[Sample]:
    groups = collect(policy(), environment=Echoes(n_turns=4), agent=AGENTS[agent], n_tasks=4, group_size=2)
    said = [t for group in groups for t in group.trajectories]
    # Turns that the environment did not understand would count less: TRL knows tokens that count and others.
    rows = sft_samples([replace(t, turns=tuple(replace(turn, valid=True) for turn in t.turns)) for t in said])
    assert len({row.n_policy_tokens for row in rows}) > 2  # a mean of means would differ from the mean over tokens
    return rows


def by_trl(made: Policy, rows: list[Sample], folder: Path, at_once: int) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one update: SGD at a rate of 1 takes the gradient itself off the weights."""
    import datasets

    trl = load_trl()
    labels = [[int(t) if m else -100 for t, m in zip(row.token_ids, row.mask, strict=True)] for row in rows]
    ids = [[int(t) for t in row.token_ids] for row in rows]
    data = datasets.Dataset.from_list([{"input_ids": i, "labels": own} for i, own in zip(ids, labels, strict=True)])
    config = trl.SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=at_once, gradient_accumulation_steps=len(rows) // at_once,
        max_steps=1, max_grad_norm=0.0, max_length=None, bf16=False, use_cpu=True, save_strategy="no", report_to=[],
        logging_steps=1, disable_tqdm=True, gradient_checkpointing=False, dataloader_pin_memory=False,
        dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False,
    )  # fmt: skip
    before = parameters(made.model)
    optimizer = torch.optim.SGD([p for p in made.model.parameters() if p.requires_grad], lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer: Any = trl.SFTTrainer(
        model=made.model, args=config, train_dataset=data, processing_class=made.tokenizer,
        optimizers=(optimizer, schedule),
    )  # fmt: skip
    trainer.train()
    [loss] = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return loss, before - parameters(made.model)


@pytest.mark.parametrize("at_once", [1, 4], ids=["one row at a time", "four at a time"])
@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("agent", AGENTS)
def test_loss_and_gradient_are_those_of_trl(tmp_path: Path, agent: str, lora: Lora | None, at_once: int) -> None:
    rows = rows_of(agent)
    rows = rows[: len(rows) // 4 * 4]
    made = policy(lora=lora)
    for name, parameter in made.model.named_parameters():
        if "lora_B" in name:  # which begins at 0, where the other factor has no gradient
            parameter.data.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    theirs = copy.deepcopy(made)
    trainer = TorchTrainer(made, AdamW(lr=1e-3, max_grad_norm=None), 1)
    [packed] = pack_minibatches(rows, 1, Reduction(kind="token_mean"), max_tokens=200)
    assert len(packed) > 1
    logged = trainer.sft_update(packed)
    ours = torch.cat([p.grad.flatten() for p in made.model.parameters() if p.grad is not None])
    loss, gradient = by_trl(theirs, rows, tmp_path, at_once)
    assert logged["supervised/loss"] == pytest.approx(loss, rel=1e-4)
    assert float(gradient.abs().max()) > 1e-3
    torch.testing.assert_close(ours, gradient, atol=2e-6, rtol=1e-3)
