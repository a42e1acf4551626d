"""The command line. Arguments are read before anything heavy is imported, so that help and mistakes are quick."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rlhf.commands import (
    check,
    compare,
    environments,
    evaluate,
    export,
    gateway,
    new,
    serve,
    show,
    stop,
    train,
    tune,
    view,
)
from rlhf.commands.contrib import browse, extrapolate, memory_store, play, score
from rlhf.commands.output import STATE, caution, report
from rlhf.commands.usage import usage_error

#: By command: old option, or option and value -> new one, read for one release.
_RENAMED = {
    "evaluate": {"--also-trained": "--allow-overlap"},
    "tune": {"--keep": "--reduction-factor"},
    "score": {"--passes": "--threshold"},
    "gateway": {"--reward=posted": "--reward=client", "--reward=world": "--reward=environment"},
}


def with_new_options(args: list[str]) -> list[str]:
    """Arguments of a command under the present names of its options, with a caution for each old one."""
    renamed = _RENAMED.get(next((arg for arg in args if not arg.startswith("-")), ""), {})
    found: list[str] = []
    for arg in args:
        joined = f"{found[-1]}={arg}" if found and found[-1] == "--reward" else arg
        if joined in renamed:
            found, arg = found[: -1 if joined != arg else None], joined
        old, equals, value = (arg, "", "") if arg in renamed else arg.partition("=")
        if old in renamed:
            caution(f"{old} is now called {renamed[old]}; the next release no longer reads {old}")
        found.append(renamed.get(old, old) + equals + value)
    return found


class _Group(TyperGroup):
    """Accepts `--debug` anywhere in a command, so that it can be appended."""

    as_json = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move `--debug` to the front, then parse as usual."""
        self.as_json = "--json" in args
        args = with_new_options(args)
        if "--debug" in args:
            args = ["--debug", *(arg for arg in args if arg != "--debug")]
        if not args:  # the help is wanted
            return super().parse_args(ctx, args)
        with self._told(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with self._told(ctx):
            return super().invoke(ctx)

    @contextmanager
    def _told(self, ctx: Any) -> Iterator[None]:
        """Say in the project's own form what of the options and arguments cannot be read."""
        try:
            yield
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            raise typer.Exit(report(usage_error(error, self, ctx.invoked_subcommand), as_json=self.as_json)) from error


app = typer.Typer(
    cls=_Group,
    name="rlhf",
    help="Post-train language-model agents with reinforcement learning, from a recipe.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_asked: bool) -> None:
    if is_asked:
        browse.version()
        raise typer.Exit()


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the stack trace of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print what `rlhf version` prints.")
    ] = False,
) -> None:
    """Post-train language-model agents with reinforcement learning, from a recipe."""
    STATE.debug = debug


app.command("train")(train.train)
app.command("tune")(tune.tune)
app.command("stop")(stop.stop)
app.command("evaluate")(evaluate.evaluate)
app.command("compare")(compare.compare)
app.command("leaderboard")(compare.leaderboard)
app.command("score")(score.score)
app.command("export")(export.export)
app.command("extrapolate")(extrapolate.extrapolate)
app.command("serve")(serve.serve)
app.command("serve-environment")(serve.serve_environment)
app.command("gateway")(gateway.gateway)
app.command("show")(show.show)
app.command("check")(check.check)
app.command("environments")(environments.environments)
app.command("play")(play.play)
app.command("new")(new.new)
app.command("recipes")(browse.recipes)
app.command("trajectories")(browse.trajectories)
app.command("memory")(memory_store.memory)
app.command("report")(browse.report)
app.command("view")(view.view)
app.command("top")(view.top)
app.command("version")(browse.version)


def main() -> None:
    """Run the command line; the entry point of the `rlhf` script."""
    # Threads that wait by spinning slow each other down many times over when the machine has other work to do.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app(prog_name="rlhf")  # also for `python -m rlhf.cli`


if __name__ == "__main__":
    main()
