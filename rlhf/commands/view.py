"""`rlhf view` and `rlhf top`: watch runs while they train."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rlhf.commands.output import AsJson, caution, command, print_json, results
from rlhf.evaluation.folder import HOMES, no_run

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@command
def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN]...", help="Runs, evaluations, or folders of them (default: runs and evaluations)."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on, or the next free one.")] = 8470,
    host: Annotated[str, typer.Option(help="Address to listen on; the default serves only this machine.")] = (
        "127.0.0.1"
    ),
    redact: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Redact matches of this regular expression. Repeatable."),
    ] = None,
    until_closed: Annotated[bool, typer.Option("--until-closed", hidden=True)] = False,
    as_json: AsJson = False,
) -> None:
    """Open a live viewer of runs in the browser: metrics, groups, trajectories with tokens, evaluations.

    It only reads run folders, so it works on runs in progress, finished runs and copies from other machines.

    Examples: rlhf view; rlhf view runs/quickstart-seed0 runs/quickstart-seed1; rlhf view runs --redact 'user-[0-9]+'
    """
    from rlhf.viewer.redaction import Redaction
    from rlhf.viewer.serve import bound, serve

    folders = runs or [Path(home) for home in HOMES if Path(home).is_dir()]
    missing = [folder for folder in folders if not folder.is_dir()] or ([] if folders else [Path(HOMES[0])])
    if missing:
        raise no_run(missing[0], "rlhf view", "a run, an evaluation, or a folder that such are in")
    Redaction(redact or [])  # refused before anything listens
    place = bound(host, port)

    def said() -> None:
        if port and place.port != port:
            caution(f"port {port} is in use, so it is {place.port}")
        if host not in _LOOPBACK:
            caution("other machines can reach this viewer: whoever has the address reads the runs")
        if as_json:
            print_json({"url": place.url, "port": place.port})
        else:
            results().print(place.url, soft_wrap=True)

    serve(folders, place, redact or [], said, with_parent=until_closed)


@contextmanager
def shown_beside(folder: Path) -> Iterator[None]:
    """Context in which a viewer process shows a run; it ends with this process."""
    arguments = [sys.executable, "-m", "rlhf.cli", "view", str(folder), "--until-closed"]
    viewer = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True)
    try:
        yield
    finally:
        if viewer.stdin is not None:
            viewer.stdin.close()
        try:
            viewer.wait(5)
        except subprocess.TimeoutExpired:
            viewer.kill()


@command
def top(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch a run in the terminal: success with its interval, loss, KL, tokens per second, time left.

    Exits when the run ends, or on Ctrl-C; where stdout is no terminal, after printing once.
    """
    from rlhf.evaluation.folder import is_evaluation
    from rlhf.viewer.run_folder import RunFolder, is_run
    from rlhf.viewer.run_views import head
    from rlhf.viewer.top import watch

    if not is_run(run) or is_evaluation(run):
        raise no_run(run, "rlhf top")
    found = RunFolder(run)
    if as_json:
        print_json(head(found, found.poll()))
        return
    watch(found, results(), once=once)
