"""Choices by hardware, on descriptions of devices that this machine need not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf import device
from rlhf.cli import app
from rlhf.commands.train import _say_device
from rlhf.device import Device
from rlhf.errors import RecipeError
from rlhf.estimate.device_choice import budget_for, choices, refuse_for
from rlhf.estimate.figures import total
from rlhf.estimate.memory import estimates
from rlhf.estimate.memory_preflight import parts_on_gpu, size_of
from rlhf.recipe import Recipe, load
from tests import recipe_parts
from tests.test_memory import SEVEN_B, recipe

H100, A100 = Device("NVIDIA H100", 80 * 10**9, (9, 0)), Device("NVIDIA A100", 80 * 10**9, (8, 0))
T4, P100 = Device("Tesla T4", 16 * 10**9, (7, 5)), Device("Tesla P100", 16 * 10**9, (6, 0))
CPU = Device("cpu", 24 * 10**9)
SHORT, VLLM = "policy.dtype=bfloat16", "engine={kind: vllm, kv_cache_gb: 8}"


def made(tmp_path: Path, *overrides: str) -> Recipe:
    return recipe(tmp_path, SEVEN_B, "limits.max_context=4096", *overrides, family="qwen2")


def chosen(made: Recipe, on: Device) -> dict[str, str]:
    return dict(choices(made, on))


def test_what_is_chosen_follows_the_device(tmp_path: Path) -> None:
    short, whole = made(tmp_path, SHORT, VLLM), made(tmp_path)
    assert chosen(short, CPU).keys() == {"device"}
    assert "flash" in chosen(short, H100)["attention"] and chosen(short, H100)["layers"].startswith("compiled")
    assert "older than Ampere" in chosen(short, T4)["attention"] and chosen(short, T4)["layers"].startswith("compiled")
    assert "slowly" in chosen(short, T4)["number format"] and "number format" not in chosen(short, A100)
    assert chosen(short, P100)["layers"].startswith("not compiled")
    assert "policy.dtype is float32" in chosen(whole, H100)["attention"]
    assert "bfloat16" in chosen(whole, A100)["number format"] and "float16, with" in chosen(whole, T4)["number format"]
    assert "CUDA graphs" in chosen(short, H100)["engine"] and "engine.kind=vllm" in chosen(whole, H100)["engine"]


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("policy.lora={quantization: 8bit}", "the base is in 8bit"),
        ("stages.0.trainer={kind: torch, compile: false}", "trainer.compile is false"),
        ("stages.0.trainer={kind: fsdp}", "the trainer has no such key"),
    ],
)
def test_layers_that_are_not_compiled_have_their_reason(tmp_path: Path, key: str, why: str) -> None:
    assert chosen(made(tmp_path, SHORT, key), H100)["layers"] == f"not compiled, as {why}"


@pytest.mark.parametrize(("capability", "slow"), [("AVX2", True), ("AVX512", False), ("AVX512_VNNI", False)])
def test_bfloat16_on_a_cpu_without_instructions_for_it_is_named(monkeypatch, tmp_path, capsys, capability, slow):
    import torch

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device.platform, "machine", lambda: "x86_64")
    here = device.present.__wrapped__()
    assert here.slow_bfloat16 is slow
    short = made(tmp_path, SHORT)
    assert ("policy.dtype=float32" in chosen(short, here).get("number format", "")) is slow
    assert "number format" not in chosen(made(tmp_path), here)
    monkeypatch.setattr(device, "present", lambda: here)
    _say_device(short)
    said = capsys.readouterr().err
    assert said.startswith("number format: bfloat16") if slow else not said


def test_what_a_gpu_lacks_is_refused(tmp_path: Path) -> None:
    short = made(tmp_path, SHORT, VLLM)
    for one in (CPU, A100, H100):
        refuse_for(short, one)
    with pytest.raises(RecipeError, match=r"engine\.dtype") as raised:
        refuse_for(short, T4)
    assert "float16" in (raised.value.hint or "")
    for key in ("kv_cache_dtype", "quantization"):
        eight = made(tmp_path, SHORT, f"engine={{kind: vllm, {key}: fp8}}")
        refuse_for(eight, H100)
        with pytest.raises(RecipeError, match="8-bit floats"):
            refuse_for(eight, A100)


def test_a_budget_that_fits_is_named(tmp_path: Path) -> None:
    keys = ["policy.lora={}", "stages.0.max_tokens_per_microbatch=32768", "stages.0.group_size=64"]
    fits = budget_for(made(tmp_path, SHORT, VLLM, *keys), H100)
    assert fits is not None and "would fit" in fits
    budget = fits.split("=")[1].split()[0]
    again = budget_for(made(tmp_path, SHORT, VLLM, *keys[:1], f"stages.0.max_tokens_per_microbatch={budget}"), H100)
    assert again is not None and "at the highest" in again
    never = budget_for(made(tmp_path, SHORT, VLLM), T4)
    assert never is not None and "most is" in never
    assert budget_for(made(tmp_path), CPU) is None


def test_the_stage_that_needs_most_of_the_gpu_is_compared_with_it() -> None:
    sizes = ["policy.hidden_size=1024", "policy.n_layers=8", "policy.dtype=bfloat16", "limits.max_concurrent=4"]
    offloaded = ["stages.1.trainer={kind: torch, offload_moments: true}", "stages.1.checkpoint_in_background=true"]
    made = load("quickstart", [*sizes, *offloaded, "stages.1.max_tokens_per_microbatch=8192"])
    imitating, improving = estimates(made)
    assert total(imitating.parts) < total(improving.parts), "which needs more, on GPU and host together"
    needed = total(parts_on_gpu(made, imitating, A100.memory_bytes))
    assert needed > total(parts_on_gpu(made, improving, A100.memory_bytes))
    assert budget_for(made, A100) == f"{size_of(needed)} of {size_of(A100.memory_bytes)} at the highest"


def test_show_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "present", lambda: H100)
    shown = CliRunner().invoke(app, ["show", str(recipe_parts.write(tmp_path))])
    assert shown.exit_code == 0, shown.output
    assert "1 x NVIDIA H100, 80.00 GB, compute capability 9.0" in shown.output
    assert "policy.dtype is float32" in shown.output and "on this GPU" in shown.output


def test_the_first_of_several_processes_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "present", lambda: H100)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        _say_device(made(tmp_path, SHORT, VLLM))
        assert capsys.readouterr().err.count("2 processes, each with one NVIDIA H100") == (rank == 0)
    with pytest.raises(RecipeError, match="8-bit floats"):  # each of them refuses
        monkeypatch.setattr(device, "present", lambda: A100)
        _say_device(made(tmp_path, SHORT, "engine={kind: vllm, quantization: fp8}"))
