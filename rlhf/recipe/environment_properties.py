"""Declared properties of an environment, read while a recipe is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhf.errors import EnvError, boundary

if TYPE_CHECKING:
    from environments.base import Properties


def properties_declared_by(environment: object, path: str = "environment") -> Properties:
    """Return the properties of `environment`.

    Args:
        environment: may be anybody's, whose `properties` may compute something.
        path: YAML path of it, for messages.

    Raises:
        EnvError: they cannot be read.
    """
    from environments.base import properties_of

    with boundary(EnvError, f"{path}.properties", "run `rlhf check environment`"):
        return properties_of(environment)


def with_defaults(part: str, environment: object, given: object) -> object:
    """Recipe keys of a part, with those that the environment suggests: its `agent_defaults` or `limits_defaults`.

    An agent of another kind than `chat`, or than the environment suggests, is left as it is given.
    """
    defaults = getattr(environment, f"{part}_defaults", None)
    if not defaults or not isinstance(given, Mapping):
        return given
    suggested = defaults.get("kind", "chat")
    if given.get("kind", suggested) != suggested:
        return given
    return {**defaults, **given}
