"""Policies that two gloo processes load in shares: the same weights, adapters, updates and runs as loaded whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlhf.build.processes import sharded_load
from rlhf.inference.embedded import model_probe
from rlhf.inference.embedded.model_probe import has_dropout
from rlhf.recipe import load
from rlhf.training.backends.settings import DeepSpeed, Fsdp, Torch
from rlhf.training.backends.sharded import full_state, shard_of
from rlhf.training.backends.sharding import layout_of
from rlhf.training.policy.model import Lora, Pretrained
from rlhf.training.policy.model_files import load_folder
from rlhf.training.policy.sharded_load import SavedWeights, ShardedLoad, can_be_sharded, model_without_memory
from tests.training import runs
from tests.training.test_deepspeed import N_UPDATES, SCHEDULE, go_on, rows
from tests.training.tiny import policy
from tests.training.together import together

KINDS: dict[str, Any] = {"fsdp": Fsdp(), **({"zero3": DeepSpeed(zero_stage=3)} if find_spec("deepspeed") else {})}
SHORT: dict[str, Any] = {"fsdp": Fsdp(precision="bfloat16")}
if find_spec("deepspeed"):
    SHORT |= {"zero3": DeepSpeed(zero_stage=3, precision="bfloat16", param_persistence_threshold=0)}
FORMS: dict[str, Lora | None] = {"full": None, "lora": Lora(rank=2)}


# --- reading --------------------------------------------------------------------------------------------------------


def test_numbers_of_a_tensor_are_read_from_the_rows_they_lie_in(tmp_path: Path) -> None:
    save_file({"a": torch.arange(12.0).view(4, 3), "b": torch.tensor(7.0), "c": torch.arange(5)}, tmp_path / "x")
    saved = SavedWeights(dict.fromkeys("abc", tmp_path / "x"))
    assert saved.flat("a", 2, 7).tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert saved.flat("a", 9, 12).tolist() == [9.0, 10.0, 11.0]
    assert saved.flat("b", 0, 1).tolist() == [7.0] and saved.flat("c", 1, 3).tolist() == [1, 2]
    assert saved.shapes() == {"a": (4, 3), "b": (), "c": (5,)}
    before = saved.digest()
    save_file({"a": torch.arange(12.0).view(4, 3) + 1, "b": torch.tensor(7.0), "c": torch.arange(5)}, tmp_path / "x")
    assert saved.digest() != before


def test_a_model_without_memory_has_shapes_and_ties_and_one_number_each(tmp_path: Path) -> None:
    made = policy()
    made.save(tmp_path / "model")
    model = model_without_memory(str(tmp_path / "model"), torch.float32)
    shapes = {name: p.shape for name, p in made.model.named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert {p.untyped_storage().nbytes() for p in model.parameters()} == {4}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, value in made.model.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], value)


def test_files_that_lack_a_name_are_left_to_transformers(tmp_path: Path) -> None:
    made = policy()
    made.save(tmp_path / "model")
    assert can_be_sharded(str(tmp_path / "model"))
    state = {name.replace("q_proj", "query"): p.detach().clone() for name, p in made.model.named_parameters()}
    save_file(state, tmp_path / "model" / "model.safetensors")
    assert not can_be_sharded(str(tmp_path / "model")) and not can_be_sharded(str(tmp_path / "nowhere"))


def test_dropout_is_disabled_and_untested_families_are_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    policy().save(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    assert has_dropout(model_without_memory(str(folder), torch.float32))
    loaded, _ = load_folder(str(folder), loader=ShardedLoad(Fsdp().layout).loader)
    assert not has_dropout(loaded)
    monkeypatch.setattr(model_probe, "TESTED", frozenset())
    assert not can_be_sharded(str(folder)), "its rows are compared with weights in place"


def test_a_layout_is_shared_by_all_stages_or_none() -> None:
    assert layout_of([Fsdp(), Fsdp(reshard_after_forward=False)]) == Fsdp().layout is not None
    assert layout_of([Fsdp(), Fsdp(precision="bfloat16")]) is None and layout_of([Fsdp(), Torch()]) is None
    assert layout_of([Torch()]) is None and layout_of([DeepSpeed(zero_stage=2)]) is None and layout_of([]) is None


# --- in two processes -----------------------------------------------------------------------------------------------


def work(rank: int, folder: Path) -> dict[str, Any]:
    return compared(folder, KINDS, ["full"])


def more(rank: int, folder: Path) -> dict[str, Any]:
    adapters = compared(folder, KINDS, ["lora"])
    return adapters | {
        (name, f"{form} in bfloat16"): seen for (name, form), seen in compared(folder, SHORT, FORMS).items()
    }


def compared(folder: Path, kinds: Mapping[str, Any], forms: Iterable[str]) -> dict[Any, Any]:
    """Of each trainer and form: what a policy loaded whole and one loaded in shares have apart."""
    found = {}
    for name, kind in kinds.items():
        for form in forms:
            settings = Pretrained(path=str(folder / "model"), lora=FORMS[form])
            sharing = ShardedLoad(layout_of([kind]))
            whole = settings.build(3)
            rng = torch.get_rng_state()
            shared = settings.build(3, loader=sharing.loader)
            drawn_alike = torch.equal(rng, torch.get_rng_state())
            sharing.fill(shared)
            dtype = getattr(torch, kind.precision or "float32")
            first = {n: value.to(dtype) for n, value in full_state(whole.model).items()}
            held = sum(shard_of(p)[0].numel() for p in shared.model.parameters()) / whole.n_parameters
            apart = differing(first, full_state(shared.model))
            curves = []
            for made in (whole, shared):  # two stages, between which the one is made whole and the other stays
                curve = []
                for _ in range(2):
                    trainer = kind.start(made, SCHEDULE, N_UPDATES)
                    curve += go_on(trainer, rows(), 0, 1)
                    trainer.close()
                curves.append(curve)
            apart += differing(full_state(whole.model), full_state(shared.model))
            found[name, form] = (drawn_alike, held, apart, curves)
    return found


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name, value in ours.items() if not torch.equal(value, theirs[name])]


def assert_alike(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        for drawn_alike, held, apart, curves in found.values():
            assert drawn_alike and not apart
            assert held == pytest.approx(0.5, abs=0.02)
            assert len(curves[0]) == 2 and curves[0] == curves[1]


def test_weights_and_updates_equal_those_of_a_whole_load(tmp_path: Path) -> None:
    policy().save(tmp_path / "model")
    assert_alike(together(work, tmp_path, timeout_s=300.0))


@pytest.mark.extended
def test_adapters_and_bfloat16_equal_those_of_a_whole_load(tmp_path: Path) -> None:
    policy().save(tmp_path / "model")
    assert_alike(together(more, tmp_path, timeout_s=300.0))


# --- whole runs -----------------------------------------------------------------------------------------------------

STAGE: runs.Values = {
    "kind": "policy_gradient", "steps": 2, "tasks_per_step": 4, "group_size": 4, "max_tokens_per_microbatch": 200,
    "checkpoint_every": 1,
}  # fmt: skip


def write(folder: Path, kind: str, **stage: Any) -> Path:
    trainer: runs.Values = {"kind": "deepspeed", "zero_stage": 3} if kind == "zero3" else {"kind": kind}
    trainer |= {} if kind == "torch" else {"timeout_s": 120.0}
    model = {"kind": "pretrained", "path": str(folder.parent / "model")}
    rewards = {**runs.BASE["rewards"], "short": {"kind": "overlong", "max_tokens": 6, "buffer": 5}}
    stages = [{**STAGE, **stage, "trainer": trainer}] * 2
    return runs.write(folder, stages, policy=model, rewards=rewards, evaluation={"n_tasks": 4})


def run_all(rank: int, folder: Path) -> dict[str, bool]:
    found = {}
    for kind in KINDS:
        path = folder / kind / "recipe.yaml"
        found[kind] = sharded_load(load(path), None) is not None
        found[f"{kind} with a critic"] = sharded_load(load(folder / f"{kind}-critic" / "recipe.yaml"), None) is not None
        runs.run(path, folder / f"{kind}-run")
    return found


@pytest.mark.extended
def test_runs_equal_those_of_one_process(tmp_path: Path) -> None:
    policy(vocab_size=400).save(tmp_path / "model")
    alone = runs.run(write(tmp_path / "torch", "torch"), tmp_path / "alone").folder
    for kind in KINDS:
        write(tmp_path / kind, kind)
        write(tmp_path / f"{kind}-critic", kind, advantage={"kind": "gae"}, critic={})
    for found in together(run_all, tmp_path, timeout_s=300.0):
        assert found == dict.fromkeys(KINDS, True) | {f"{kind} with a critic": False for kind in KINDS}
    expected = [line.get("loss/total") for line in runs.lines(alone)]
    assert sum(1 for value in expected if value) >= 2
    for kind in KINDS:
        lines = runs.lines(tmp_path / f"{kind}-run")
        for line, value in zip(lines, expected, strict=True):
            assert line.get("loss/total") == (value if value is None else pytest.approx(value, abs=1e-4))
