"""Preference pairs in files: strict reading of written ones, and storing of trained ones."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from environments.tasks.dataset_files import json_lines
from environments.tasks.dataset_files import read as read_rows
from rlhf.data import Message, Role
from rlhf.errors import EnvError, RecipeError, nearest, whole
from rlhf.rollout.renderer import Renderer
from rlhf.training.stages.chat_messages import Line, keys_of
from rlhf.training.stages.pairs import Pair, Side
from rlhf.training.stages.rated import Rated

#: Fields of a line with a pair, and of one with a reply that is good or bad.
_FIELDS, _RATED = ("prompt", "chosen", "rejected"), ("prompt", "completion", "label")
#: Keys that messages have, in this or another form, and calls of tools have not.
_OF_MESSAGES = {"role", "content", "from", "value"}
_DIFFERENT = "two ways to go on that differ"
#: Kinds of files that are read as tables; others are read as JSON lines.
_TABLES = (".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True, slots=True)
class Written:
    """A line of a file: a conversation, and two ways to go on."""

    line: int
    prompt: tuple[Message, ...]
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class LabelledReply:
    """A reply of a file with its label.

    Attributes:
        line: its row.
        prompt: the messages before it.
        text: the reply.
        label: 1 for a good reply and 0 for a bad one, or points on any scale.
        reference: of the task, for rewards that compare with one; None where the row has none.
    """

    line: int
    prompt: tuple[Message, ...]
    text: str
    label: float
    reference: str | None = None


def read(path: Path, where: str) -> list[Written]:
    """Rows with prompt, chosen and rejected, or two conversations that differ at the end; at least one.

    Args:
        path: of the file.
        where: YAML path of the key that names it, for messages.

    Raises:
        RecipeError: the file, or a line of it, cannot be used; the line is named by its number.
    """
    return [line.pair(row) for line, row in _rows(path, where)]


def read_rated(path: Path, where: str) -> list[LabelledReply]:
    """Rows with prompt, completion and label, true or false; of pairs both sides. As `read` otherwise."""
    return [reply for line, row in _rows(path, where) for reply in line.rated(row)]


def read_labelled(path: Path, where: str) -> list[Written] | list[LabelledReply]:
    """Rows all of which are pairs as of `read`, or all replies with prompt, completion, label and maybe a reference."""
    rows = _rows(path, where)
    values = rows[0][1]
    if "label" not in values and "completion" not in values:
        return [line.pair(row) for line, row in rows]
    return [line.labelled(row) for line, row in rows]


def _rows(path: Path, where: str) -> list[tuple[_PairLine, dict[str, Any]]]:
    """Rows of a file, or of a `datasets` folder; at least one. Raises RecipeError."""
    is_table = path.is_dir() or path.suffix.lower() in _TABLES
    try:
        rows = read_rows(path, where) if is_table else json_lines(path)
        found = [(_PairLine(where, path, number), dict(row)) for number, row in rows]
    except EnvError as error:
        told = {
            "got": error.got,
            "expected": error.expected or "a file of JSON lines, a table, or a folder of `datasets`",
            "hint": error.hint or "give its path: a relative one is looked for beside the recipe",
        }
        at = where if error.where == where else f"{where}, {error.where}"
        raise RecipeError(error.what, where=at, **told) from error
    if not found:
        raise RecipeError(
            "there are no pairs in this file",
            where=where,
            got=f"{path}: no rows",
            expected='lines such as {"prompt": "...", "chosen": "...", "rejected": "..."}',
            hint="write one pair per line",
        )
    return found


class _PairLine(Line):
    """Row of a file of pairs, or of rated replies."""

    def rated(self, values: dict[str, Any]) -> list[LabelledReply]:
        """Read a row with one reply, or both sides of a pair; other columns are ignored."""
        if "completion" not in values and "label" not in values:
            pair = self.pair(values)
            sides = ((pair.chosen, True), (pair.rejected, False))
            return [LabelledReply(self.number, pair.prompt, text, is_good) for text, is_good in sides]
        values = {name: _decoded(value) for name, value in values.items()}
        self.check_names(values, _RATED)
        label = values["label"]
        if isinstance(label, str) and label.strip().lower() in ("true", "false"):  # a table has nothing but texts
            label = label.strip().lower() == "true"
        if not isinstance(label, bool):
            raise self.wrong("label says neither good nor bad", repr(values["label"])[:80], "true or false")
        return [LabelledReply(self.number, self.prompt(values), self.said(values, "completion"), label)]

    def labelled(self, values: dict[str, Any]) -> LabelledReply:
        """Read a row with one reply and its label; other columns are ignored."""
        values = {name: _decoded(value) for name, value in values.items()}
        self.check_names(values, _RATED)
        label, reference = values["label"], values.get("reference")
        text = str(label).strip().lower()
        try:
            found = float({"true": 1, "false": 0}.get(text, text))
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise self.wrong("label is no number", repr(label)[:80], "true or false, 1 or 0, or points on one scale")
        said = None if reference in (None, "") else str(reference)
        return LabelledReply(self.number, self.prompt(values), self.said(values, "completion"), found, said)

    def prompt(self, values: Mapping[str, Any]) -> tuple[Message, ...]:
        """Messages before the reply, of which a text is one of the user's."""
        prompt = values["prompt"]
        return self.messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, "prompt")

    def pair(self, values: dict[str, Any]) -> Written:
        """Read a row; columns beside those that are needed are passed over."""
        values = self.with_prompt({name: _decoded(value) for name, value in values.items()})
        self.check_names(values, _FIELDS)
        messages = self.prompt(values)
        chosen, rejected = self.said(values, "chosen"), self.said(values, "rejected")
        if chosen == rejected:
            raise self.wrong("chosen and rejected are the same", chosen[:80], _DIFFERENT)
        if not chosen.strip():
            raise self.wrong("chosen says nothing", repr(chosen), "a reply")
        return Written(self.number, messages, chosen, rejected)

    def with_prompt(self, values: dict[str, Any]) -> dict[str, Any]:
        """Take the messages that both sides begin with for the prompt, where sides are whole conversations."""
        chosen, rejected = values.get("chosen"), values.get("rejected")
        sides = [side for side in (chosen, rejected) if isinstance(side, list) and len(side) > 1]
        if not isinstance(chosen, list) or not isinstance(rejected, list) or len(sides) < 2:
            return values
        if chosen == rejected:
            raise self.wrong("chosen and rejected are the same", repr(chosen[-1])[:80], _DIFFERENT)
        n = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)
        if not n or n + 1 < max(map(len, sides)):
            got = f"{len(chosen)} and {len(rejected)} messages, {n} of them in common"
            raise self.wrong("chosen and rejected part before their last message", got, "one reply each at the end")
        return values | {"prompt": chosen[:n], "chosen": chosen[n:], "rejected": rejected[n:]}

    def said(self, values: Mapping[str, Any], name: str) -> str:
        """Assistant text: a string, or one message."""
        value = values[name]
        if isinstance(value, str):
            return value
        messages = self.messages(value, name)
        if len(messages) != 1 or messages[0].role is not Role.ASSISTANT:
            got = ", ".join(message.role.value for message in messages)
            raise self.wrong(
                f"{name} is not one reply", f"messages of {got}", "a text, or one message of the assistant"
            )
        return messages[0].content

    def messages(self, value: Any, name: str) -> tuple[Message, ...]:
        found = []
        for item in self.items(value, name):
            message = self.message(item)
            if message.calls:
                raise self.wrong(f"a message of {name} calls tools", repr(item)[:80], "text alone")
            keys = keys_of(item) or ()
            if any(key in item and item[key] is None for key in keys):
                raise self.wrong(f"a message of {name} has no text", repr(item)[:80], "a text")
            self.check_names(item, keys)
            found.append(Message(message.role, message.content))
        return tuple(found)

    def check_names(self, values: Mapping[str, Any], names: Sequence[str]) -> None:
        """Raise RecipeError if `values` lack one of `names`."""
        missing = [name for name in names if name not in values]
        if not missing:
            return
        got = ", ".join(values) or "nothing"
        if unknown := [key for key in values if key not in names]:
            hint = nearest(unknown[0], missing)
            if names == _FIELDS and "completion" in values and "label" in values:
                hint = "replies with labels are learnt by a preference stage with loss: kto"
            hint = hint or f"the field for '{missing[0]}' needs that name"
            raise self.wrong(f"there is no field '{unknown[0]}'", got, ", ".join(names), hint)
        raise self.wrong(f"the field '{missing[0]}' is missing", got, ", ".join(names))


def _decoded(value: Any) -> Any:
    """Value of a cell, in which a table may hold messages, or one, as JSON."""
    if isinstance(value, str) and value.startswith(("[{", "{")):
        with suppress(ValueError):
            found = json.loads(value)
            found = found if isinstance(found, list) else [found]
            if any(isinstance(one, dict) and _OF_MESSAGES & set(one) for one in found):
                return found
    return value


def rendered(found: Sequence[Written], renderer: Renderer, max_context: int, path: Path, where: str) -> list[Pair]:
    """Give written pairs the tokens with which the policy would have said them.

    Raises:
        RecipeError: a line is longer than the policy's context.
    """
    pairs = []
    for written in found:
        prompt = renderer.prompt(written.prompt).token_ids
        chosen, rejected = (_side(prompt, renderer.encode_reply(text)) for text in (written.chosen, written.rejected))
        longest = max(len(side.token_ids) for side in (chosen, rejected))
        if longest > max_context:
            raise Line(where, path, written.line).wrong(
                "this pair is longer than the policy's context", f"{longest} tokens", f"at most {max_context}"
            )
        # Pairs of one prompt are the pairs of one task.
        pairs.append(Pair(f"{path.name}/{hash_of(prompt)}", chosen, rejected))
    return pairs


def rendered_replies(
    found: Sequence[LabelledReply], renderer: Renderer, max_context: int, path: Path, where: str
) -> list[Rated]:
    """Give written replies the tokens with which the policy would have said them. Raises as `rendered`."""
    rated = []
    for written in found:
        prompt = renderer.prompt(written.prompt).token_ids
        side = _side(prompt, renderer.encode_reply(written.text))
        if len(side.token_ids) > max_context:
            raise Line(where, path, written.line).wrong(
                "this reply is longer than the policy's context",
                f"{len(side.token_ids)} tokens",
                f"at most {max_context}",
            )
        rated.append(Rated(f"{path.name}/{hash_of(prompt)}", side, bool(written.label)))
    return rated


def hash_of(ids: Sequence[int]) -> str:
    """A name of a prompt, the same in every process."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:12]


def _side(prompt: tuple[int, ...], said: tuple[int, ...]) -> Side:
    return Side(prompt + said, (False,) * len(prompt) + (True,) * len(said))


def save(path: Path, pairs: Sequence[Pair | Rated]) -> None:
    """Write pairs, or replies, as JSON lines, whole or not at all: ids, and which of them are compared."""
    with whole("pairs", path) as partial:
        partial.write_text("".join(json.dumps(asdict(pair)) + "\n" for pair in pairs))
