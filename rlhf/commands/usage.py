"""Usage errors of the command line in four parts: where, got, expected, do."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from rlhf.errors import UsageError, closest, meant, nearest


def usage_error(error: Any, group: TyperGroup, begun: str | None = None) -> UsageError:
    """Return what the parser of the command line complains of, in four parts.

    Args:
        error: of the parser; has `format_message`, and `ctx`, the context of the command that was read, or None.
        group: of all commands.
        begun: name of the command whose options were being read, for an error without a context.
    """
    command = error.ctx.command if error.ctx is not None else group.commands.get(begun or "", group)
    called = "rlhf" if command is group else f"rlhf {command.name}"
    said, help_ = error.format_message().strip().rstrip("."), f"{called} --help lists its options"
    if said.startswith("No such option"):
        option = error.option_name
        known = _options(command, error.ctx)
        hint = _misplaced(option, group, error.ctx) if command is group else ""
        near = closest(option.strip("-"), (name.strip("-") for name in known))  # dashes are alike in all
        hint = hint or (meant(f"--{near}") if near else "") or (_as_key(option) if _takes_keys(command) else help_)
        return UsageError("no such option", where=called, got=option, expected=", ".join(known) or "none", hint=hint)
    if said.startswith("No such command"):
        name, known = said.split("'")[1], list(group.commands)
        hint = nearest(name, known) or help_
        return UsageError("no such command", where=called, got=name, expected=", ".join(known), hint=hint)
    if (wanted := _number_wanted(error)) and hasattr(error.__cause__, "errors"):  # pydantic's, in its own words
        what, got = said.partition(":")[0], str(error.__cause__.errors()[0]["input"])
        hint = f"change the value; {help_}"
        return UsageError(what[:1].lower() + what[1:], where=called, got=got, expected=wanted, hint=hint)
    expected = error.ctx.get_usage().removeprefix("Usage: ") if error.ctx is not None else ""
    return UsageError(said[:1].lower() + said[1:], where=called, expected=expected or _form(error, command), hint=help_)


def _number_wanted(error: Any) -> str:
    """Description of the number that an option or argument takes: `a whole number, at least 1`; '' for another type."""
    parameter = getattr(error, "param", None)
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    noun = "a whole number" if annotation is int else "a number" if annotation is float else ""
    limits = (("at least", getattr(parameter, "min", None)), ("at most", getattr(parameter, "max", None)))
    bounds = [f"{word} {limit:g}" for word, limit in limits if limit is not None]
    return ", ".join([noun, *bounds]) if noun else ""


def _options(command: Any, ctx: Any) -> list[str]:
    names = (name for one in command.get_params(ctx) for name in (*one.opts, *one.secondary_opts))
    return sorted(name for name in names if name.startswith("--"))


def _form(error: Any, command: Any) -> str:
    """Form of the option that an error without a context is about: `--profile N`."""
    name = getattr(error, "option_name", "")
    option = next((one for one in command.params if name in one.opts), None)
    return "" if option is None else name if option.is_flag else f"{name} {option.metavar or 'VALUE'}"


def _misplaced(option: str, group: TyperGroup, ctx: Any) -> str:
    """Suggestion for a misplaced option: the command that it names, or one that it belongs to."""
    if option.strip("-") in group.commands:
        return f"it is a command, without dashes: rlhf {option.strip('-')}"
    takers = [name for name, one in group.commands.items() if option in _options(one, ctx)]
    return f"it comes after the command that takes it: rlhf {takers[0]} ... {option}" if takers else ""


def _takes_keys(command: Any) -> bool:
    return any("KEY=VALUE" in str(parameter.metavar) for parameter in command.params)


def _as_key(option: str) -> str:
    return f"a key of the recipe is given as KEY=VALUE, without dashes: {option.strip('-')}=..."
