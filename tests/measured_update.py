"""Updates of a model, in a process of their own: prints for each job how far they raised the process's memory.

python -m tests.measured_update '[{"folder": "model", "recomputes": false, "n_tokens": 1024, "n_sampled": 1024}]'
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.batching.pack import PackedBatch, collate
from rlhf.batching.samples import Sample
from rlhf.losses.ppo_clip import PPOClip
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.policy.model import Policy


def batch(n_tokens: int, n_sampled: int) -> PackedBatch:
    rows = []
    for number, length in enumerate((n_tokens // 2, n_tokens // 3, n_tokens - n_tokens // 2 - n_tokens // 3)):
        mask = np.zeros(length, np.bool_)
        mask[-max(length * n_sampled // n_tokens, 1) :] = True
        mask[0] = False
        x = mask.astype(np.float32)
        ids = (np.arange(length) + number) % 1000  # rows that begin alike would share what they have in common
        rows.append(Sample(ids, mask, -x, x, number, 0))
    return collate(rows, np.ones(len(rows)))


def update(config: Any, one: PackedBatch, *, recomputes: bool) -> None:
    auto: Any = AutoModelForCausalLM
    trainer = TorchTrainer(Policy.of(auto.from_config(config), None, None), AdamW(), 2, recomputes=recomputes)
    for batches in ([batch(8, 8)], [one, one]):  # from the second on there are moments, and gradients to add to
        trainer.update(batches, PPOClip())


def memory(name: str) -> int:
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return int(line.split()[1]) * 1024


def raised(folder: str, recomputes: bool, n_tokens: int, n_sampled: int) -> int:
    config = AutoConfig.from_pretrained(folder)
    little = copy.deepcopy(config)
    little.hidden_size, little.vocab_size = 16, 1000
    update(little, batch(64, 64), recomputes=recomputes)  # libraries load more when they are first used
    Path("/proc/self/clear_refs").write_text("5")
    begin = memory("VmRSS")
    update(config, batch(n_tokens, n_sampled), recomputes=recomputes)
    return memory("VmHWM") - begin


if __name__ == "__main__":
    print(json.dumps([raised(**job) for job in json.loads(sys.argv[1])]))
