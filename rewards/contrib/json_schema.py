"""Verifier of answers in JSON: their schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic.dataclasses import dataclass

from rewards.answers.extract import after_thinking
from rewards.answers.text import last_action, last_reply
from rlhf.data import Task, Trajectory, Verdict
from rlhf.errors import MissingPackageError
from rlhf.extras import import_optional
from rlhf.settings import STRICT

_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)
_MAX_TEXT = 100_000


@dataclass(frozen=True, kw_only=True, config=STRICT)
class JsonSchema:
    """1 if the last action is JSON that a JSON Schema accepts, else 0; needs no reference.

    The JSON is the whole text, or the last fenced block in it. `NaN` and `Infinity`, which are no JSON, are refused.
    """

    schema: Mapping[str, Any]
    """The schema, of draft 2020-12 unless its `$schema` says otherwise."""

    def __post_init__(self) -> None:
        try:
            validator_of(_as_text(self.schema))
        except MissingPackageError:
            raise
        except Exception as error:
            raise ValueError(f"schema: not a JSON Schema: {getattr(error, 'message', error)}") from error

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge the last action; never raises."""
        value, wrong = parsed_last(trajectory)
        if wrong:
            return Verdict(0.0, why=wrong)
        try:
            error = next(iter(validator_of(_as_text(self.schema)).iter_errors(value)), None)
        except RecursionError:
            return Verdict(0.0, why="nested too deeply")
        except ArithmeticError as error:  # of `multipleOf`, with a number beyond all floats
            return Verdict(0.0, why=f"cannot be compared: {error}")
        return Verdict(float(error is None), why="valid" if error is None else str(error.message)[:200])


def parsed_last(trajectory: Trajectory) -> tuple[Any, str]:
    """Parsed JSON of the last action, else of its answer or the whole reply, as `parsed`."""
    value, wrong = parsed(after_thinking(last_action(trajectory)))
    if wrong:
        other, still = parsed(last_reply(trajectory))
        value, wrong = (value, wrong) if still else (other, "")
    return value, wrong


def parsed(text: str) -> tuple[Any, str]:
    """Return the JSON value of a text, and what is wrong with it, empty where nothing is."""
    if len(text) > _MAX_TEXT:
        return None, f"longer than {_MAX_TEXT} characters"
    blocks = _FENCE.findall(text)
    try:
        return json.loads(blocks[-1] if blocks else text, parse_constant=_refused), ""
    except (ValueError, RecursionError) as error:
        return None, f"no JSON: {str(error)[:80]}"


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _as_text(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, sort_keys=True)


@cache
def validator_of(schema: str) -> Any:
    """Return what checks values against a schema. Raises jsonschema's SchemaError, and MissingPackageError."""
    library = import_optional("jsonschema", "rewards", "'json_schema' needs a package that is not installed", "")
    values = json.loads(schema)
    kind = library.validators.validator_for(values, default=library.Draft202012Validator)
    kind.check_schema(values)
    return kind(values)
