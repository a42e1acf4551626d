"""Choices that hardware makes for a recipe, with their reasons, and what it cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from rlhf.device import Device
from rlhf.errors import ModelError, RecipeError
from rlhf.estimate.figures import Estimate, total
from rlhf.estimate.memory import estimates, precision_of
from rlhf.estimate.memory_preflight import parts_on_gpu, size_of
from rlhf.inference.settings import VllmSettings
from rlhf.training.backends.settings import Torch

if TYPE_CHECKING:
    from rlhf.recipe import Recipe

#: Least token budget that is proposed.
_LEAST_BUDGET = 512


def refuse_for(recipe: Recipe, device: Device) -> None:
    """Raise RecipeError where the device lacks what the recipe asks for."""
    if not device.is_gpu:
        return
    engine, dtype = recipe.engine, _dtype(recipe)
    if isinstance(engine, VllmSettings) and not engine.servers:
        if (dtype if engine.dtype == "auto" else engine.dtype) == "bfloat16" and not device.has_bfloat16:
            raise RecipeError(
                "vLLM has no bfloat16 on this GPU",
                where="engine.dtype",
                got=f"bfloat16 on {_named(device)}",
                expected="float16 or float32; bfloat16 needs compute capability 8.0",
                hint="set engine.dtype=float16",
            )
        for key in ("kv_cache_dtype", "quantization"):
            if getattr(engine, key) == "fp8" and not device.has_fp8:
                raise RecipeError(
                    "this GPU has no 8-bit floats",
                    where=f"engine.{key}",
                    got=f"fp8 on {_named(device)}",
                    expected="a GPU of compute capability 8.9 (Ada, Hopper) or later",
                    hint="remove the key",
                )


def choices(recipe: Recipe, device: Device, n_processes: int = 1) -> Iterator[tuple[str, str]]:
    """Yield what is chosen for a device, and why; each of several processes takes one."""
    if not device.is_gpu:
        yield "device", f"CPU, {size_of(device.memory_bytes)}"
        if _dtype(recipe) != "float32" and not device.has_bfloat16:
            slow = "which this CPU has no instructions for: many times as slow as policy.dtype=float32"
            yield "number format", f"{_dtype(recipe)}, {slow}"
        return
    how_many = f"{n_processes} processes, each with one" if n_processes > 1 else f"{device.n} x"
    yield "device", f"{how_many} {_named(device)}"
    dtype = _dtype(recipe)
    short = dtype != "float32"
    if short and device.has_flash:
        yield "attention", "variable-length flash attention, one call a layer"
    else:
        why = f"policy.dtype is {dtype}" if device.has_flash else "the GPU is older than Ampere"
        yield "attention", f"a call for rows of like length, as {why}"
    why_not = _uncompiled(recipe, device)
    yield "layers", f"not compiled, as {why_not}" if why_not else "compiled, up to a minute in the first step"
    if not short:
        best = "bfloat16" if device.has_bfloat16 else "float16, with trainer: {kind: deepspeed}"
        yield "number format", f"float32, a fraction of the GPU's speed: set policy.dtype to {best}"
    elif dtype == "bfloat16" and not device.has_bfloat16:
        yield "number format", "bfloat16, which this GPU computes slowly: float16 with trainer: {kind: deepspeed}"
    if isinstance(recipe.engine, VllmSettings):
        yield "engine", "vLLM" if recipe.engine.eager is True else "vLLM with CUDA graphs"
    else:
        yield "engine", "embedded, for CPUs and small models: use engine.kind=vllm on a GPU"


def _uncompiled(recipe: Recipe, device: Device) -> str:
    """Reason why no stage compiles layers; empty where one does. See `Policy.compiles_well`."""
    asked = {stage.trainer.compile for stage in recipe.stages if isinstance(stage.trainer, Torch)}
    lora, dtype = recipe.policy.lora, _dtype(recipe)
    if True in asked:
        return ""
    if "auto" not in asked:
        return "trainer.compile is false" if asked else "the trainer has no such key"
    if dtype == "float32":
        return f"policy.dtype is {dtype}"
    if lora is not None and (lora.quantization or lora.roles):
        return f"the base is in {lora.quantization}" if lora.quantization else "policy.lora.roles is set"
    return "" if device.has_triton else "the GPU is older than Volta"


def budget_for(recipe: Recipe, device: Device, n_processes: int = 1) -> str | None:
    """Say whether the recipe fits the device, and with which token budget it would; None where that is not known."""
    if not device.is_gpu:
        return None
    try:
        found = max(estimates(recipe, n_processes), key=lambda one: _on_gpu(recipe, one, device))
    except ModelError:
        return None
    needed = _on_gpu(recipe, found, device)
    if needed <= device.memory_bytes:
        return f"{size_of(needed)} of {size_of(device.memory_bytes)} at the highest"
    number = found.number
    stage: Any = recipe.stages[number]
    said = f"{size_of(needed)}, more than the {size_of(device.memory_bytes)} there are"
    has_budget = any(key.name == "max_tokens_per_microbatch" for key in fields(stage))
    budget: int = stage.max_tokens_per_microbatch if has_budget else 0
    while (budget := budget // 2) >= _LEAST_BUDGET:
        smaller = replace(stage, max_tokens_per_microbatch=budget)
        stages = (*recipe.stages[:number], smaller, *recipe.stages[number + 1 :])
        there = estimates(replace(recipe, stages=stages), n_processes)[number]
        if _on_gpu(recipe, there, device) <= device.memory_bytes:
            return f"{said}; stages.{number}.max_tokens_per_microbatch={budget} would fit"
    most = max(parts_on_gpu(recipe, found, device.memory_bytes), key=lambda part: part.n_bytes)
    return f"{said}; most is {most.name}: {found.change(most)}"


def _on_gpu(recipe: Recipe, estimate: Estimate, device: Device) -> int:
    return total(parts_on_gpu(recipe, estimate, device.memory_bytes))


def _dtype(recipe: Recipe) -> str:
    return precision_of(recipe, recipe.stages[-1])


def _named(device: Device) -> str:
    major, minor = device.capability or (0, 0)
    return f"{device.name}, {size_of(device.memory_bytes)}, compute capability {major}.{minor}"
