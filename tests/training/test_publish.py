"""What is delivered to an engine, and how a delivery that did not arrive is found out."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from rlhf.data import Generation, PolicyWeights, Prompt, SamplingParams, WeightsForm
from rlhf.errors import DeliveryError
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.inference.fingerprint import fingerprint
from rlhf.training.backends.sharded import cast_parameters
from rlhf.training.policy.model import FromScratch, Lora, Policy
from rlhf.training.publisher import Publisher, adapter_config, adapter_parameters, parameters, token_logprobs
from tests.training import tiny
from tests.training.tiny import OldForward


@torch.no_grad()
def move(policy: Policy, seed: int, by: float = 0.1) -> None:
    """An optimiser's step, so to speak."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * by)
    policy.version += 1


class Copying(TransformersEngine):
    """An engine with a copy of the weights; `keeps` says which parameters a delivery leaves as they are."""

    def __init__(self, policy: Policy) -> None:
        self.copied = copy.deepcopy(policy.model)
        super().__init__(self.copied, max_context=policy.max_context)
        self.keeps: Any = lambda name: False
        self.calls_itself: int | None = None

    @property
    def weights_form(self) -> WeightsForm:
        return "full"

    async def load(self, weights: PolicyWeights) -> None:
        mine = self.copied.state_dict()
        with torch.no_grad():
            for name, value in weights.parameters() if weights.parameters else ():
                if not self.keeps(name):
                    mine[name].copy_(value)
        await super().load(PolicyWeights(weights.version, ""))

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        found = await super().generate(prompt, params, session)
        version = found.policy_version if self.calls_itself is None else self.calls_itself
        return Generation(found.prompt, found.token_ids, found.logprobs, found.finish, version)


def test_an_engine_that_shares_the_module_says_what_the_trainer_says():
    policy = tiny.policy()
    publisher = Publisher(policy, TransformersEngine(policy.model, max_context=policy.max_context))

    async def go():
        await publisher.publish()
        assert "delivery/canary_moved" not in publisher.figures
        for seed in range(3):
            move(policy, seed)
            await publisher.publish()
            assert publisher.figures["delivery/canary_gap"] < 1e-4 < 0.1 < publisher.figures["delivery/canary_moved"]
        await publisher.publish()  # the same version again: nothing has moved
        assert publisher.figures["delivery/canary_moved"] == 0.0
        assert publisher.figures["time/publish_s"] > 0

    asyncio.run(go())


@pytest.mark.parametrize("by", [0.3, 1e-2, 1e-4, 0.0])
def test_an_engine_with_a_copy_follows_the_trainer_by_steps_of_any_size(by):
    policy = tiny.policy()
    engine = Copying(policy)
    publisher = Publisher(policy, engine)

    async def go():
        for seed in range(4):
            await publisher.publish()
            assert publisher.figures["delivery/canary_gap"] < 1e-4
            move(policy, seed, by)

    asyncio.run(go())


@pytest.mark.parametrize("by", [0.3, 1e-2, 1e-3])
def test_an_engine_that_loads_nothing_is_stale(by):
    policy = tiny.policy()
    engine = Copying(policy)
    publisher = Publisher(policy, engine)

    async def go():
        await publisher.publish()
        engine.keeps = lambda name: True
        for seed in range(2):  # and is still stale the next time
            move(policy, seed, by)
            with pytest.raises(DeliveryError, match="the engine is stale, its figures have not moved"):
                await publisher.publish()

    asyncio.run(go())


@pytest.mark.parametrize("by", [0.3, 1e-2])
def test_a_trainer_that_computes_with_old_weights_is_stale(by):
    policy = tiny.policy()
    engine = Copying(policy)
    trainer = Policy(OldForward(policy.model), policy.tokenizer, {}, is_lora=False)
    publisher = Publisher(trainer, engine)

    async def go():
        await publisher.publish()
        move(policy, 0, by)
        trainer.version = policy.version
        with pytest.raises(DeliveryError, match="the trainer is stale, its figures have not moved"):
            await publisher.publish()

    asyncio.run(go())


@pytest.mark.parametrize(
    "part", ["lm_head.weight", "layers.1.mlp.down_proj.weight", "layers.0.self_attn.v_proj.weight"]
)
def test_an_engine_that_loads_all_but_one_tensor_disagrees(part):
    policy = tiny.policy()
    policy.model.lm_head.weight = torch.nn.Parameter(policy.model.lm_head.weight.detach().clone())  # no longer tied
    engine = Copying(policy)
    publisher = Publisher(policy, engine)

    async def go():
        await publisher.publish()
        engine.keeps = lambda name: name.endswith(part)
        move(policy, 0)
        with pytest.raises(DeliveryError, match="trainer and engine disagree") as told:
            await publisher.publish()
        assert "at most 0.001 nats" in told.value.expected

    asyncio.run(go())


def test_who_is_stale_cannot_be_told_at_the_first_delivery():
    policy = tiny.policy()
    engine = Copying(policy)
    engine.keeps = lambda name: True
    move(policy, 0)
    with pytest.raises(DeliveryError, match="at the first delivery it is unknown"):
        asyncio.run(Publisher(policy, engine).publish())


def test_an_engine_that_samples_under_an_old_name_is_stale():
    policy = tiny.policy()
    engine = Copying(policy)
    publisher = Publisher(policy, engine)
    engine.calls_itself = 0

    async def go():
        await publisher.publish()
        move(policy, 0)
        with pytest.raises(DeliveryError, match="another version: the engine is stale") as told:
            await publisher.publish()
        assert (told.value.got, told.value.expected) == ("version 0", "version 1")

    asyncio.run(go())


def test_an_engine_that_does_not_answer_the_canary_is_given_up():
    policy = tiny.policy()

    class Mute(Copying):
        async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
            await asyncio.sleep(100)
            raise AssertionError

    begin = time.monotonic()
    with pytest.raises(DeliveryError, match="the engine does not answer after a delivery of weights"):
        asyncio.run(Publisher(policy, Mute(policy), timeout_s=0.2).publish())
    assert time.monotonic() - begin < 10


def test_the_tolerance_is_that_of_the_number_format_unless_given():
    policy = tiny.policy()
    engine = Copying(policy)

    async def gap_of(**settings: Any) -> float:
        publisher = Publisher(policy, engine, **settings)
        await publisher.publish()
        return publisher.figures["delivery/canary_gap"]

    engine.keeps = lambda name: True
    with torch.no_grad():
        engine.copied.model.norm.weight.mul_(1.01)  # a little off, as rounding is in 16 bits
    gap = asyncio.run(gap_of(dtype=torch.bfloat16))
    assert 1e-3 < gap < 0.25
    assert asyncio.run(gap_of(tolerance=2 * gap)) == gap
    for refused in ({}, {"tolerance": gap / 2}, {"tolerance": gap / 2, "dtype": torch.bfloat16}):
        with pytest.raises(DeliveryError):
            asyncio.run(gap_of(**refused))


def test_the_coarser_side_and_its_present_format_say_what_is_allowed():
    policy = tiny.policy()
    publisher = Publisher(policy, Copying(policy), dtype=torch.float32)
    asyncio.run(publisher.publish())
    assert publisher.figures["delivery/canary_tolerance"] == 1e-3 and publisher._seen
    cast_parameters(policy.model, torch.bfloat16)  # as a stage in bfloat16 does
    policy.version += 1
    asyncio.run(publisher.publish())
    assert publisher.figures["delivery/canary_tolerance"] >= 0.05


class Off(Copying):
    """An engine whose log-probs are off by so many nats, and that notes what it is asked."""

    by = 0.0

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.asked: list[tuple[int, ...]] = []

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        self.asked.append(prompt.token_ids)
        found = await super().generate(prompt, params, session)
        logprobs = tuple(x + self.by for x in found.logprobs)
        return Generation(found.prompt, found.token_ids, logprobs, found.finish, found.policy_version)


@pytest.mark.parametrize(
    ("dtype", "is_exact", "offs", "refused"),
    [
        (torch.bfloat16, False, [0.02, 0.1, 0.2], 0.3),  # 8 times what was seen, and no more than the bound
        (torch.bfloat16, False, [0.002, 0.01], 0.09),
        (torch.bfloat16, False, [], 0.3),
        (torch.float32, False, [4e-4, 1.1e-3, 3.1e-3], 0.03),  # a GPU in float32
        (torch.float32, False, [1e-6, 9e-4], 9e-3),
        (torch.float32, True, [9e-4], 1.1e-3),
    ],
)
def test_what_is_allowed_follows_from_what_was_seen(monkeypatch, dtype, is_exact, offs, refused):
    monkeypatch.setattr(Publisher, "_is_exact", is_exact)
    policy = tiny.policy()
    engine = Off(policy)
    publisher = Publisher(policy, engine, dtype=dtype)

    async def go():
        for seed, engine.by in enumerate(offs):
            await publisher.publish()
            assert publisher.figures["delivery/canary_gap"] == pytest.approx(engine.by, abs=1e-5)
            assert publisher.figures["delivery/canary_gap"] <= publisher.figures["delivery/canary_tolerance"]
            move(policy, seed)
        engine.by = refused
        with pytest.raises(DeliveryError, match="disagree") as told:
            await publisher.publish()
        assert f"at most {publisher.figures['delivery/canary_tolerance']:g} nats" in told.value.expected

    asyncio.run(go())


def test_tokens_of_the_canaries_are_drawn_anew_but_for_the_first():
    policy = tiny.policy()
    engine = Off(policy)
    publisher = Publisher(policy, engine)

    async def go():
        asked = []
        for seed in range(5):
            engine.asked = []
            await publisher.publish()
            asked.append(engine.asked)
            if seed < 4:
                move(policy, seed)
        engine.asked = []
        await publisher.publish()  # the same version again
        assert engine.asked == asked[-1]
        assert {prompts[0] for prompts in asked} == {asked[0][0]}
        assert [len(prompts) for prompts in asked] == [4, 2, 2, 2, 2]
        assert len({prompt for prompts in asked for prompt in prompts}) == 1 + 3 + 4

    asyncio.run(go())


def test_rows_that_the_fixed_canary_does_not_read_are_read_sooner_or_later():
    policy = tiny.policy()
    policy.model.lm_head.weight = torch.nn.Parameter(policy.model.lm_head.weight.detach().clone())
    engine = Off(policy)
    publisher = Publisher(policy, engine)

    async def go():
        await publisher.publish()
        read = set(engine.asked[0])
        unread = [i for i in range(len(policy.tokenizer)) if i not in read]
        rows = engine.copied.get_input_embeddings().weight
        engine.keeps = lambda name: "embed_tokens" in name
        with torch.no_grad():
            rows[unread] = rows[unread].flip(0).clone()
        with pytest.raises(DeliveryError, match="disagree"):
            for _ in range(20):
                policy.version += 1
                await publisher.publish()

    asyncio.run(go())


def test_a_context_shorter_than_the_canary_is_enough():
    policy = tiny.policy(max_context=16)
    engine = TransformersEngine(policy.model, max_context=16)
    asyncio.run(Publisher(policy, engine).publish())


def test_token_logprobs_are_those_of_a_plain_pass_and_leave_the_mode_alone():
    policy = tiny.policy()
    policy.model.train()
    found = token_logprobs(policy.model, (5, 6, 7), (8, 9))
    assert policy.model.training
    with torch.no_grad():
        logp = policy.model.eval()(torch.tensor([[5, 6, 7, 8, 9]]), use_cache=False).logits[0].log_softmax(-1)
    assert found.tolist() == pytest.approx([float(logp[2, 8]), float(logp[3, 9])], abs=1e-5)


def test_every_name_of_a_tied_parameter_is_sent():
    model = tiny.policy().model
    sent = dict(parameters(model))
    assert sent.keys() == model.state_dict().keys()
    assert "lm_head.weight" in sent and "lm_head.weight" not in dict(model.named_parameters())
    assert sent["lm_head.weight"].data_ptr() == sent["model.embed_tokens.weight"].data_ptr()
    assert all(torch.equal(value, sent[name]) for name, value in model.state_dict().items())


LORAS = [
    Lora(rank=4),
    Lora(rank=3, alpha=7.0, rslora=True),
    Lora(rank=5, alpha=3.0, dora=True),
    Lora(rank=2, dropout=0.5, target_modules=("q_proj", "down_proj")),
]


def lora_policy(lora: Lora, family: Any = "qwen3") -> Policy:
    shape = {"hidden_size": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 300, "initializer_range": 0.3}
    policy = FromScratch(**shape, family=family, lora=lora, max_context=256).build(0, tiny.SAID * 10)
    move(policy, 1)
    return policy


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("lora", LORAS, ids=lambda lora: f"rank {lora.rank}")
def test_merged_parameters_are_those_of_the_merged_model(lora, family):
    policy = lora_policy(lora, family)
    before = fingerprint(policy.model)
    sent = {name: value.clone() for name, value in parameters(policy.model)}
    assert fingerprint(policy.model) == before, "walking changes nothing"
    base = {
        name.replace(".base_layer", ""): value.clone()
        for name, value in policy.model.get_base_model().state_dict().items()
    }
    merged = copy.deepcopy(policy.model).merge_and_unload().state_dict()
    assert sent.keys() == merged.keys()
    assert max(float((sent[name] - merged[name]).abs().max()) for name in merged) < 1e-6
    adapted = [name for name in merged if float((merged[name] - base[name]).abs().max()) > 1e-3]
    assert len(adapted) == 2 * (7 if lora.target_modules == "all-linear" else 2), "two layers, each with these"


@pytest.mark.parametrize("lora", LORAS, ids=lambda lora: f"rank {lora.rank}")
def test_an_adapter_that_is_sent_is_an_adapter_that_peft_loads(lora, tmp_path: Path):
    policy = lora_policy(lora)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        expected = policy.model(ids, use_cache=False).logits
    save_file({n: v.contiguous() for n, v in adapter_parameters(policy.model)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(policy.model)))
    base = lora_policy(lora).model.unload()
    with torch.no_grad():
        plain = base(ids, use_cache=False).logits
        found = PeftModel.from_pretrained(base, str(tmp_path)).eval()(ids, use_cache=False).logits
    assert torch.allclose(found, expected, atol=1e-5) and not torch.allclose(plain, expected, atol=0.1)


def test_an_adapter_is_delivered_merged_to_an_engine_that_takes_full_weights():
    policy = lora_policy(LORAS[0])
    merged = Policy(copy.deepcopy(policy.model).merge_and_unload(), policy.tokenizer, {}, is_lora=False)
    engine = Copying(merged)
    publisher = Publisher(policy, engine)

    async def go():
        for seed in range(2, 5):
            await publisher.publish()
            assert publisher.figures["delivery/canary_gap"] < 1e-4
            move(policy, seed)

    asyncio.run(go())
