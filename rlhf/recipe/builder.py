"""Strict builder: a YAML mapping becomes a live object, or an error names the wrong key.

It works on any class whose parameters have types: pydantic and standard dataclasses, and plain classes with an
annotated `__init__` that keeps its arguments as attributes of the same name. Values are taken as YAML gave them; the
only conversions are a whole number where a number is wanted, a list where a tuple is wanted, and text where a path or
an enumeration is wanted.
"""

from __future__ import annotations

import collections.abc
import inspect
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from rlhf.catalog import CATALOG
from rlhf.errors import RecipeError, RlhfError, UnknownKeyError, closest, nearest
from rlhf.given_parts import is_given
from rlhf.recipe.aliases import alias_hint
from rlhf.recipe.describe import expected, given
from rlhf.recipe.environment_properties import properties_declared_by
from rlhf.recipe.keys import Key, holds_objects, is_settings, keys_of, section_in, unreadable_types, without_none
from rlhf.recipe.part_as_text import as_mapping
from rlhf.recipe.places import KEYS, NESTED_KEYS, above, beside, nested_key_hint
from rlhf.recipe.values import ARBITRARY, CHANGE, convert_data, join, validated, wrong
from rlhf.registry import kind_of, resolve, section_of_type
from rlhf.renamed import with_new_keys, with_new_kind
from rlhf.sections import DEFAULT_KIND


def build(cls: Any, values: Any, path: str, *, base: Path, default: object = None) -> Any:
    """Make a `cls` from `values`.

    Args:
        cls: the class.
        values: a mapping of its keys; nested mappings become nested objects.
        path: YAML path of `values`, for messages.
        base: folder of the recipe, for kinds that are files.
        default: an object of the same class whose values hold where `values` says nothing.

    Raises:
        RecipeError: unknown key, missing key, wrong type or range, or a refusal of the class itself.
    """
    keys = keys_of(cls, path)
    if not isinstance(values, Mapping):
        is_path = isinstance(values, str) and "path" in keys
        raise RecipeError(
            f"this must be the settings of {cls.__name__}",
            where=path,
            got=given(values),
            expected=f"a mapping with {', '.join(keys) or 'no keys'}",
            hint=f"write {{path: {values[:80]}}}" if is_path else "write {key: value, ...}",
        )
    values = with_new_keys(cls, values, path)
    _refuse_unknown(values, keys, path, cls.__name__, base)
    arguments: dict[str, Any] = {}
    for name, key in keys.items():
        inherited = getattr(default, name) if type(default) is cls else key.make_default and key.make_default()
        if name in values:
            arguments[name] = convert(key.annotation, values[name], join(path, name), base=base, default=inherited)
        elif type(default) is cls:
            arguments[name] = inherited
        elif key.make_default is None:
            wanted = expected(key.annotation)
            raise RecipeError(
                "a key is missing", where=join(path, name), got="nothing", expected=wanted, hint=f"write {name}: ..."
            )
    return _construct(cls, keys, arguments, values, path)


def build_part(section: str, values: Any, path: str, *, base: Path, default: object = None) -> Any:
    """Make the part that `values` describes: a mapping with a kind and the keys of that kind."""
    if not isinstance(values, Mapping):
        raise RecipeError(
            f"this must be {'an' if section[0] in 'aeiou' else 'a'} {section}",
            where=path,
            got=given(values),
            expected="a mapping with a kind",
            hint=as_mapping(section, values) if isinstance(values, str) else "write {kind: ...}",
        )
    kind = values.get("kind", DEFAULT_KIND.get(section) or (default and kind_of(section, default)))
    if not isinstance(kind, str):
        raise RecipeError(
            "the kind is missing" if kind is None else "wrong type",
            where=join(path, "kind"),
            got="nothing" if kind is None else given(kind),
            expected=", ".join(CATALOG[section]) + ", package.module:Name, or ./file.py:Name",
            hint="write kind: ... first; `rlhf recipes --kinds` lists all kinds",
        )
    kind = with_new_kind(section, kind, path)
    target = resolve(section, kind, base=base, where=join(path, "kind"))
    settings: Mapping[Any, Any] = {key: value for key, value in values.items() if key != "kind"}
    if not inspect.isclass(target):
        if settings:
            key = str(next(iter(settings)))
            raise RecipeError(
                "a function takes no keys of its own",
                where=join(path, key),
                got=f"a key for {kind}",
                expected="weight, monitor or success_threshold" if section == "reward" else "no keys",
                hint=nearest(key, ("weight", "monitor", "success_threshold") if section == "reward" else ())
                or "make it a dataclass with fields and a __call__",
            )
        return target
    settings = with_new_keys(target, settings, path)
    _refuse_of_other_kinds(section, kind, settings, keys_of(target, path), path, base)
    return build(target, settings, path, base=base, default=default)


def build_environment(values: Any, path: str, *, base: Path) -> Any:
    """Make the environment that `values` describes, in worker processes if it declares that it needs them."""
    environment = build_part("environment", values, path, base=base)
    if not properties_declared_by(environment, path).isolated:
        return environment
    from environments.workers.pool import Processes

    return Processes(environment=environment)


def convert(annotation: Any, value: Any, path: str, *, base: Path, default: object = None) -> Any:
    """Return `value` as an object of type `annotation`, or raise RecipeError naming `path`."""
    if not holds_objects(annotation):
        data = convert_data(annotation, value, path)
        return _beside(data, base) if isinstance(data, Path) else data
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner = convert(args[0], value, path, base=base, default=default)
        return validated(annotation, inner, path)
    if origin in (typing.Union, types.UnionType):
        return convert(_member_for(args, value), value, path, base=base, default=default)
    section = section_of_type(annotation)
    if section:
        return build_part(section, value, path, base=base, default=default)
    is_mapping = origin in (dict, collections.abc.Mapping)
    if isinstance(value, list) and origin is not None and not is_mapping:
        items = [convert(args[0], item, f"{path}[{i}]", base=base) for i, item in enumerate(value)]
        return items if origin is list else tuple(items)
    if isinstance(value, Mapping) and is_mapping:
        return {str(key): convert(args[1], item, join(path, str(key)), base=base) for key, item in value.items()}
    if origin is not None:
        raise wrong("wrong type", annotation, value, path)
    return build(annotation, value, path, base=base, default=default)


def plain(annotation: Any, value: Any) -> Any:
    """Return the plain YAML value that `convert` turns back into `value`; every default is written out."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value).__module__ == "numpy" and not getattr(value, "shape", None):
        return value.item()
    if isinstance(value, int | float):  # of a class of its own, such as IntEnum
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        item = (typing.get_args(without_none(annotation)) or (Any, Any))[-1]
        return {_plain_key(key): plain(item, entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        args = typing.get_args(without_none(annotation)) or (Any,)
        ordered = sorted(value) if isinstance(value, set | frozenset) else value
        return [plain(args[i] if i < len(args) and args[i] is not ... else args[0], v) for i, v in enumerate(ordered)]
    if holds_objects(annotation):
        return plain_part(section_in(annotation), value)
    return TypeAdapter(annotation, config=ARBITRARY).dump_python(value, mode="json")


def _plain_key(key: Any) -> Any:
    """Key as YAML keeps it: numbers stay numbers."""
    return key if type(key) in (bool, int, float) else str(key)


def plain_part(section: str | None, part: Any) -> dict[str, Any]:
    """Mapping of all keys of `part`, with its kind where it belongs to a section."""
    kind = {"kind": kind_of(section, part)} if section else {}
    if inspect.isroutine(part) or is_given(part):
        return kind
    return kind | {name: plain(key.annotation, getattr(part, name)) for name, key in keys_of(type(part)).items()}


def _beside(named: Path, base: Path) -> Path:
    """Path relative to the recipe, as for `./file.py` kinds, or to the working folder: whole, where there is one.

    Of `FILE.py:Class` it is the file's.
    """
    file, colon, name = named.name.partition(".py:")
    if colon:
        return Path(f"{_beside(named.with_name(f'{file}.py'), base)}:{name}")
    there, here = base / named.expanduser(), named.expanduser()
    return there.resolve() if there.exists() else here.absolute() if here.exists() else here


def _refuse_unknown(values: Mapping[Any, Any], keys: Mapping[str, Key], path: str, name: str, base: Path) -> None:
    known = [*keys, *OF_EVERY_REWARD] if re.fullmatch(r"rewards\.[^.\[]+", path) else list(keys)
    for key in values:
        if key not in keys:
            close = closest(str(key), known)
            raise UnknownKeyError(
                f"{name} has no key '{key}'",
                where=join(path, str(key)),
                got=f"{key}: {given(values[key])}",
                expected=", ".join(sorted(known, key=lambda name: name != close)) or "no keys at all",
                hint=_meant_by_kind(key, values[key], keys)
                or _elsewhere(str(key), keys, path)
                or _of_another_part(str(key), path)
                or _one_level_down(str(key), keys, base)
                or (above(str(key)) if path.partition(".")[0].partition("[")[0] in KEYS else "")
                or _ELSEWHERE.get(str(key))
                or nearest(str(key), known)
                or "remove the key",
            )


def _of_another_part(name: str, path: str) -> str:
    """Key of a recipe that stands in another of its parts than `path`; '' for others."""
    top = re.split(r"[.\[]", path)[0]
    is_another = top in KEYS and NESTED_KEYS.get(name, top).partition(".")[0] != top
    return nested_key_hint(name) if is_another else ""


def _elsewhere(name: str, keys: Mapping[str, Key], path: str) -> str:
    """Key that another toolkit calls so, or that stands elsewhere: what a stage calls it, where `path` is one's."""
    if re.fullmatch(r"stages\[\d+\]\.pairs", path):
        return alias_hint(name, _OF_PAIRS)
    if not re.fullmatch(r"stages\[\d+\]", path):
        return alias_hint(name)
    return beside(name, keys) or alias_hint(name, keys)


#: Keys of a stage that learns from pairs, for a key that stands among those of its pairs.
_OF_PAIRS = ("pairs", "beta", "reference", "epochs", "batch_size", "pairs_per_microbatch", "optimizer")

#: Keys that a recipe has beside those of a reward.
OF_EVERY_REWARD = ("weight", "monitor", "success_threshold")

#: Key that no part of a recipe has -> where what it names belongs.
_ELSEWHERE = {"strategy": "a strategy belongs to an evaluation: a suite's key strategy, or `rlhf evaluate --strategy`"}

#: What is built of an option of its own, `--strategy`, which no override reaches.
_OF_OPTIONS = frozenset({"strategy"})


def _meant_by_kind(name: str, value: Any, keys: Mapping[str, Key]) -> str:
    """Key of `keys` that a misplaced kind is for: 'tree' is for `rollout`. '' for none."""
    if name != "kind" or not isinstance(value, str):
        return ""
    holders = [(key.name, section_in(key.annotation)) for key in keys.values()]
    found = [(holder, section) for holder, section in holders if section and value in CATALOG[section]]
    return "".join(f"{value} is a kind of {of}: write {holder}: {{kind: {value}}}" for holder, of in found[:1])


def _one_level_down(name: str, keys: Mapping[str, Key], base: Path, *, of_kinds: bool = True) -> str:
    """Key of `keys` with a sub-key of this name: 'lr' belongs to `optimizer` of a stage. '' where none has.

    Keys whose sub-keys depend on a kind are looked at only `of_kinds`.
    """
    holders = []
    for key in keys.values():
        section, settings = section_in(key.annotation), without_none(key.annotation)
        if section:
            held = of_kinds and any(name in _keys_of_kind(section, kind, base) for kind in CATALOG[section])
        else:
            held = is_settings(settings) and name in keys_of(settings)
        holders += [key.name] if held else []
    return f"it is a key of {' or '.join(holders)}: write {holders[0]}: {{..., {name}: ...}}" if holders else ""


def _refuse_of_other_kinds(
    section: str, kind: str, settings: Mapping[str, Any], keys: Mapping[str, Key], path: str, base: Path
) -> None:
    """Raise RecipeError for a key of another kind of the section."""
    for key in settings:
        if key in keys:
            continue
        others = [other for other in CATALOG[section] if other != kind and key in _keys_of_kind(section, other, base)]
        if others:
            alias = _elsewhere(str(key), keys, path) if section == "stage" else ""
            below = _one_level_down(str(key), keys, base, of_kinds=False)
            raise UnknownKeyError(
                f"kind {kind} has no key '{key}'",
                where=join(path, str(key)),
                got=f"{key}: {given(settings[key])}",
                expected=", ".join(keys) or "no keys at all",
                hint=alias
                or f"'{key}' belongs to kind {' or '.join(others[:3])}; {below and f'or {below}; '}to change the "
                f"kind on the command line, give all its keys: {_replaced(path, 'kind: ..., ...')}",
            )


def _keys_of_kind(section: str, kind: str, base: Path) -> Mapping[str, Key]:
    try:
        return keys_of(resolve(section, kind, base=base))
    except RlhfError:  # its package is not installed
        return {}


def _replaced(path: str, by: str) -> str:
    """Override that replaces all at a YAML path: 'stages.1.loss={...}'."""
    dotted = path.replace("[", ".").replace("]", "")
    return f"'{dotted}={{{by}}}'"


def _construct(
    cls: Any, keys: Mapping[str, Key], arguments: dict[str, Any], values: Mapping[str, Any], path: str
) -> Any:
    try:
        made = cls(**arguments)
    except ValidationError as error:
        raise _of_refusal(error, keys, values, path) from error
    except RlhfError as error:
        raise type(error)(
            error.what, where=join(path, error.where), got=error.got, expected=error.expected, hint=error.hint
        ) from error
    except PydanticUserError as error:
        raise unreadable_types(cls, path, error) from error
    except Exception as error:  # the class may be anybody's, and refuses in its own way
        reason = str(error) if isinstance(error, ValueError) else f"no {type(error).__name__}: {error}"
        raise _unfit(values, path, reason) from error
    for name in keys:
        if not hasattr(made, name):
            raise RecipeError(
                f"{cls.__name__} does not store '{name}', so a run could not write its settings down",
                where=join(path, name),
                got=f"no attribute {cls.__name__}.{name}",
                expected="each argument as an attribute of the same name",
                hint=f"make it a dataclass, or write self.{name} = {name} in its __init__",
            )
    return made


def _of_refusal(error: ValidationError, keys: Mapping[str, Key], values: Mapping[str, Any], path: str) -> RecipeError:
    """Say what a validator of the class itself refused."""
    first = error.errors(include_url=False)[0]
    reason = str(first.get("ctx", {}).get("error") or first["msg"])
    name = str(first["loc"][0]) if first["loc"] else ""
    if name not in keys:
        return _unfit(values, path, reason)
    if first["type"] not in ("value_error", "assertion_error"):
        reason = expected(keys[name].annotation)
    return RecipeError("wrong value", where=join(path, name), got=given(values.get(name)), expected=reason, hint=CHANGE)


def _unfit(values: Mapping[str, Any], path: str, reason: str) -> RecipeError:
    return RecipeError(
        "these settings do not fit together",
        where=path,
        got=_listed(values),
        expected=reason,
        hint=CHANGE
        if path in _OF_OPTIONS
        else f"{CHANGE}; on the command line {_replaced(path, '...')} replaces them all",
    )


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {given(value)}" for key, value in values.items()) or "the defaults"


def _member_for(members: tuple[Any, ...], value: Any) -> Any:
    """Choose the member of a union that `value` is meant for."""
    if value is None and type(None) in members:
        return type(None)
    objects = [m for m in members if holds_objects(m)]
    rest = [m for m in members if not holds_objects(m) and m is not type(None)]
    if isinstance(value, Mapping) or not rest:
        fitting = [
            m for m in objects if is_settings(m) and isinstance(value, Mapping) and set(value) <= set(keys_of(m))
        ]
        return (fitting or objects)[0]
    return typing.Union[tuple(rest)]  # noqa: UP007  a union made at run time
