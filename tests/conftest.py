"""Settings of all tests: threads, patience, tiers, and groups that never run side by side.

Tiny models run fastest on one thread, and sums then have one order everywhere. Property tests have no deadline and
nothing is too slow for them: a busy machine must not fail them. Ctrl-C is heard, also where a shell has begun the tests
in the background and has it ignored.

`fast` are the tests of the folders in `FAST`, but for those that are marked otherwise. With `-n`, the tests of a file
run on one worker, one after the other, and so do those of a folder or file in `ALONE`: they start engines or groups of
processes, kill them or measure them, and would take memory, ports and time from each other. Each worker has a folder
for temporary files of its own, so that tests which look at what is left over see what their own programs left.
"""

import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported

import pytest
from hypothesis import HealthCheck, settings

from tests import recipe_parts

HERE = Path(__file__).parent
#: Folders whose tests take milliseconds: what one runs while writing.
FAST = ("agents", "batching", "credit", "evaluation", "losses", "rewards", "rollout", "tasks")
#: Folders and files whose tests are not run side by side with others of the same kind. They begin first.
ALONE = {
    "rollout/vllm": "vllm",
    "asynchrony/test_ray.py": "processes",
    "asynchrony/test_several_processes.py": "processes",
    "environments/test_miniwob.py": "processes",
    "training/test_counted_ranks.py": "processes",
    "training/test_deepspeed.py": "processes",
    "training/test_deepspeed_critic.py": "processes",
    "training/test_deepspeed_references.py": "processes",
    "training/test_deepspeed_runs.py": "processes",
    "training/test_fsdp.py": "processes",
    "training/test_fsdp_runs.py": "processes",
    "gateway/test_learns.py": "processes",
    "gateway/test_faults.py": "processes",
    "gateway/test_exact.py": "processes",
    "gateway/test_examples.py": "processes",
    "gateway/test_endpoint.py": "processes",
    "training/test_nodes.py": "processes",
    "training/test_publish_zero3.py": "processes",
    "training/test_resume_elsewhere.py": "processes",
    "training/test_routing_replay.py": "processes",
    "training/test_sequence_parallel.py": "processes",
    "training/test_sharded_load.py": "processes",
    "test_kills.py": "processes",
    "test_memory.py": "processes",
    "test_processes.py": "processes",
}

for name, n in {"fast": 10, "patient": 50, "thorough": 1000}.items():
    # The same examples each time but where there are many, so that neither a result nor the coverage is by chance.
    settings.register_profile(
        name,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=n,
        derandomize=name != "thorough",
    )
settings.load_profile("patient")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples there are, and give a worker its own folder for temporary files."""
    if _is_fast(config):
        settings.load_profile("fast")
    if hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="t-")  # short: sockets lie in it
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what is not fast, where only that is asked for."""
    if not _is_fast(config) or collection_path == HERE or HERE not in collection_path.parents:
        return None
    top, *rest = collection_path.relative_to(HERE).parts
    return True if top not in FAST or rest[:1] == ["vllm"] else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is fast; on a worker, begin with what takes longest."""
    for item in items:
        path = _inside(item.nodeid)
        others = any(item.get_closest_marker(name) for name in ("slow", "extended"))
        if path.parts[0] in FAST and path.parts[1] != "vllm" and not others:
            item.add_marker("fast")
    if hasattr(config, "workerinput"):
        first = list(dict.fromkeys(ALONE.values()))
        items.sort(key=lambda item: first.index(name) if (name := _group(item.nodeid)) in first else len(first))


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """A recipe of a stranger's parts."""
    return recipe_parts.write(tmp_path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Hand a worker the tests of a file, or of a kind in `ALONE`, one after the other."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return ByGroup(config, log)


def pytest_collection_finish() -> None:
    """Let the garbage collector no longer look at what lives as long as the session: tests that collect do so often."""
    gc.collect()
    gc.freeze()


def _is_fast(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "fast"


def _inside(nodeid: str) -> Path:
    """Where a test lies in this folder."""
    return Path(nodeid.partition("::")[0].removeprefix("tests/"))


def _group(nodeid: str) -> str:
    """The tests that one is part of, and that run one after the other."""
    path = _inside(nodeid)
    of = [kind for place, kind in ALONE.items() if Path(place) in (path, *path.parents)]
    return of[0] if of else path.as_posix()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give torch its one thread again, whatever a library has set meanwhile."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
