"""Text of stored tokens, as the tokenizer of a run's newest checkpoint gives it; without one their ids are shown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf.digests import verify_model


def load_tokenizer(run_folder: Path) -> Any | None:
    """Newest readable `tokenizer.json` below a run folder, or None."""
    from tokenizers import Tokenizer

    for path in _newest_first(run_folder):
        try:
            verify_model(path.parent, weights=False)
            return Tokenizer.from_file(str(path))
        except Exception:  # the tokenizers library raises plain Exception; ids are shown instead
            continue
    return None


def _newest_first(run_folder: Path) -> list[Path]:
    """Files `tokenizer.json` below a folder; those of a checkpoint that is removed meanwhile are left out."""
    found = []
    for folder, _, names in os.walk(run_folder):  # unlike rglob it passes over a folder that has gone
        if "tokenizer.json" in names:
            path = Path(folder, "tokenizer.json")
            with suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, str(path), path))
    return [path for *_, path in sorted(found, reverse=True)]


def pieces(tokenizer: Any | None, token_ids: Sequence[int]) -> list[str]:
    """Give the text that each token adds to the decoded text.

    A token that ends inside a character adds none: it is shown by its name in the vocabulary, else by its id.
    """
    from tokenizers.decoders import DecodeStream

    if tokenizer is None:
        return [f"[{i}]" for i in token_ids]
    shown: list[str] = []
    stream = DecodeStream(skip_special_tokens=False)
    for i in token_ids:
        try:
            added = stream.step(tokenizer, i)
        except Exception:  # the tokenizers library raises plain Exception where bytes before this token are no text
            stream = DecodeStream(skip_special_tokens=False)
            added = stream.step(tokenizer, i)
        shown.append(added or tokenizer.id_to_token(i) or f"[{i}]")
    return shown
