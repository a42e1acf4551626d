"""Figures of a memory estimate: parts, their sum, and how to need less."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

#: What to change about each part of a stage; `{stage}` is its path as an override has it.
_CHANGES = {
    "weights": "use a smaller model, policy.dtype=bfloat16 or '{stage}.trainer={{kind: deepspeed, zero_stage: 3}}'",
    "gradients": "train adapters, policy.lora={{}}, or shard: '{stage}.trainer={{kind: deepspeed, zero_stage: 2}}'",
    "masters": "train adapters, policy.lora={{}}, or '{stage}.trainer={{kind: deepspeed, offload_optimizer: true}}'",
    "moments": "train adapters, policy.lora={{}}, or '{stage}.trainer={{kind: deepspeed, offload_optimizer: true}}'",
    "buffers": "change {stage}.trainer: a lower bucket_mb, or reshard_after_forward: true, whichever it has",
    "reference": "set {stage}.loss.kl to none, or train adapters, whose base is the reference",
    "teacher": "name a smaller teacher in {stage}.loss.teacher",
    "critic": "set {stage}.critic.lora={{}} or {stage}.critic.backbone=policy",
    "opponents": "lower {stage}.opponents.keep, or train adapters, policy.lora={{}}",
    "rewards": "ask a server instead, by the url of the reward, or use smaller models",
    "reward_copy": "remove {stage}.reward_refresh, or use a smaller reward model",
    "judges": "remove {stage}.judge_refresh, or ask a judge that stays",
    "background": "set {stage}.checkpoint_in_background=false",
    "engine": "use engine={{kind: vllm}} with engine.dtype=bfloat16, or servers on other GPUs: engine.servers",
    "kv_cache": "lower limits.max_context, limits.max_concurrent or engine.max_sessions",
    "activations": "lower {stage}.max_tokens_per_microbatch, and limits.max_context where rows are longer, or set "
    "{stage}.trainer.gradient_checkpointing=true",
    "logits": "lower {stage}.max_tokens_per_microbatch",
    "critic_activations": "lower {stage}.max_tokens_per_microbatch",
    "update": "train adapters, policy.lora={{}}",
    "critic_update": "set {stage}.critic.lora={{}}",
    "loading": "use a smaller model",
    "program": "start fewer processes",
}

#: The same of a stage of pairs, whose keys are others.
_CHANGES_OF_PAIRS = {
    "weights": "use a smaller model or policy.dtype=bfloat16",
    **dict.fromkeys(("gradients", "masters", "moments", "update"), "train adapters, policy.lora={{}}"),
    "activations": "lower {stage}.pairs_per_microbatch or limits.max_context, or set "
    "{stage}.gradient_checkpointing=true",
    "logits": "lower {stage}.pairs_per_microbatch",
}

#: And of one that trains a copy of the policy.
_CHANGES_OF_COPIES = dict.fromkeys(("gradients", "masters", "moments", "update"), "train adapters, {stage}.lora={{}}")


@dataclass(frozen=True)
class Part:
    """Category of memory, with its bytes.

    Attributes:
        name: of `_CHANGES`.
        n_bytes: of it, in each process.
        on_host: whether it lies in the machine's memory where the policy is on a GPU.
    """

    name: str
    n_bytes: int
    on_host: bool = False


@dataclass(frozen=True)
class Estimate:
    """Memory of each process in one stage.

    Attributes:
        path: of the stage.
        n_processes: that share it.
        held: throughout.
        passing: of these, whose parts are there together, one comes after the other.
        max_kv_cache: bytes that the cache of the rollout has at most; what is counted is in `held` or `passing`.
        logits: tokens of a pass whose logits are read, and bytes of those of one token.
        is_of_pairs: whether the stage reads pairs.
        is_of_copy: whether it trains a copy of the policy.
        is_whole: False where activations could not be found for this model, and are left out.
    """

    path: str
    n_processes: int
    held: tuple[Part, ...]
    passing: tuple[tuple[Part, ...], ...]
    max_kv_cache: int
    is_whole: bool = True
    logits: tuple[int, int] = (0, 0)
    is_of_pairs: bool = False
    is_of_copy: bool = False

    @property
    def number(self) -> int:
        """Number of the stage, from 0."""
        return int(self.path.removeprefix("stages[").removesuffix("]"))

    def on_gpu(self, all_of_gpu: int) -> Estimate:
        """The estimate of a GPU.

        Its output layer keeps logits for the backward pass where they are few, and versions of the policy that play are
        brought to it.
        """
        from rlhf.training.backends.fused_head import held_bytes

        kept = held_bytes(*self.logits, all_of_gpu)
        passing = tuple(
            tuple(replace(p, n_bytes=max(p.n_bytes, kept)) if p.name == "logits" else p for p in parts)
            for parts in self.passing
        )
        players = tuple(replace(p, on_host=False) for p in self.held if p.name == "opponents")
        return replace(self, passing=(*passing, players))

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of memory at the peak."""
        return self.held + max(self.passing, key=total)

    def parts_of(self, *, host: bool) -> tuple[Part, ...]:
        """Parts at the peak of the machine's memory, or of the GPU's, where the policy is on a GPU."""
        held, *passing = (tuple(p for p in parts if p.on_host == host) for parts in (self.held, *self.passing))
        return held + max(passing, key=total)

    def change(self, part: Part) -> str:
        """Say what to change so that there is less of it."""
        changes = _CHANGES | (_CHANGES_OF_PAIRS if self.is_of_pairs else {})
        changes |= _CHANGES_OF_COPIES if self.is_of_copy else {}
        return changes[part.name].format(stage=self.path.replace("[", ".").replace("]", ""))

    def values(self) -> dict[str, Any]:
        """Return plain values, in bytes."""
        found = {part.name: part.n_bytes for part in self.held}
        kept = sum(n for name, n in found.items() if name not in ("kv_cache", "program"))
        there = {part.name: part.n_bytes for group in self.passing for part in group}
        return {
            "stage": self.path,
            "n_processes": self.n_processes,
            **found,
            **there,
            "training_total": kept,
            "max_kv_cache": self.max_kv_cache,
            "on_host": total(self.parts_of(host=True)),
            "peak": total(self.parts),
            "is_whole": self.is_whole,
        }


def total(parts: Iterable[Part]) -> int:
    """Bytes of all parts."""
    return sum(part.n_bytes for part in parts)
