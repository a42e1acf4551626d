"""What an environment declares about itself, read while a recipe is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhf.errors import EnvError, boundary

if TYPE_CHECKING:
    from environments.base import Properties


def declared_by(environment: object, path: str = "environment") -> Properties:
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


def agent_keys(environment: object, given: object) -> object:
    """Recipe keys of an agent, with those that `environment` suggests (`agent_defaults`) for one of kind `chat`."""
    defaults = getattr(environment, "agent_defaults", None)
    if not defaults or not isinstance(given, Mapping) or given.get("kind", "chat") != "chat":
        return given
    return {**defaults, **given}


def limit_keys(environment: object, given: object) -> object:
    """Recipe keys of the limits, with those that `environment` suggests (`limit_defaults`)."""
    defaults = getattr(environment, "limit_defaults", None)
    return {**defaults, **given} if defaults and isinstance(given, Mapping) else given
