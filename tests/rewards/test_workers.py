"""Worker processes: what they answer, and what becomes of one that does not."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from rewards.answers.maths import Maths
from rewards.sandbox.run import Bounds, ExitReason, run_blocking
from rewards.worker_pool import Pool, TooSlow
from rlhf.errors import MissingPackageError, RewardError

ENDLESS = "9**9**9"  # never comes back to Python: only the end of its process stops it


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool("builtins:eval", size=2)
    yield made
    made.close()


def test_a_call_beyond_its_limit_is_killed_in_any_thread_and_replaced(pool: Pool) -> None:
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(pool.call, text, limit_s=0.3) for text in ("1 + 1", ENDLESS, "2 + 2", ENDLESS, "3 + 3")]
        assert [calls[i].result() for i in (0, 2, 4)] == [2, 4, 6]
        for i in (1, 3):
            with pytest.raises(TooSlow, match=r"0\.3 s of processor time"):
                calls[i].result()
    assert pool.call("4 + 4", limit_s=1) == 8


def test_a_sleeping_call_is_ended_by_the_clock(pool: Pool) -> None:
    begin = time.monotonic()
    with pytest.raises(TooSlow):
        pool.call("__import__('time').sleep(60)", limit_s=0.1)
    assert time.monotonic() - begin < 30


def test_errors_come_back_as_texts_and_leave_the_process_alive(pool: Pool) -> None:
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        pool.call("1/0", limit_s=1)
    with pytest.raises(MissingPackageError, match="rlhf-agents\\[rewards\\]"):
        pool.call("__import__('no_such_package')", limit_s=1)
    with pytest.raises((RewardError, TooSlow)):
        pool.call("'a' * 10**11", limit_s=1)  # more memory than it may have
    assert pool.call("print('not an answer') or 5", limit_s=1) == 5


def test_no_more_processes_than_asked_for(pool: Pool) -> None:
    with ThreadPoolExecutor(8) as threads:
        pids = list(threads.map(lambda _: pool.call("__import__('os').getpid()", limit_s=1), range(40)))
    assert len(set(pids)) <= 2


def test_a_folder_with_modules_of_the_same_name_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    made = Pool("builtins:eval", size=1)
    assert made.call("1 + 1", limit_s=1) == 2
    made.close()


def test_a_process_that_died_while_it_was_idle_is_replaced(pool: Pool) -> None:
    assert pool.call("1 + 1", limit_s=1) == 2
    [process] = pool._all
    process.popen.kill()
    process.popen.wait()
    assert pool.call("2 + 2", limit_s=1) == 4


@pytest.fixture
def many_files() -> Iterator[None]:
    """More open files than `select` knows numbers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("so many files may not be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    with ExitStack() as stack:
        for _ in range(1030):
            stack.enter_context(Path("/dev/null").open())
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_judges_and_programs_are_heard_where_many_files_are_open(many_files: None) -> None:
    pool = Pool("builtins:eval", size=1)
    try:
        assert pool.call("1 + 1", limit_s=5) == 2
    finally:
        pool.close()
    finished = run_blocking(("python", "main.py"), b"", {"main.py": b"print(6 * 7)"}, Bounds())
    assert (finished.ending, finished.stdout) == (ExitReason.OK, b"42\n")


def test_trouble_with_the_processes_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.answers.maths._pool", lambda: Pool("rewards.answers.no_such_module:judge"))
    with pytest.raises(RewardError, match="does not start"):
        Maths()(r"\boxed{(x+1)^2}", "x^2+2x+1")
