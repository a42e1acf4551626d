"""Compatibility check of a running vLLM with the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import EngineError
from rlhf.inference.vllm.instance import Instance, InstanceDownError
from rlhf.inference.vllm.start import WORKER

#: What an instance must say of itself.
_DESCRIBED = {"n_vocab": int, "max_context": int, "logprobs_mode": str, "shapes": dict, "lora_rank": int}


async def describe(instance: Instance, timeout_s: float, token: str = "") -> dict[str, Any]:
    """Description of an instance, once it is known to be usable for sampling.

    Args:
        instance: to be asked.
        timeout_s: most seconds for the answer.
        token: path of a file by which the instance tells whether it sees this machine's memory. What it found comes
            back as `token`, empty if its processes do not agree, and their GPUs as `gpus`, one a process.

    Raises:
        EngineError: it does not answer (InstanceDownError), wants a key, or lacks what is needed.
    """
    serve = "start it with `rlhf serve`"
    try:
        async with asyncio.timeout(timeout_s):
            await instance.abort([])  # does nothing, behind the same door as sampling
            answer = await instance.call("rlhf_describe", token)
    except TimeoutError:
        got = f"nothing in {timeout_s:g} s"
        raise InstanceDownError("the server did not answer in time", where=instance.name, got=got) from None
    except EngineError as error:
        other = (
            "correct engine.servers"
            if isinstance(error, InstanceDownError)
            else f"with --worker-extension-cls {WORKER}"
        )
        hint = error.hint or f"{serve}, or {other}"
        raise type(error)(error.what, where=error.where, got=error.got, expected=error.expected, hint=hint) from error
    found = answer[0] if answer else None
    if not isinstance(found, dict) or any(type(found.get(key)) is not kind for key, kind in _DESCRIBED.items()):
        raise EngineError(
            "the server does not report its model and version",
            where=instance.name,
            got=repr(answer)[:200],
            hint=f"{serve}, of the same version as this program",
        )
    tokens = _told(answer, "token")
    return found | {"token": tokens[0] if len(set(tokens)) == 1 else "", "gpus": _told(answer, "gpu")}


def _told(answers: Sequence[Any], key: str) -> tuple[str, ...]:
    """Descriptions by the processes of an instance; empty where there are none."""
    return tuple(str(worker.get(key, "")) if isinstance(worker, dict) else "" for worker in answers)


def check_fit(name: str, found: Mapping[str, Any], shapes: Mapping[str, Any], n_vocab: int, lora_rank: int) -> None:
    """Raise EngineError unless an instance that describes itself as `found` can sample for the policy."""
    theirs = found["shapes"]
    differing = [key for key, value in shapes.items() if theirs.get(key) is not None and theirs[key] != value]
    if differing or found["n_vocab"] < n_vocab:
        keys = differing or ["vocabulary"]
        ours = dict(shapes) | {"vocabulary": n_vocab}
        raise EngineError(
            "the server has another model",
            where=name,
            got=", ".join(f"{key} {theirs.get(key, found['n_vocab'])}" for key in keys),
            expected=", ".join(f"{key} {ours[key]}" for key in keys),
            hint="serve the policy of this recipe: rlhf serve RECIPE, or RUN/checkpoints/...",
        )
    if found["logprobs_mode"] != "processed_logprobs":
        raise EngineError(
            "the server's log-probs do not belong to its sampling distribution",
            where=name,
            got=f"--logprobs-mode {found['logprobs_mode']}",
            expected="--logprobs-mode processed_logprobs",
            hint="start it with `rlhf serve`",
        )
    if found["lora_rank"] < lora_rank:
        raise EngineError(
            "the server has no room for adapters of this rank",
            where=name,
            got=f"--max-lora-rank {found['lora_rank']}",
            expected=f"at least {lora_rank}",
            hint="start it with `rlhf serve`, or set engine.lora: merged",
        )
