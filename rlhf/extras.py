"""Optional packages: the extras that bring them, and the error where one is not installed."""

from __future__ import annotations

import importlib
from typing import Any

from rlhf.errors import MissingPackageError

#: Extras that pip alone cannot make: what they need names other versions of packages that are needed here.
_BY_HAND = {
    "bfcl": "pip install --no-deps bfcl-eval==2026.3.23 && pip install mpmath",
    "minihack": "pip install --no-deps nle==1.3.0 minihack==1.0.2 && pip install 'rlhf-agents[minihack]'",
    "vllm": "make install-vllm; or, on a machine with a GPU, pip install 'rlhf-agents[vllm]'",
}


def how_to_install(extra: str) -> str:
    """The command that installs the packages of an extra."""
    return _BY_HAND.get(extra, f"pip install 'rlhf-agents[{extra}]'")


def missing(extra: str, what: str, where: str, got: object) -> MissingPackageError:
    """Error of a package that is not installed, with the extra that brings it.

    Args:
        extra: that has the package.
        what: one sentence that says what is wrong.
        where: key or part that needs the package.
        got: what Python said.
    """
    return MissingPackageError(
        what, where=where, got=str(got), expected=f"the extra '{extra}'", hint=how_to_install(extra)
    )


def import_optional(module: str, extra: str, what: str, where: str) -> Any:
    """Import a module of an optional package. Raises MissingPackageError as of `missing`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(extra, what, where, error) from error
