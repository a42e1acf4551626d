"""Recipe text: YAML in, plain Python values out, and back.

YAML 1.1, which PyYAML speaks, reads `yes` as true, `1e-3` as text and `1:30` as ninety. Recipes are read by the core
schema of YAML 1.2: only `true`/`false` are truth values, and a number is what it looks like. A key that is written
twice is an error. Interpolation (`${seed}`) is OmegaConf's, with its own resolvers only: there is none that evaluates
code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf.errors import RecipeError
from rlhf.recipe.size_limits import refuse_long_references, refuse_many_nodes, refused
from rlhf.recipe.yaml_errors import of_yaml
from rlhf.renamed import other_names

_NUMBER_STARTS = list("-+.0123456789")
_CORE: tuple[tuple[str, str, list[str]], ...] = (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        _NUMBER_STARTS,
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", ["<"]),
)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Core schema of YAML 1.2, and no repeated keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  PyYAML's own name

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Compose as usual, and refuse a key that is written twice; merged keys are not there yet."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{name}' is written twice", key.start_mark
                )
            seen.add(name)
        return node


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Quotes whatever either YAML version would read as something else than text."""


for _tag, _pattern, _first in _CORE:
    for _cls in (_Loader, _Dumper):
        _cls.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _represent_text(dumper: Any, value: str) -> Any:
    # Unquoted, these line breaks would come back as a space.
    style = '"' if any(mark in value for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


def parse(text: str, where: str) -> Any:
    """Read YAML text into plain values. Raises RecipeError with line and column."""
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:  # of a character that YAML has not
        raise of_yaml(error, text, where) from error
    try:
        node = loader.get_single_node()
        refuse_many_nodes(node, where)
        return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise refused(where, "too many levels") from None
    except yaml.YAMLError as error:
        raise of_yaml(error, text, where) from error
    finally:
        loader.dispose()


def to_text(values: Mapping[str, Any]) -> str:
    """YAML text that `parse` reads back, keys in the given order, short lists on one line."""
    text = yaml.dump(
        escaped(values), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
    )
    return str(text)


def from_text(text: str, where: str) -> dict[str, Any]:
    """Plain values that `to_text` has written."""
    return overridden(parse(text, where), (), where)


def read(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Read a recipe file, apply `key=value` overrides, resolve interpolations; the result is plain Python values."""
    try:
        values = parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            "the recipe cannot be read",
            where=str(path),
            got=str(error),
            expected="a text file in UTF-8",
            hint="check the file and its rights",
        ) from error
    if not isinstance(values, dict):
        raise RecipeError(
            "a recipe is a mapping of keys to values",
            where=str(path),
            got="an empty file" if values is None else type(values).__name__,
            expected="policy: ..., environment: ..., stages: ...",
            hint="`rlhf recipes` lists recipes to start from",
        )
    return overridden(values, overrides, str(path))


def overridden(values: Mapping[str, Any], overrides: Sequence[str], where: str) -> dict[str, Any]:
    """Return plain values with `key=value` overrides applied and interpolations resolved."""
    try:
        config = OmegaConf.create(dict(values))
    except OmegaConfBaseException as error:
        raise _of_omegaconf(error, where) from error
    for override in overrides:
        _apply(config, override)
    refuse_long_references(OmegaConf.to_container(config), where)  # type: ignore[arg-type]
    try:
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise _of_omegaconf(error, where) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def parse_fields(assignments: Sequence[str]) -> dict[str, Any]:
    """Read `key=value` words with dotted keys into nested plain values."""
    return overridden({}, assignments, "command line")


def _apply(config: DictConfig, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key or key != key.strip():
        raise RecipeError(
            "not an override",
            where="command line",
            got=override,
            expected="key=value without spaces around the sign, such as seed=2 or stages.1.steps=5",
            hint="put quotes around a value that has spaces: 'agent.system=Play well.'",
        )
    value = parse(text, f"override {key}")
    is_cut = value is None and text.strip().casefold() not in ("", "~", "null")
    if is_cut or (isinstance(value, str) and " #" in text and value == text.partition(" #")[0].strip()):
        raise RecipeError(
            "the value is cut, because # begins a comment",
            where=f"override {key}",
            got=override,
            expected="a quoted value",
            hint=f"write '{key}=\"{text}\"'",
        )
    try:
        _copy_references(config, key)
        _take_names(config, key)
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    except (OmegaConfBaseException, IndexError, TypeError, ValueError) as error:
        raise RecipeError(
            "the override names no place in the recipe",
            where=f"override {key}",
            got=override,
            expected=_places(config),
            hint="`rlhf show` prints the recipe with all its keys",
        ) from error


def _copy_references(config: DictConfig, key: str) -> None:
    """Replace references above `key` by copies of what they refer to now, which the override then leaves alone."""
    node: Any = config
    for name in re.findall(r"[^.\[\]]+", key)[:-1]:
        if not OmegaConf.is_config(node):
            return
        at: Any = int(name) if OmegaConf.is_list(node) and name.isdecimal() else name
        if OmegaConf.is_interpolation(node, at):
            found = OmegaConf.to_container(node[at]) if OmegaConf.is_config(node[at]) else node[at]
            # What refers to places beside it is resolved where it stands.
            node[at] = OmegaConf.to_container(node[at], resolve=True) if "${." in str(found) else found
        node = node.get(at) if OmegaConf.is_dict(node) or at < len(node) else None


def _take_names(config: DictConfig, key: str) -> None:
    """Rename keys of the recipe to what an override calls them, where one of both has the name of before a renaming."""
    node: Any = config
    names = re.findall(r"[^.\[\]]+", key)
    for above, name in zip(["", *names], names, strict=False):
        if OmegaConf.is_dict(node) and name not in node and above not in _WITH_NAMES:
            for other in other_names(name):
                if other in node:
                    node[name] = node.pop(other)
                    break
        node = node.get(name) if OmegaConf.is_dict(node) else node[int(name)] if OmegaConf.is_list(node) else None


#: Keys whose own keys are names that the recipe's author chose.
_WITH_NAMES = ("rewards", "weights", "parts")


def _places(config: DictConfig) -> str:
    """Description of the keys that an override can set, with the stages of the recipe."""
    stages = config.get("stages") if "stages" in config else None
    kinds = [f"stages.{i} ({one.get('kind', '?')})" for i, one in enumerate(stages or []) if hasattr(one, "get")]
    return f"the path of a key, such as seed{' or one of ' if kinds else ''}{', '.join(kinds)}"


def _of_omegaconf(error: OmegaConfBaseException, where: str) -> RecipeError:
    key = str(getattr(error, "full_key", "") or "")
    return RecipeError(
        "a value cannot be filled in",
        where=key or where,
        got=str(error).splitlines()[0],
        expected="${key} with a key that this recipe writes out, such as ${seed} beside seed: 0",
        hint="write that key out, or the value here; \\${ stands for the two characters themselves",
    )


def escaped(value: Any) -> Any:
    """`value` with `${` written so that reading it back gives the same text."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)
    if isinstance(value, Mapping):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    return value
