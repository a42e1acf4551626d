"""Two real processes on one folder, in every mix: one is refused by name, and nothing of the other is spoilt."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import combinations_with_replacement
from pathlib import Path

import pytest

from rlhf.digests import MANIFEST, Manifest, verify
from rlhf.evaluation.folder import is_evaluation
from rlhf.lock_owner import read_path
from rlhf.training.checkpoints import store
from tests.test_resume import everything
from tests.training import children, runs
from tests.training.test_spoilt import KINDS, recipe

WORDS = ("train", "resume", "evaluate")
MIXES = list(combinations_with_replacement(WORDS, 2))
#: How a process that comes second is refused: while the first one works, or by what that has left.
IN_USE, LEFT = "another process is writing this folder", "is not empty"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe whose agent has a store, a finished run of it, a stopped one, and an evaluation."""
    folder = tmp_path_factory.mktemp("made")
    path = recipe(folder, KINDS["full"])
    runs.run(path, folder / "whole")
    runs.stop(path, folder / "stopped", "1-policy_gradient-000001")
    ended = children.run(folder, *arguments("evaluate", folder, folder / "evaluation"))
    assert ended.code == 0, ended.err
    return folder


def arguments(word: str, made: Path, out: Path) -> list[str | Path]:
    if word == "resume":
        return ["train", "--resume", out]
    if word == "train":
        return ["train", made / "recipe.yaml", "--out", out]
    return ["evaluate", made / "whole", "--n", "60", "--out", out]


def pair(made: Path, work: Path, order: tuple[str, str], delay_s: float) -> tuple[str, str]:
    """Let two processes write one folder, the second while the first has the lock; returns who came to its end, and
    what the other was told."""
    work.mkdir()
    out = work / "out"
    if "resume" in order:
        shutil.copytree(made / "stopped", out)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(children.run, folder_of(work, 0), *arguments(order[0], made, out))
        wait_for(out / ".lock", first)
        time.sleep(delay_s)
        with standing_still(out):
            refused = children.run(folder_of(work, 1), *arguments(order[1], made, out))
        ended = [first.result(), refused]
    done = [word for word, e in zip(order, ended, strict=True) if e.code == 0]
    told = [e.err for e in ended if e.code == 2]
    assert len(done) == len(told) == 1, [(word, e.code, e.err[-2000:]) for word, e in zip(order, ended, strict=True)]
    assert not list(out.rglob(".lock*")), "no lock is left"
    assert_whole(out, made)
    return done[0], told[0]


def folder_of(work: Path, number: int) -> Path:
    (work / str(number)).mkdir()
    return work / str(number)


def wait_for(lock: Path, first: Future[children.EpisodeEnded]) -> None:
    while not lock.exists() and not first.done():
        time.sleep(0.001)


@contextmanager
def standing_still(out: Path) -> Iterator[None]:
    """Hold the process that has the lock of a folder, so that a short one does not end before another has begun."""
    owner = None
    while owner is None and (out / ".lock").exists():  # The lock is there a moment before its owner's name.
        owner = read_path(out / ".lock")
    if owner is None:
        yield
        return
    with suppress(ProcessLookupError):
        os.kill(owner.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGCONT)


def assert_whole(out: Path, made: Path) -> None:
    """What is in a folder is all of what one of them writes, as it was written."""
    for path in out.rglob(MANIFEST):
        Manifest(path.parent).check_all()
    if is_evaluation(out):
        names = [f"{path.parent.name}/{path.name}" for path in sorted(out.rglob("*.parquet"))]
        assert names == [f"{p.parent.name}/{p.name}" for p in sorted((made / "evaluation").rglob("*.parquet"))]
        assert (out / "summary.json").read_text() == (made / "evaluation" / "summary.json").read_text()
        assert not (out / "recipe.yaml").exists()
        return
    for folder in store.every(out / "checkpoints"):
        assert verify(folder)
    assert everything(out) == everything(made / "whole")
    assert not (out / "evaluation.yaml").exists()


@pytest.mark.parametrize(
    "mix", [("train", "train"), ("resume", "resume"), ("evaluate", "train"), ("evaluate", "evaluate")], ids="+".join
)
def test_one_of_two_processes_is_refused_and_nothing_is_spoilt(
    made: Path, tmp_path: Path, mix: tuple[str, str]
) -> None:
    done, told = pair(made, tmp_path / "pair", mix, 0.0)
    assert done in mix and (IN_USE in told or LEFT in told), told
    if IN_USE in told:
        assert "got:      process " in told and ", since 20" in told and " on " in told


def test_a_run_that_is_killed_is_resumed_and_its_lock_taken_over(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    killed = children.run(tmp_path, *arguments("train", made, out), kill_at=100)
    assert killed.code == -signal.SIGKILL and (out / ".lock").is_file()
    ended = children.run(tmp_path, *arguments("resume", made, out))
    assert ended.code == 0 and "is taken over from process" in ended.err, ended.err
    assert_whole(out, made)


def test_a_run_without_a_name_takes_the_next_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf import locks
    from rlhf.build.resume import run_folder
    from rlhf.recipe import load
    from tests.test_locks import holder

    monkeypatch.chdir(tmp_path)
    made = load(recipe(tmp_path, KINDS["lora"]))
    first = tmp_path / "runs" / "words-seed0"
    first.mkdir(parents=True)
    with holder(first), run_folder(made, None, None) as folder:
        assert folder == Path("runs") / "words-seed0-2"
    with holder(first), pytest.raises(locks.FolderInUse), run_folder(made, first, None):
        pass
    assert first.is_dir()


@pytest.mark.extended
@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_four_pairs_of_each_mix(made: Path, tmp_path: Path, mix: tuple[str, str]) -> None:
    draw, found = random.Random("+".join(mix)), []
    for number in range(4):
        order = mix if number % 2 else (mix[1], mix[0])
        done, told = pair(made, tmp_path / str(number), order, draw.uniform(0, 0.1))
        assert IN_USE in told or LEFT in told, told
        found.append(f"{' then '.join(order)}: {done} done, the other told {IN_USE if IN_USE in told else LEFT!r}")
    print("", *found, sep="\n")
