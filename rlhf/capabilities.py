"""Optional members of plug-ins, declared in one place with their defaults.

A plug-in need not inherit from anything: it says what it can by attributes, and may leave each of them out. For each
kind of part, such as environments, a subclass of `CapabilityView` lists the attributes that anybody asks for:

    class Capabilities(CapabilityView):
        inline = Capability(False, bool)
        max_steps = Capability[int | None](None, int)

    Capabilities(environment).inline
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class CapabilityView:
    """A part with every optional member of its kind: its own, or the default."""

    __slots__ = ("part",)

    def __init__(self, part: object) -> None:
        self.part = part


class Capability(Generic[T]):
    """Optional member of a plug-in, read on access.

    Args:
        default: stands for it where a part has none, or one of another type.
        of: type that it must have; a `collections.abc.Callable` is a method.
    """

    __slots__ = ("_default", "_name", "_of")

    def __init__(self, default: T, of: Any = object) -> None:
        self._default, self._of, self._name = default, of, ""

    def __set_name__(self, owner: type[CapabilityView], name: str) -> None:
        self._name = name

    def __get__(self, view: CapabilityView, owner: type[CapabilityView]) -> T:
        said = getattr(view.part, self._name, self._default)
        return said if isinstance(said, self._of) else self._default
