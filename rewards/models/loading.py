"""Loading of the models that rewards ask."""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf.digests import verify_model

_LOADING = threading.Lock()


def loaded(path: str, auto_class: str) -> tuple[Any, Any]:
    """Model and tokenizer; loaded once in a process, whichever thread asks.

    Args:
        path: a folder, or a name on a hub.
        auto_class: class of transformers that loads the model.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: weights are missing.
        Exception: whatever transformers and safetensors raise.
    """
    with _LOADING:
        return _loaded(path, auto_class)


@lru_cache(maxsize=6)
def _loaded(path: str, auto_class: str) -> tuple[Any, Any]:
    import torch
    import transformers

    folder = Path(path).expanduser()
    source = str(folder) if folder.is_dir() else path
    if not folder.is_dir() and path.startswith((".", "/", "~")):
        raise FileNotFoundError(f"there is no folder {path}")
    verify_model(folder)
    model, found = getattr(transformers, auto_class).from_pretrained(source, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):  # drawn at random, they would look like a model that says something
        raise ValueError(f"it has no weights for {', '.join(missing[:3])}, so it is not a trained model of its kind")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(device).eval(), transformers.AutoTokenizer.from_pretrained(source)
