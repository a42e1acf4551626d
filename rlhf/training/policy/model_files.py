"""Loading of model and tokenizer from a Hugging Face folder or hub name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rlhf
from rlhf.errors import ModelError, boundary
from rlhf.inference.embedded.attention import check_context
from rlhf.inference.embedded.model_probe import without_dropout
from rlhf.training.checkpoints.store import check_model
from rlhf.training.policy.lora import loading_options, without_packing
from rlhf.training.policy.templates import give_template

#: Key under which a tokenizer notes that it has warned of a long text.
_LONG = "sequence-length-is-longer-than-the-specified-maximum"
#: Files of which a tokenizer has at least one.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")

#: Name of the small model that comes along, and its folder in a checkout; wheels leave it out.
BASE = "base"
BASE_FOLDER = Path(rlhf.__file__).parent / "shipped" / BASE
NO_BASE = (
    "the base model lies in the repository and not in the wheel: take its folder base/ from there, and give its path; "
    "or make it with `rlhf train base/pretrain`"
)
_NO_FOLDER = "give the folder of a saved model, or a hub name such as Qwen/Qwen3-0.6B"

#: Loads a source in a number format with further options: model, tokenizer, and names of what the files do not hold.
Loader = Callable[[str, torch.dtype, dict[str, Any]], tuple[Any, Any, list[str]]]


def base_or(path: str) -> str:
    """Folder of the base model where `path` is its name and no model lies there; else `path`, a folder as absolute."""
    path = os.path.expanduser(path)
    if path == BASE and not (Path(path) / "config.json").is_file():
        return str(BASE_FOLDER)
    return os.path.abspath(path) if os.path.isdir(path) else path


def way_to(path: str) -> str:
    """Return what to do where a policy's `path` holds no model."""
    return NO_BASE if path == str(BASE_FOLDER) else _NO_FOLDER


def check_tokens(theirs: Any, ours: Any, where: str) -> None:
    """Raise ModelError unless a model's tokenizer `theirs` has all tokens of the policy's, `ours`, by their numbers."""
    found, wanted = theirs.get_vocab(), ours.get_vocab()
    differing = [token for token, number in wanted.items() if found.get(token) != number]
    if differing:
        raise ModelError(
            "this model's tokenizer differs from the policy's, so it would misread its tokens",
            where=where,
            got=f"{len(differing)} tokens with another number or none, such as {differing[0]!r}",
            expected=f"the {len(wanted)} tokens of the policy, by the same numbers",
            hint="use a model of the same family as the policy",
        )


def check_context_of(path: str, max_context: int, where: str) -> None:
    """Raise ModelError, said of `where`, where the model of a folder cannot read rows of `max_context` tokens."""
    from transformers import AutoConfig

    with boundary(ModelError, where, "give the folder or the hub name of a causal language model"):
        config = AutoConfig.from_pretrained(base_or(path))
    check_context(config, max_context, where)


def load_folder(
    path: str,
    *,
    dtype: str = "float32",
    where: str = "",
    quantization: str | None = None,
    template: Path | None = None,
    loader: Loader | None = None,
) -> tuple[Any, Any]:
    """Model and tokenizer of a Hugging Face folder, a hub name or `base`, with a named chat template if any.

    Raises:
        ModelError: what is missing, said of `where`, by default of the recipe's `policy.path`.
        CheckpointError: the folder lies in a checkpoint or a run, and a file of it is not what was written.
    """
    where = where or f"policy.path {path}"
    path = base_or(path)
    folder = Path(path)
    local = folder.exists() or path.startswith((".", "/"))
    if local:
        check_model(folder)
    if local and not (folder / "config.json").is_file():
        raise ModelError(
            "no model in this folder",
            where=where,
            got=", ".join(sorted(p.name for p in folder.iterdir())[:8]) if folder.is_dir() else "no such folder",
            expected="a folder with config.json, tokenizer.json and *.safetensors, as save_pretrained writes it",
            hint=way_to(path),
        )
    if local and not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelError(
            "there is no tokenizer in this folder",
            where=where,
            got=", ".join(sorted(p.name for p in folder.iterdir())[:8]),
            expected=f"one of {', '.join(_TOKENIZERS)}",
            hint="copy the tokenizer's files there from the model it was trained from, as save_pretrained writes them",
        )
    options = loading_options(quantization, getattr(torch, dtype))
    try:
        model, tokenizer, missing = (loader or _load)(str(folder) if local else path, getattr(torch, dtype), options)
    except Exception as error:  # tokenizers raises bare Exception, safetensors one of its own
        raise ModelError(
            "the model cannot be loaded",
            where=where,
            got=first_line(error),
            expected="a readable causal language model with tokenizer",
            hint="check the files" if local else "check the name and that the hub can be reached, or give a folder",
        ) from error
    if missing:
        raise ModelError(
            "some of the model's weights are missing from the files",
            where=where,
            got=f"nothing for {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}",
            expected="every parameter of the model that config.json describes",
            hint="complete the files; missing weights are not initialised at random",
        )
    without_dropout(model)
    if quantization is not None:
        without_packing(model)
    give_template(tokenizer, template, where)
    return model, tokenizer


def save_folder(model: Any, folder: Path, **given: Any) -> None:
    """Write a model by its `save_pretrained`, its weights as readable as its configuration: safetensors hides them."""
    model.save_pretrained(folder, **given)
    like = next(folder.glob("*config.json"))
    for file in folder.glob("*.safetensors"):
        shutil.copymode(like, file)


def _load(source: str, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Any, Any, list[str]]:
    """Model, tokenizer, and the names of parameters that the files do not hold."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.deprecation_warnings[_LONG] = True  # said of a row by its line, where it matters
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True, **options)
    return loaded[0], tokenizer, sorted(loaded[1]["missing_keys"])


def first_line(error: Exception) -> str:
    """Class of an error, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
