"""A local causal language model with a server's interface: messages in, a reply out."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from typing import Any

from rewards.models.loading import loaded
from rlhf.data.control_tokens import ControlTokens

#: How many tokens are listed of what may come first.
N_LISTED = 20
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class LocalChat:
    """A folder, or the name of a model on a hub; loaded once in a process, and asked by one thread at a time."""

    path: str

    def reply(self, messages: Sequence[Mapping[str, str]], max_tokens: int, temperature: float, seed: int) -> str:
        """Reply of the model, the same for the same seed; its author's defaults of sampling are left out."""
        import torch
        from transformers import GenerationConfig

        with ExitStack() as stack:
            stack.enter_context(_ONE_AT_A_TIME)
            model, tokenizer = load_chat(self.path)
            stack.enter_context(torch.random.fork_rng([model.device] if model.device.type == "cuda" else []))
            stack.enter_context(torch.inference_mode())
            torch.manual_seed(seed)
            ids = _ids(model, tokenizer, messages)
            sampled = {"temperature": temperature, "top_k": 0} if temperature > 0 else {}
            pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
            eos = model.generation_config.eos_token_id
            keys = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": temperature > 0}
            model = copy(model)  # which shares its weights: a held one keeps its defaults
            model.generation_config = GenerationConfig(**keys)  # type: ignore[no-untyped-call]
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **sampled)
            return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))

    def first_token(self, messages: Sequence[Mapping[str, str]]) -> list[tuple[str, float]]:
        """The likeliest first tokens of a reply with their log-probs in nats, likeliest first."""
        import torch

        with _ONE_AT_A_TIME, torch.inference_mode():
            model, tokenizer = load_chat(self.path)
            logps = model(_ids(model, tokenizer, messages)).logits[0, -1].float().log_softmax(-1)
            found = logps.topk(min(N_LISTED, len(logps)))
            return [
                (str(tokenizer.decode([i])), float(x))
                for i, x in zip(found.indices.tolist(), found.values.tolist(), strict=True)
            ]


#: Models that are in memory already, by the names that stand for their paths.
_HELD: dict[str, tuple[Any, Any]] = {}


def hold(name: str, model: Any, tokenizer: Any) -> None:
    """Let `name`, given as a path, stand for a model in memory until it is released."""
    _HELD[name] = model, tokenizer


def release(name: str) -> None:
    """Forget what `name` stood for, if anything."""
    _HELD.pop(name, None)


def load_chat(path: str) -> tuple[Any, Any]:
    """Model and tokenizer of a path or held name; see `loaded`."""
    return _HELD[path] if path in _HELD else loaded(path, "AutoModelForCausalLM")


def _ids(model: Any, tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Any:
    """Ids `[1, L]` of messages and the beginning of a reply; plain text where the tokenizer has no template.

    Control tokens that a message spells out are ordinary text: a record of an attempt cannot end the turn it stands in.
    """
    import torch

    if tokenizer.chat_template:
        control = ControlTokens(tokenizer)
        said = [{**message, "content": control.escaped(message["content"])} for message in messages]
        text = str(tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))
        ids: Sequence[int] = control.encode(text)
    else:
        plain = "\n\n".join([*(m["content"] for m in messages), "Reply: "])
        ids = tokenizer(plain, split_special_tokens=True)["input_ids"]
    return torch.tensor([ids], device=next(model.parameters()).device)
