"""The adapter in a checkpoint's folder, read by vLLM and by PEFT: both say the same of every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rlhf.data import SamplingParams
from rlhf.inference.vllm.instance import Adapter
from rlhf.inference.vllm.local import LocalInstance
from rlhf.training.checkpoints import store
from rlhf.training.checkpoints.store import State
from tests.rollout.vllm.real_vllm import lora_policy, policy_like, prompt_of

#: Nats between two implementations of one model in float32.
TOLERANCE = 1e-4


def test_vllm_and_peft_read_the_adapter_of_a_checkpoint_alike(runner: Any, adapted: LocalInstance, tmp_path: Path):
    policy = lora_policy(5)
    policy.save_base(tmp_path)
    folder = store.save(tmp_path / "checkpoints", State(0, "policy_gradient", 3, False, 1), policy, None) / "policy"
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=2)
    prompts = [prompt_of(20 + n, seed=n).token_ids for n in range(4)]

    async def sample(instance: LocalInstance) -> list[Any]:
        # What a LoRARequest of vLLM needs: a name, a number of its own, and the folder.
        given = Adapter("of a checkpoint", 900_001, folder)
        await instance.add_adapter(given)
        try:
            return [await instance.sample(f"checkpoint-{n}", ids, params, (), given) for n, ids in enumerate(prompts)]
        finally:
            await instance.remove_adapter(given)

    found = runner.run(sample(adapted))
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(folder)).eval()
    without = policy_like(0).model
    gaps, moved = [], []
    for ids, sampled in zip(prompts, found, strict=True):
        own = logprobs(by_peft, ids, sampled.token_ids)
        gaps.append((own - torch.tensor(sampled.logprobs)).abs().max())
        moved.append((own - logprobs(without, ids, sampled.token_ids)).abs().max())
    assert float(max(gaps)) < TOLERANCE
    assert float(max(moved)) > 100 * TOLERANCE, "an adapter that was left out would look like this"


@torch.no_grad()
def logprobs(model: Any, prompt: tuple[int, ...], sampled: tuple[int, ...]) -> torch.Tensor:
    """Of the sampled tokens, `[T]`, by one pass over all."""
    ids = torch.tensor([[*prompt, *sampled]])
    rows = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return rows.gather(1, ids[0, len(prompt) :, None])[:, 0]
