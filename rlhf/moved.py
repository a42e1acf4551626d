"""Import hook for module and class names of before the redesign, for one release.

An old name imports what it became and warns with the new name. The table is `moved.txt`: one old and one new name a
line, `module` or `module:Class`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class RenamedWarning(FutureWarning):
    """A name of before the redesign, which still works for one release."""


_PACKAGES = frozenset({"rlhf", "environments", "rewards", "agents"})


@cache
def new_names() -> Mapping[str, str]:
    """Return the new name of every old one, as `module` or `module:Class`."""
    lines = Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines()
    return dict(line.split() for line in lines if line)


class _Moved(ModuleType):
    """A module under its old name: attributes come from the new one."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        old = f"{self.__name__}:{name}"
        module, _, attribute = new_names().get(old, f"{new_names()[self.__name__]}:{name}").partition(":")
        if attribute not in (found := vars(importlib.import_module(module))):
            raise AttributeError(f"{module} has no {attribute!r}, which {self.__name__} was asked for")
        return found[attribute]


class _Finder(MetaPathFinder, Loader):
    """Finds modules by their old names, where no module of that name exists."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in _PACKAGES or fullname not in new_names():
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = new_names()[spec.name]
        warnings.warn(
            f"{spec.name} is now {new}; the old name goes with the next release", RenamedWarning, stacklevel=2
        )
        importlib.import_module(new)
        return _Moved(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: attributes are looked up when they are asked for."""


def install() -> None:
    """Let old names be imported in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
