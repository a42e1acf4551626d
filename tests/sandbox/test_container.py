"""Programs in containers: what the engine is told, and what its answers come to; a stand-in plays the engine.

No engine runs where the tests run. The stand-in runs the program as this user, without any isolation: that the
container isolates is the engine's promise, and only its command line is checked here.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rewards.code.edits import edited
from rewards.code.unit_tests import UnitTests
from rewards.sandbox import container
from rewards.sandbox.container import Container, command
from rewards.sandbox.run import Bounds, ExitReason, Finished, SandboxError, run
from rlhf.data import Task, Verdict
from rlhf.errors import RecipeError, RewardError
from rlhf.recipe import load_values
from tests.rewards.played import played

ENGINE = """#!{python}
import os, subprocess, sys, tempfile
words = sys.argv[1:]
open({log!r}, "a").write(" ".join(words[:2]) + "\\n")
if words[:2] == ["image", "inspect"]:
    sys.exit(0 if words[2] == "here" else (sys.stderr.write("No such image: " + words[2]), 1)[1])
if words[0] == "run":
    at = words.index("here")
    given = words[words.index("--mount") + 1].split("source=")[1].split(",")[0]
    if os.environ.get("BROKEN"):
        sys.exit((sys.stderr.write("cannot connect to the daemon"), 125)[1])
    with tempfile.TemporaryDirectory() as work:
        script = words[at + 3].replace("/given", given).replace("/work", work)
        sys.exit(subprocess.run(["sh", "-c", script, *words[at + 4:]], cwd=work).returncode % 256)
"""
BOUNDS = Bounds(wall_s=20.0, output_kb=8)
HERE = Container(image="here")


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in called podman, alone in the path; what it was asked for."""
    (tmp_path / "bin").mkdir()
    engine = tmp_path / "bin" / "podman"
    engine.write_text(ENGINE.format(python=sys.executable, log=str(tmp_path / "log")))
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(container, "which", lambda name: str(engine) if name == "podman" else None)
    container._wrong.cache_clear()
    return tmp_path / "log"


def do(code: str, bounds: Bounds = BOUNDS, stdin: bytes = b"", **files: bytes) -> Finished:
    held = {"main.py": code.encode(), **files}
    return asyncio.run(run(("python", "main.py"), stdin=stdin, files=held, bounds=bounds, isolation=HERE))


def test_a_program_reads_writes_and_has_its_files() -> None:
    finished = do("print(input(), open('deep/data.txt').read())", stdin=b"said\n", **{"deep/data.txt": b"held"})
    assert (finished.ending, finished.code, finished.stdout) == (ExitReason.OK, 0, b"said held\n")
    assert finished.stderr == b"" and finished.level is None


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("raise SystemExit(125)", ExitReason.WRONG_EXIT),  # as the engine's own failure, which it is not
        ("raise MemoryError", ExitReason.MEMORY_LIMIT),
        ("raise SystemExit(128 + 24)", ExitReason.CPU_LIMIT),
        ("while True: print('x' * 1000)", ExitReason.OUTPUT_LIMIT),
    ],
)
def test_how_a_program_ends(code: str, ending: ExitReason) -> None:
    assert do(code).ending is ending


def test_a_program_that_sleeps_is_ended(log: Path) -> None:
    assert do("import time\ntime.sleep(600)", Bounds(wall_s=0.5)).ending is ExitReason.WALL_LIMIT
    assert "rm --force" in log.read_text()  # the container, besides the client


def test_a_container_ends_by_itself_where_nobody_waits_any_more(tmp_path: Path) -> None:
    words = command("podman", "here", "mark", str(tmp_path), ("sleep", "600"), Bounds(wall_s=20.0))
    script, (name, limit, *program) = words[words.index("-c") + 1], words[words.index("-c") + 2 :]
    assert float(limit) > 20.0
    begun = time.monotonic()
    ended = subprocess.run(
        ["sh", "-c", script.replace("cp -R /given/. /work/", "true"), name, "0.2", *program], check=False, timeout=60
    )
    assert ended.returncode in (-9, 137) and time.monotonic() - begun < 30


def test_a_failure_of_the_engine_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(SandboxError, match="cannot connect to the daemon"):
        do("print(1)")


def test_files_stay_in_their_folder() -> None:
    with pytest.raises(RewardError, match="a file of a program must be inside its folder"):
        do("", **{"../out.txt": b""})


def test_the_command_takes_everything_away() -> None:
    words = " ".join(command("docker", "image", "n", "/f", ("python", "main.py"), Bounds(cpu_s=1.5, memory_mb=64)))
    for said in (
        "docker run --rm --interactive", "--network none", "--read-only", "--cap-drop ALL", "no-new-privileges",
        "--user 65534:65534", "--pids-limit 17", "--memory 64m --memory-swap 64m", "--ulimit cpu=2:3",
        "type=bind,source=/f,target=/given,readonly", "--pull never",
    ):  # fmt: skip
        assert said in words
    assert words.endswith("n 70 python3 -s main.py")


REPOSITORY = {
    "files": {
        "shop/__init__.py": "",
        "shop/cart.py": "def total(prices):\n    found = 0\n    for price in prices[1:]:\n        found += price\n"
        "    return found\n",
    },
    "program": "from shop.cart import total",
    "asserts": ["assert total([1, 2, 3]) == 6", "assert total([]) == 0"],
}
MENDED = """The first price is left out.
```
### shop/cart.py
<<<<<<< SEARCH
    for price in prices[1:]:
=======
    for price in prices:
>>>>>>> REPLACE
```"""


def made(path: str) -> str:
    """An edit that makes a file."""
    return f"```\n### {path}\n<<<<<<< SEARCH\n=======\nx = 1\n>>>>>>> REPLACE\n```"


def judged(answer: str, **settings: Any) -> Verdict:
    task = Task("mend", reference=json.dumps(REPOSITORY))
    return asyncio.run(UnitTests(**settings)(task, played(answer)))


@pytest.mark.parametrize("sandbox", [None, HERE], ids=["own", "container"])
def test_a_repository_is_mended_in_either_sandbox(sandbox: Container | None) -> None:
    assert judged(MENDED, sandbox=sandbox).value == 1.0
    assert "returned 5" in judged(MENDED.replace("in prices:", "in prices[1:] :"), sandbox=sandbox).why


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("It is fine.", "no block of edits"),
        (MENDED.replace("prices[1:]", "prices[2:]"), "the lines to replace are there 0 times"),
        (MENDED.replace("shop/cart.py", "../cart.py"), "no file of the repository"),
        (MENDED.replace(">>>>>>> REPLACE", ""), "no edit that is whole"),
        (made("shop/cart.py/more.py"), "a file and a folder of one name"),
        (made("shop"), "a file and a folder of one name"),
        (made("shop/more/"), "no name of a file"),
        (made("a" * 300), "no name of a file"),
    ],
)
def test_an_edit_that_cannot_be_made_earns_nothing(answer: str, why: str) -> None:
    verdict = judged(answer)
    assert verdict.value == 0.0 and why in verdict.why


@pytest.mark.parametrize(
    ("text", "before", "after", "made"),
    [
        ("max = 1\n", "x = 1", "x = 2", None),  # a part of a line is no line
        ("x = 1\nmax = 1\n", "x = 1", "x = 2", "x = 2\nmax = 1\n"),
        ("x = 1\ny = 1", "y = 1", "y = 2", "x = 1\ny = 2"),  # a last line without an end
        ("x = 1\nx = 1\n", "x = 1", "x = 2", None),
        ("a\fb\u2028\n", "a\fb\u2028", "c", "c\n"),
        ("x = 1\n", "x = 1", "", ""),
        ("x = 1\r\ny = 1\r\n", "x = 1", "x = 2\nx = 3", "x = 2\r\nx = 3\r\ny = 1\r\n"),
        ("x = 1\ny = 1\n", "x = 1\r", "x = 2\r", "x = 2\ny = 1\n"),
        ("x = 1\ny = 1\n", "y = 1\n", "y = 2", None),  # no empty line follows
    ],
)
def test_lines_are_replaced_whole(text: str, before: str, after: str, made: str | None) -> None:
    block = f"```\n### a.py\n<<<<<<< SEARCH\n{before}\n=======\n{after}{chr(10) * bool(after)}>>>>>>> REPLACE\n```"
    files, wrong = edited({"a.py": text}, block)
    assert files["a.py"] == (text if made is None else made) and bool(wrong) is (made is None)


def test_a_recipe_names_its_sandbox_and_is_refused_without_it() -> None:
    tests = {"kind": "unit_tests", "sandbox": {"kind": "container", "image": "absent"}}
    values = {
        "policy": {"kind": "from_scratch"},
        "environment": {"kind": "countdown"},
        "rewards": {"tests": tests, "o": {"kind": "outcome"}},
        "stages": [{"kind": "policy_gradient"}],
    }
    reward: Any = load_values(values, name="r").rewards["tests"].reward
    with pytest.raises(RecipeError, match="No such image: absent") as caught:
        reward.isolation("rewards.tests")
    assert caught.value.where == "rewards.tests.sandbox" and "pull absent" in caught.value.hint
    with pytest.raises(RecipeError, match="no effect"):
        load_values({**values, "rewards": {"tests": tests | {"min_level": "namespaces"}}}, name="r")
