"""Settings that decide success: environment, limits of an attempt, and the reward that says what is solved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from rlhf.catalog import CATALOG
from rlhf.digests import read_listed
from rlhf.errors import DataError
from rlhf.evaluation.folder import PLAN, RECIPE, SUMMARY, VERSIONS
from rlhf.renamed import (
    RENAMED_KEYS,
    RENAMED_OF_REWARDS,
    RENAMED_VALUES,
    under_new_names,
    with_new_keys,
    with_new_kind,
    without_warnings,
)

#: Limits that say how long an attempt may take; those of a policy, of failures and of single calls are not among them.
_LIMITS = ("max_turns", "max_generations_per_turn", "episode_timeout_s")
#: Keys of an environment that say what is trained on, and by how many processes it is served.
OF_TRAINING = ("n_train", "train", "weight", "n_workers")
#: Keys that a part of before may have under another name, or with another name of a value.
_OLD = {old for keys in RENAMED_KEYS.values() for old in keys} | {key for _, key in RENAMED_VALUES}


def settings_of(folder: Path, *, is_run: bool, with_score: bool = False) -> dict[str, Any]:
    """Return the settings that attempts were judged by: `seed`, `sampling` and, for each part, those of `judged_by`.

    Args:
        folder: of an evaluation, or of a run, whose evaluations have one part, `tasks`.
        is_run: which of them it is.
        with_score: of an evaluation, also all rewards that the score of an attempt is made of, and the digest of its
            tasks, which tells files of one name apart by what they hold.

    Returns:
        Plain values; without what the folder does not say.

    Raises:
        DataError: a file is damaged.
    """
    path = folder / (RECIPE if is_run else PLAN)
    values, record = _read(path, yaml.safe_load), _read(folder / VERSIONS, json.loads)
    try:
        names, code = record.get("solved_by", {}), record.get("code", {})
        if is_run:
            own = values.get("evaluation", {})
            sampling = {key: own[key] for key in ("temperature",) if key in own}
            suite = {**own, "sampling": sampling, "parts": {"tasks": values}}
        else:
            suite = values.get("suite", {})
        found = {key: suite[key] for key in ("seed", "sampling") if key in suite}
        held = {name: _renewed(part) for name, part in suite.get("parts", {}).items()}
        codes = {name: _code_below(code, "" if is_run else f"parts.{name}.") for name in held}
        parts = {name: judged_by(part, names.get(name, ""), codes[name]) for name, part in held.items()}
        data = _read(folder / SUMMARY, json.loads).get("data", {}) if with_score else {}
        for name, part in parts.items() if with_score else ():
            part |= {key: data[name][key] for key in ("tasks",) if key in data.get(name, {})}
            rewards = held[name]["rewards"]
            part |= {"rewards": _anywhere(rewards), "names": sorted(rewards)}
            part |= {"code": {key: _files(_code_below(codes[name], f"rewards.{key}.")) for key in rewards}}
        return found | {"parts": parts}
    except (TypeError, AttributeError) as error:
        raise DataError("this file is damaged", where=str(path), got=str(error)[:200]) from error


def changing_parts(folder: Path, parts: Iterable[str], *, is_run: bool) -> set[str]:
    """Of the parts of an evaluation, or of a run's, those whose environment was not deterministic on record.

    Raises:
        DataError: a file is damaged.
    """
    record = _read(folder / VERSIONS, json.loads)
    held = record.get("environment" if is_run else "deterministic")
    said = held if isinstance(held, Mapping) else {}
    return {part for part in parts if said.get("deterministic" if is_run else part) is False}


def recipe_of_run(folder: Path) -> dict[str, Any]:
    """Plain values of a run's recipe; none for a folder that has none. Raises DataError where it is damaged."""
    return dict(_read(folder / RECIPE, yaml.safe_load))


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    """Values of a file; none where it is missing or empty. Raises DataError where it is damaged."""
    try:
        return (parse(read_listed(path)) if path.is_file() else None) or {}
    except (ValueError, yaml.YAMLError) as error:
        raise DataError("this file is damaged", where=str(path), got=str(error)[:200]) from error


def _renewed(part: Mapping[str, Any]) -> dict[str, Any]:
    """Environment, limits and rewards of a part on record, under the present names of their kinds and keys."""
    from rlhf.rollout.limits import Limits

    rewards = part.get("rewards", {})
    with without_warnings():
        return {
            "environment": _with_new_names("environment", part.get("environment", {})),
            "limits": with_new_keys(Limits, part.get("limits", {}), "limits"),
            "rewards": {
                name: _with_new_names("reward", under_new_names(reward, RENAMED_OF_REWARDS, name))
                for name, reward in rewards.items()
            },
        }


def _with_new_names(section: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """A part, and the environments and rewards in it, under their present names, as far as they can be imported."""
    kind, values = with_new_kind(section, str(part.get("kind")), ""), {**part}
    if "kind" in part:
        values["kind"] = kind
    if kind in CATALOG[section] and _OLD & values.keys():
        module, _, name = CATALOG[section][kind].target.partition(":")
        with suppress(ImportError):
            cls = getattr(import_module(module), name)
            values = {**with_new_keys(cls, values, "")} if isinstance(cls, type) else values
    return {key: _inner(key, value) for key, value in values.items()}


def _inner(key: str, value: Any) -> Any:
    """A value within a part: that of `environment` or `reward` is a part too, as each of a combination has one."""
    if not isinstance(value, Mapping):
        return value
    if key in ("environment", "reward"):
        return _with_new_names(key, value)
    if "reward" in value:
        from rewards.combinators.combine import Part

        value = with_new_keys(Part, value, "")
    return {name: _inner(str(name), one) for name, one in value.items()}


def judged_by(part: Mapping[str, Any], solved_by: str | None, code: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what decides success in a recipe or a part of a suite.

    Args:
        part: its plain values.
        solved_by: name of the reward that says what is solved; None where the environment does, '' where that is not
            known.
        code: dotted key -> name and digest of the Python file that it names; None where no digests are known.

    Returns:
        `environment` and `limits`, as far as they say what is asked, and `solved_by`, the keys of the reward; both with
        `code`, the digests of their own files, where these are known.
    """
    limits, rewards, code = part.get("limits", {}), part.get("rewards", {}), code or {}
    # Other keys of an environment may name the program of an agent.
    of_world = {
        key: digest
        for key, digest in _code_below(code, "environment.").items()
        if key.split(".")[-1] in ("kind", "tools")  # a class of tools may judge the attempt
    }
    solved_by = next((name for name, reward in rewards.items() if "success_threshold" in reward), solved_by)
    found = {
        "environment": {**_asked(part.get("environment", {})), **_files(of_world)},
        "limits": {key: limits[key] for key in _LIMITS if key in limits},
    }
    if solved_by is None:
        found["solved_by"] = {"kind": "the environment"}
    elif solved_by in rewards:
        reward = {key: value for key, value in rewards[solved_by].items() if key != "weight"}
        own = _files(_code_below(code, f"rewards.{solved_by}."))
        found["solved_by"] = {"success_threshold": 1.0, **_portable(reward), **own}
    return found


def _code_below(code: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Entries of `code` whose keys begin with `prefix`, under what follows it."""
    return {key.removeprefix(prefix): digest for key, digest in code.items() if key.startswith(prefix)}


def _files(code: Mapping[str, str]) -> dict[str, str]:
    """Digests as one value, whatever keys name the files; empty where there are none."""
    return {"code": ", ".join(sorted(code.values()))} if code else {}


def differences(one: Any, other: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys that two settings give other values, with both; an older version may have written fewer keys.

    >>> differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4})
    {'a.b': (1, 3)}
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        shared = [key for key in one if key in other]
        found = (differences(one[key], other[key], f"{path}.{key}" if path else str(key)) for key in shared)
        return {key: values for each in found for key, values in each.items()}
    return {} if one == other else {path: (one, other)}


def _asked(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of an environment that define its tasks, without those of worker processes."""
    kind, inner = environment.get("kind"), environment.get("environment")
    if kind == "worker_processes" and isinstance(inner, Mapping):
        return _asked(inner)
    if kind == "external" and isinstance(inner, Mapping):
        own = {key: environment[key] for key in ("kind", "success_threshold", "reward") if key in environment}
        return _asked(inner) if own.get("reward") == "environment" else own | {"environment": _asked(inner)}
    # Paths and addresses differ between machines: what was told there is compared by itself.
    own = _portable({key: value for key, value in environment.items() if key not in OF_TRAINING})
    return {key: _asked(value) if isinstance(value, Mapping) else value for key, value in own.items()}


def _portable(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys whose values mean the same on any machine; of a file of the user's own its name is left."""
    named = {"kind": Path(keys["kind"]).name} if isinstance(keys.get("kind"), str) else {}
    return {key: value for key, value in keys.items() if not _is_place(value)} | named


def _anywhere(value: Any) -> Any:
    """Values as they are on any machine: without addresses, and of each file or folder its name."""
    if isinstance(value, Mapping):
        return {key: _anywhere(one) for key, one in value.items() if not _is_place(one) or one.startswith("/")}
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "./", "../")) else value


def _is_place(value: Any) -> bool:
    """True for an absolute path or an address."""
    return isinstance(value, str) and (value.startswith("/") or re.match(r"\w+://", value) is not None)
