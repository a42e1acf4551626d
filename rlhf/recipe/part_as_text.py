"""Hint for a part of a recipe that is given as text alone: a kind, a model, a file of tasks, a class."""

from __future__ import annotations

from pathlib import Path

from rlhf.catalog import CATALOG
from rlhf.errors import closest


def as_mapping(section: str, text: str) -> str:
    """Return how the part that `text` most likely means is written as a mapping."""
    known = CATALOG[section]
    if text in known or ":" in text:
        return f"write {{kind: {text}}}"
    if text.endswith(".py"):
        return f"write {{kind: {text}:Name}}, with the name of a class of that file"
    if section == "policy" and _is_path(text):
        return _model(text)
    if section == "environment" and _is_path(text):
        return _data(text)
    if (near := closest(text, known)) is not None:
        return f"write {{kind: {near}}}"
    if section == "policy":
        return _model(text)
    return f"write {{kind: NAME}} with one of the names that `rlhf recipes --kinds {section}` lists"


def _is_path(text: str) -> bool:
    """True if `text` names a file, a folder or something on a hub."""
    return "/" in text or bool(Path(text).suffix) or Path(text).exists()


def _model(text: str) -> str:
    return f"a model, in a folder or on the hub, is the path of a policy: write {{kind: pretrained, path: {text}}}"


def _data(text: str) -> str:
    if text.count("/") == 1 and not Path(text).suffix and not Path(text).exists():
        return f"a data set of the hub is read by an environment: write {{kind: dataset, hub: {text}}}"
    return f"a file of tasks is read by an environment: write {{kind: dataset, path: {text}}}"
