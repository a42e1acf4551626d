"""Whatever text others wrote, nothing of it steers the terminal, whichever way it is printed."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlhf.commands.output import STATE, caution, report
from rlhf.errors import EnvError
from rlhf.progress import RichProgress
from rlhf.terminal import CleanConsole, clean, say

ROOT = Path(__file__).resolve().parents[1]
#: C0 without line feed, DEL, C1, marks of direction, separators, halves of surrogates.
STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: What rich writes itself: styles, cursor, erasing, and the carriage return of a line that is drawn again.
OWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
EVIL = "a\x1b]0;owned\x07b\x9b31mc\x00d\u202ee\rf\x08g\x7fh[/]i[red]j\ud800"

texts = st.text(st.characters(codec=None, categories=None), max_size=40)


@given(texts)
@example(EVIL)
def test_nothing_that_is_cleaned_steers(text: str) -> None:
    cleaned = clean(text)
    assert not STEERING.search(cleaned)
    assert clean(cleaned) == cleaned and cleaned.count("\n") == text.count("\n")
    assert clean("äöü 漢字 🙂 [bold]") == "äöü 漢字 🙂 [bold]"


def printed(text: str, *, is_terminal: bool) -> str:
    """What stands in the file after `text` went every way through a console."""
    file = io.StringIO()
    console = CleanConsole(
        file=file, width=60, force_terminal=is_terminal, color_system="truecolor" if is_terminal else None
    )
    table = Table(text, "b")
    table.add_row(text, Text(text, "bold"))
    for shown in (text, Text(text, "red"), table, Panel(text, title=Text(text))):
        console.print(shown, soft_wrap=shown is text)
    console.rule(Text(text))
    with console.status(Text(text)):
        pass
    with RichProgress(console, every=1) as progress:
        progress.stage(text, 3, 0)
        progress.note(text)
        progress.advance(text)
        progress.at(2, text)
        progress.rollout(text)
        progress.say(text)
    return file.getvalue()


@settings(max_examples=60, deadline=None)
@given(texts)
@example(EVIL)
def test_no_way_through_a_console_steers(text: str) -> None:
    assert not STEERING.search(printed(text, is_terminal=False))
    assert not STEERING.search(OWN.sub("", printed(text, is_terminal=True)))


def test_markup_in_what_others_wrote_is_text() -> None:
    assert "h[/]i[red]j" in printed(EVIL, is_terminal=False)


@pytest.mark.parametrize("debug", [False, True])
def test_errors_and_cautions_are_cleaned(capsys: pytest.CaptureFixture[str], debug: bool) -> None:
    STATE.debug = debug
    try:
        report(EnvError(EVIL, where=EVIL, got=EVIL, expected=EVIL, hint=EVIL), as_json=True)
        report(ValueError(EVIL), as_json=True)
    finally:
        STATE.debug = False
    caution(EVIL)
    say(EVIL, EVIL)
    found = capsys.readouterr()
    for stream in found:
        assert "owned" in stream and not STEERING.search(stream)


def test_every_command_prints_by_that_module_alone() -> None:
    """No other console, no bare print, no write to a stream: but JSON, which escapes all of it, and `clean` itself."""
    found = []
    for path in sorted((ROOT / "rlhf").rglob("*.py")):
        if path.name in ("terminal.py", "vllm_worker.py") and path.parent.name != "viewer":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                is_json_or_clean = "json.dumps" in ast.unparse(node) or "clean(" in ast.unparse(node)
                if re.fullmatch(r"print|pprint|Console|typer\.s?echo|sys\.std(out|err)\.write", called):
                    found += [f"{path.name}:{node.lineno} {called}"] * (not is_json_or_clean)
    assert [line for line in found if line.partition(":")[0] != "terminal.py"] == []


def test_messages_that_nobody_reads_any_more_end_nothing() -> None:
    program = "from rlhf.terminal import CleanConsole\nimport sys\n"
    program += "for i in range(20000): CleanConsole(stderr=True).print('step', i)\nprint('done', flush=True)\n"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None and process.stdout is not None
        process.stderr.readline()
        process.stderr.close()
        assert process.stdout.read() == b"done\n" and process.wait() == 0


def test_a_command_whose_output_nobody_reads_ends_well() -> None:
    command = [sys.executable, "-m", "rlhf.cli", "recipes", "--kinds"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0
