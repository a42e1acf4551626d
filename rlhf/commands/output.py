"""Output of commands: results to standard output, messages and errors to standard error.

Exit codes: 0 done; 1 an unexpected error, which is a bug somewhere; 2 something to fix, said in four parts (where,
got, expected, do); 130 interrupted.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import select
import sys
import threading
import traceback
import warnings
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TextIO, TypeVar

import typer
from rich.text import Text

from rlhf.digests import has_digests
from rlhf.errors import CheckpointError, RecipeError, RenamedWarning, RlhfError, nearest
from rlhf.finite import finite
from rlhf.terminal import CleanConsole, clean

P = ParamSpec("P")
R = TypeVar("R")
Word = TypeVar("Word", bound=StrEnum)

EXIT_UNEXPECTED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130
#: Seconds of silent work after which a command says what it does.
_SLOW_S = 4.0

#: The arguments that several commands share.
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on the last line of stdout.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Recipe overrides, such as seed=2 limits.max_turns=8"),
]


class Stopped(RlhfError):
    """The user stopped a command that can go on later."""


@dataclass
class State:
    """Options before the command."""

    debug: bool = False


STATE = State()


def errors() -> CleanConsole:
    """Return the console for progress and messages."""
    return CleanConsole(stderr=True)


def results() -> CleanConsole:
    """Return the console for what a command was asked for."""
    return CleanConsole()


def quiet_libraries() -> None:
    """Turn off what libraries write of themselves: progress bars across ours, and DeepSpeed's search for a GPU."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def caution(text: str) -> None:
    """Print a caution to standard error."""
    errors().print(Text.assemble(("caution", "yellow"), " ", text), soft_wrap=True)


@contextmanager
def said_if_slow(text: str) -> Iterator[None]:
    """Context that prints a line to standard error where its work takes more than some seconds."""
    timer = threading.Timer(_SLOW_S, errors().print, (text,), {"soft_wrap": True, "markup": False})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def warnings_told() -> Iterator[None]:
    """Context that prints warnings of renamed keys and of the toolkit as cautions, each once."""
    shown = set[str]()
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            is_ours = category is RuntimeWarning and Path(filename).is_relative_to(Path(__file__).parent.parent)
            if not is_ours and not issubclass(category, RenamedWarning):
                usual(message, category, filename, lineno, file, line)
            elif str(message) not in shown:
                shown.add(str(message))
                caution(str(message))

        warnings.showwarning = show
        warnings.simplefilter("always", RenamedWarning)
        yield


def print_json(values: Mapping[str, Any]) -> None:
    """Print one line of JSON; non-finite numbers become null."""
    sys.stdout.write(json.dumps(finite(values), default=str) + "\n")
    sys.stdout.flush()


def one_of(words: type[Word], given: str, where: str, noun: str) -> Word:
    """The word that was given at `where`, which names a `noun`.

    Raises:
        RecipeError: it is none of `words`.
    """
    known = [word.value for word in words]
    if given not in known:
        expected = ", ".join(known)
        hint = nearest(given, known) or "use one of these"
        raise RecipeError(f"no such {noun}", where=where, got=given, expected=expected, hint=hint)
    return words(given)


def refuse_existing(out: Path) -> None:
    """Raise RecipeError where the folder to be made is there already, or something else of its name."""
    if not out.exists() and not out.is_symlink():
        return
    is_file = out.is_file()
    name, end = (out.stem, out.suffix) if is_file else (out.name.strip(".") or "model", "")
    free = next(path for n in count(2) if not os.path.lexists(path := out.parent / f"{name}-{n}{end}"))
    raise RecipeError(
        f"the {'file' if is_file else 'folder'} exists, and nothing is overwritten",
        where=f"--out {out}",
        got="a folder" if out.is_dir() else "a file",
        expected="a new name",
        hint=f"--out {free}, or move the existing one",
    )


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Turn every exception of a command into a message and an exit code."""

    @functools.wraps(function)
    def shielded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with warnings_told():
                return function(*args, **kwargs)
        except typer.Exit:
            raise
        except BrokenPipeError as error:
            if not _reader_is_gone():
                raise typer.Exit(report(error, as_json=bool(kwargs.get("as_json")))) from error
            raise typer.Exit from None
        except (Exception, KeyboardInterrupt, CancelledError) as error:
            raise typer.Exit(report(error, as_json=bool(kwargs.get("as_json")))) from error

    return shielded


def _reader_is_gone() -> bool:
    """True if standard output is closed, as after `| head`; the remaining output is then discarded."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    is_gone = bool(pipe.poll(0))
    if is_gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_gone


def report(error: BaseException, *, as_json: bool) -> int:
    """Print what went wrong, and return the exit code."""
    if STATE.debug:
        sys.stderr.write(clean("".join(traceback.format_exception(error))))
    if isinstance(error, KeyboardInterrupt | CancelledError):
        errors().print("interrupted", style="bold")
        return EXIT_INTERRUPTED
    known = _disk_full(error) or error
    if isinstance(known, RlhfError):
        is_stopped = isinstance(known, Stopped)
        header = ("", "") if is_stopped else ("error ", "bold red")
        errors().print(Text.assemble(header, str(known)), soft_wrap=True)
        if as_json:
            parts = {name: getattr(known, name) for name in ("what", "where", "got", "expected")}
            print_json({"error": {"type": type(known).__name__, **parts, "do": known.hint}})
        return EXIT_INTERRUPTED if is_stopped else EXIT_USER_ERROR
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    text = Text.assemble(("unexpected error ", "bold red"), what.splitlines()[0], f" ({_place(error)})")
    errors().print(
        text + (Text() if STATE.debug else Text("; run again with --debug for the stack trace")), soft_wrap=True
    )
    if as_json:
        print_json({"error": {"type": type(error).__name__, "what": str(error), "where": _place(error)}})
    return EXIT_UNEXPECTED


def caution_without_digests(checkpoint: Path) -> None:
    """Caution about an old checkpoint without digests, whose changed files cannot be detected."""
    if (checkpoint / "state.json").is_file() and not has_digests(checkpoint):
        caution(f"{checkpoint} has no digests of its files: only their sizes are known")


def _disk_full(error: BaseException) -> RlhfError | None:
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return CheckpointError(
        "the disk is full",
        where=str(error.filename or _place(error)),
        got=str(error.strerror),
        expected="room to write",
        hint="free some space, then resume from the last checkpoint: rlhf train --resume RUN",
    )


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "unknown place"
