"""Whole runs in two processes: the same as in one, exactly resumed, and over when one of them is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlhf.processes import free_port
from tests.tiers import tiered
from tests.training import runs
from tests.training.together import together
from tests.training.two_processes import assert_goes_on_exactly, assert_same_run, run_and_stop, run_each

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

ROOT = Path(__file__).resolve().parent.parent.parent
Values = dict[str, Any]

#: Longest that a command may take on a busy machine.
LIMIT_S = 240.0

SUPERVISED: Values = {
    "kind": "supervised",
    "n_demonstrations": 48,
    "batch_size": 8,
    "epochs": 6,
    "optimizer": {"lr": 5e-3},
}
STEPS: Values = {
    "kind": "policy_gradient", "steps": 4, "tasks_per_step": 5, "group_size": 4, "minibatches": 2,
    "checkpoint_every": 2, "max_tokens_per_microbatch": 200, "optimizer": {"lr": 2e-3},
}  # fmt: skip
#: An estimator that looks at the whole step, and a KL term that needs a reference.
INVOLVED: Values = {
    "advantage": {"kind": "reinforce_pp_baseline"},
    "loss": {"kind": "ppo_clip", "kl": "k3", "kl_coef": 0.1},
}
#: A score that differs between attempts of a policy that knows nothing yet, so that every step has updates.
SHORT: Values = {"kind": "overlong", "max_tokens": 6, "buffer": 5}
ROUNDS: Values = {"kind": "dynamic", "max_rounds": 3}
LORA: Values = {**runs.BASE["policy"], "lora": {"rank": 8}}


def recipe(folder: Path, trainer: Values, *, involved: bool = False, lora: bool = False) -> Path:
    supervised = {**SUPERVISED, **({"optimizer": {"lr": 1e-2}} if lora else {})}
    how = {**(INVOLVED if involved else {}), **({"selection": ROUNDS} if involved and not lora else {})}
    stages = [{**supervised, "trainer": trainer}, {**STEPS, **how, "trainer": trainer}]
    rewards = {**runs.BASE["rewards"], "short": SHORT}
    changes: Values = {"evaluation": {"n_tasks": 8}, "rewards": rewards, **({"policy": LORA} if lora else {})}
    return runs.write(folder, stages, **changes)


def planning(folder: Path, trainer: Values) -> Path:
    """A planner with an adapter of its own."""
    steps = {**STEPS, "advantage": {"kind": "two_level"}, "trainer": trainer}
    return runs.write(
        folder,
        [{**SUPERVISED, "trainer": trainer}, steps],
        evaluation={"n_tasks": 8},
        rewards={**runs.BASE["rewards"], "short": {"kind": "overlong", "max_tokens": 14, "buffer": 13}},
        policy={**LORA, "max_context": 512, "lora": {"rank": 8, "roles": ["plan"]}},
        agent={"kind": "planner", "plan_system": "", "executor": {"system": ""}},
    )


def deepspeed(zero: int) -> Values:
    return {"kind": "deepspeed", "zero_stage": zero, "param_persistence_threshold": 0, "timeout_s": 60.0}


#: Writes a recipe for a trainer: the shortest, and those that take their time.
RECIPES: dict[str, Callable[[Path, Values], Path]] = {
    "zero2": recipe,
    "zero1-lora": partial(recipe, involved=True, lora=True),
    "zero2-roles": planning,
    "zero3": partial(recipe, involved=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict[str, str]]:
    RECIPES["zero2"](folder / "zero2", deepspeed(2))
    return together(run_and_stop, folder)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs in two processes that take long."""
    folder = tmp_path_factory.mktemp("others")
    for name in set(RECIPES) - {"zero2"}:
        RECIPES[name](folder / name, deepspeed(int(name[4])))
    together(run_each, folder)
    return folder


# --- what came of it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiered(RECIPES, "zero2"))
def test_a_run_in_two_processes_is_that_in_one(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    alone = runs.run(RECIPES[name](tmp_path / "recipe", {"kind": "torch"}), tmp_path / "run").folder
    if name == "zero2":
        request.getfixturevalue("said")
    both = request.getfixturevalue("folder" if name == "zero2" else "others") / f"{name}-run"
    assert_same_run(both, alone, with_sampler="zero3" not in name)


def test_the_first_process_alone_writes_and_talks(said: list[dict[str, str]], folder: Path) -> None:
    assert "after: success" in said[0]["zero2"] and not said[1]["zero2"]
    config = json.loads((folder / "zero2-run" / "deepspeed-1-policy_gradient.json").read_text())
    assert config["zero_optimization"]["stage"] == 2
    assert not list((folder / "zero2-run").glob("process-*"))
    assert (folder / "zero2-run" / "report.html").is_file()


def test_all_stop_after_a_step_when_one_is_told_to_and_go_on_exactly(said: list[dict[str, str]], folder: Path) -> None:
    assert_goes_on_exactly(said, folder / "stopped-run", folder / "zero2-run")


# --- the command line, and processes that end -------------------------------------------------------------------------

DYING = """

# --- until process 1 has taken so many steps ---

import os
import signal
from pathlib import Path

N = 0
MARK = Path(__file__).with_name("has_died")


class Dying(Words):
    def start(self, task):
        return Last(self.words(task.seed))


class Last(WordsEpisode):
    async def step(self, action):
        global N
        N += 1
        if os.environ["RANK"] == "1" and N == 24 and not MARK.exists():
            MARK.touch()
            END
        return await super().step(action)
"""


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    bare = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "300", "PYTHONPATH": path}
    return os.environ | bare


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "rlhf.cli", "train", *map(str, arguments), "--nproc", "2"]
    return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, env=environment(), cwd=ROOT)


def dying(folder: Path, end: str) -> Path:
    path = recipe(folder, deepspeed(2))
    (folder / "dying.py").write_text((folder / "words.py").read_text() + DYING.replace("END", end))
    path.write_text(path.read_text().replace("./words.py:Words", "./dying.py:Dying"))
    return path


@pytest.mark.extended
def test_a_killed_process_ends_the_other_and_the_run_goes_on_exactly(
    said: list[dict[str, str]], folder: Path, tmp_path: Path
) -> None:
    path, out = dying(tmp_path / "recipe", "os.kill(os.getpid(), signal.SIGKILL)"), tmp_path / "run"
    ended = command(path, "--out", out)
    assert ended.returncode == 2
    assert "process 1 of 2 was ended by SIGKILL" in ended.stderr
    assert "another process exited" in ended.stderr
    ended = command("--resume", out)
    assert ended.returncode == 0, ended.stderr
    whole = folder / "zero2-run"
    assert runs.lines(out) == runs.lines(whole)
    assert runs.weights(runs.newest(out)) == runs.weights(runs.newest(whole))


@pytest.mark.extended
def test_a_process_that_fails_tells_the_other_why(tmp_path: Path) -> None:
    broken = "TorchTrainer.update = lambda *a, **k: (_ for _ in ()).throw(RuntimeError('the reason'))"
    path = dying(tmp_path / "recipe", f"from rlhf.training.backends.torch import TorchTrainer; {broken}")
    ended = command(path, "--out", tmp_path / "run")
    assert ended.returncode != 0
    assert "process 1 has failed: RuntimeError: the reason" in ended.stderr


SMOKE = ROOT / "recipes" / "deepspeed" / "smoke-cpu.yaml"


@pytest.mark.extended
def test_the_recipe_that_shows_whether_it_works(tmp_path: Path) -> None:
    ended = command(SMOKE, "--out", tmp_path / "run", "--json")
    assert ended.returncode == 0, ended.stderr
    [line] = ended.stdout.strip().splitlines()
    result = json.loads(line)
    assert result["n_episodes"] == 3 * 4 * 4 and (tmp_path / "run" / "report.html").is_file()
    # Started by the launchers of others it is the same run: accelerate's, torchrun with two nodes, and DeepSpeed's.
    for name, lines in launchers(tmp_path).items():
        nodes = [subprocess.Popen(line, env=environment(), cwd=ROOT) for line in lines]
        assert [node.wait(LIMIT_S) for node in nodes] == [0] * len(nodes), name
        assert losses(tmp_path / name) == losses(tmp_path / "run"), name


def launchers(folder: Path) -> dict[str, list[list[str]]]:
    """Of each launcher, the commands that start it, one for each node."""
    train = ["-m", "rlhf.cli", "train", str(SMOKE), "--json", "--out"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    torchrun += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    deepspeed = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_python", "--no_local_rank"]
    deepspeed += ["--master_port", str(free_port()), sys.executable]
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    accelerate += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    accelerate += ["--main_process_port", str(free_port())]
    return {
        "accelerate": [[*accelerate, *train, str(folder / "accelerate")]],
        "torchrun": [[*torchrun, "--node_rank", str(rank), *train, str(folder / "torchrun")] for rank in range(2)],
        "deepspeed": [[*deepspeed, *train, str(folder / "deepspeed")]],
    }


def losses(folder: Path) -> list[Values]:
    return [{k: v for k, v in line.items() if "loss" in k} for line in runs.lines(folder)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["stages.0.trainer={kind: torch}"], "stages[0].trainer.kind: this trainer runs in one process"),
        (["stages.1.trainer.zero_stage=4"], "stages[1].trainer.zero_stage"),
        (["stages.1.trainer.offload_parameters=true"], "offload_parameters needs zero_stage: 3"),
        (["stages.1.trainer.zero_stge=1"], "did you mean 'zero_stage'?"),
        (
            ["stages.1.advantage={kind: gae}", "stages.1.critic={backbone: policy, gradient: backbone}"],
            "stages[1].critic",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path, change: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from typer.testing import CliRunner

    from rlhf.cli import app

    smoke = str(SMOKE)
    ended = CliRunner().invoke(app, ["train", smoke, *change, "--out", str(tmp_path / "run"), "--nproc", "2"])
    assert ended.exit_code == 2 and says in ended.output + capfd.readouterr().err
