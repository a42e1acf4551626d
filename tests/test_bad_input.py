"""A gallery of mistakes through the real command line: each is named in four parts and ends with code 2, no stack."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf.cli import app
from rlhf.recipe.evaluation_request import is_model
from tests import recipe_parts

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("  got:", "  expected:", "  do:")


@dataclass(frozen=True)
class Mistake:
    """What is typed after the name of the recipe, and what the message must say."""

    overrides: tuple[str, ...]
    where: str
    says: tuple[str, ...]


MISTAKES = {
    "unknown key": Mistake(
        ("stages.1.advantage={kind: gigpo, gama: 0.9}",),
        "stages[1].advantage.gama",
        ("GiGPO has no key 'gama'", "expected: gamma, step_weight, normalize", "did you mean 'gamma'?"),
    ),
    "unknown keys in several places": Mistake(
        (
            "sead=1",
            "limits.max_turn=3",
            "rewards={v1.0: {kind: outcome, wieght: 2}}",
            "stages.1.optimizer.rate=1",
            "stages.1.advantage={kind: gigpo, gama: 0.9}",
        ),
        "sead",
        (
            "a recipe has no key 'sead'",
            "also:     limits.max_turn: Limits has no key 'max_turn'; did you mean 'max_turns'?",
            "also:     rewards.v1.0.wieght: Outcome has no key 'wieght'",
            "also:     stages[1].optimizer.rate: AdamW has no key 'rate'",
            "also:     stages[1].advantage.gama: GiGPO has no key 'gama'; did you mean 'gamma'?",
        ),
    ),
    "an unknown key, and what is missing for it": Mistake(
        ("policy={kind: pretrained, pth: base}",), "policy.pth", ("Pretrained has no key 'pth'", "did you mean 'path'?")
    ),
    "a value that YAML takes for a comment": Mistake(
        ("agent.system=#### Play well.",), "override agent.system", ("# begins a comment", "'agent.system=\"#### Play")
    ),
    "a value whose end YAML takes for a comment": Mistake(
        ("agent.system=Use issue #12.",),
        "override agent.system",
        ("# begins a comment", '\'agent.system="Use issue #12."'),
    ),
    "unknown key of the recipe": Mistake(("enviroment.n=1",), "enviroment", ("did you mean 'environment'?",)),
    "text where a number belongs": Mistake(
        ("stages.1.steps=many",), "stages[1].steps", ("'many' (text)", "a whole number, at least 1")
    ),
    "yes where true belongs": Mistake(
        ("stages.1.filters.drop_truncated=yes",), "stages[1].filters.drop_truncated", ("'yes' (text)", "true or false")
    ),
    "a number out of range": Mistake(
        ("stages.1.optimizer.lr=-1e-3",), "stages[1].optimizer.lr", ("-0.001", "a number, more than 0")
    ),
    "a group of one with GRPO": Mistake(
        ("stages.1.group_size=1",), "stages[1].group_size", ("at least 2 for grpo", "group_size: 8")
    ),
    "an agent that needs tools": Mistake(
        ("agent={kind: ./parts.py:Plumber}",), "agent.kind", ("needs tools", "Echo", "an attribute `tools`")
    ),
    "an environment that cannot demonstrate": Mistake(
        ("environment={kind: ./parts.py:Mute}",), "stages[0].kind", ("cannot demonstrate", "`plan(task, taken)`")
    ),
    "no rewards": Mistake(
        ("rewards={}",),
        "rewards",
        ("{outcome: {kind: outcome}}", "{earned: {kind: environment}}"),
    ),
    "a KL coefficient without a KL kind": Mistake(
        ("stages.1.loss={kind: ppo_clip, kl_coef: 0.1}",), "stages[1].loss", ("set kl to",)
    ),
    "sampling that the trainer cannot reproduce": Mistake(
        ("stages.1.top_p=0.9",), "stages[1].top_p", ("PolicyGradient has no key 'top_p'", "temperature")
    ),
    "greedy training": Mistake(("stages.1.temperature=0",), "stages[1].temperature", ("more than 0",)),
    "a split that does not exist": Mistake(
        ("evaluation.split=exam",), "evaluation.split", ("exam", "train, dev, test")
    ),
    "a misspelt split": Mistake(("stages.1.split=trian",), "stages[1].split", ("trian", "did you mean 'train'?")),
    "an unknown kind": Mistake(
        ("stages.1.loss={kind: ppo_clp}",), "stages[1].loss.kind", ("ppo_clip, reinforce", "did you mean 'ppo_clip'?")
    ),
    "a file without the name of a part": Mistake(("agent.kind=./agnt.py",), "agent.kind", ("./agnt.py:Name",)),
    "a key of another kind": Mistake(
        ("stages.1.advantage={kind: rloo, gamma: 0.9}",),
        "stages[1].advantage.gamma",
        ("kind rloo has no key 'gamma'", "belongs to kind turn_rloo or gigpo", "'stages.1.advantage={kind: ..., ...}'"),
    ),
    "a kind that is no file": Mistake(("agent.kind=./agnt.py:A",), "agent.kind", ("no such file", "agnt.py")),
    "a class that does not keep its arguments": Mistake(
        ("rewards.right.kind=./parts.py:Forgetful",), "rewards.right.at_least", ("make it a dataclass",)
    ),
    "an override without a value": Mistake(("seed",), "command line", ("seed", "key=value", "quotes")),
    "an override past the end of a list": Mistake(
        ("stages.7.steps=1",), "override stages.7.steps", ("stages.1 (policy_gradient)",)
    ),
    "an interpolation that leads nowhere": Mistake(("seed=${sed}",), "seed", ("'sed' not found", "${key}")),
    "an override that is no YAML": Mistake(("stages.1.loss={kind: ",), "override stages.1.loss", ("brackets",)),
    "a model folder without a model": Mistake(
        ("policy={kind: pretrained, path: ./}",), "policy.path", (", without config.json", "a hub name")
    ),
    "a model folder that is not there": Mistake(
        ("policy={kind: pretrained, path: /nowhere/at/all}",), "policy.path", ("/nowhere/at/all, no such folder",)
    ),
    "a reward model that is not there": Mistake(
        ("rewards.good={kind: reward_model, path: runs/gone/reward_model/0}",),
        "rewards.good.path",
        ("runs/gone/reward_model/0, no such folder", "reward_model/ of its run"),
    ),
    "a folder without a reward model": Mistake(
        ("rewards.good={kind: process_model, path: ./}",), "rewards.good.path", ("./, without config.json",)
    ),
    "a judge inside another reward that is not there": Mistake(
        ("rewards.good={kind: combine, parts: {own: {reward: {kind: grade, path: ~/gone}}}}",),
        "rewards.good.parts.own.reward.path",
        ("~/gone, no such folder",),
    ),
    "retries in groups that cannot be made of them": Mistake(
        ("stages.0.rejection_sampling={rollout: {kind: retry}}",),
        "stages[0].rejection_sampling.group_size: groups of this size cannot be made",
        ("got:      8", "a multiple of 1 + retries = 3", "change group_size"),
    ),
    "a rollout in the place of an agent": Mistake(("agent={kind: retry}",), "agent.kind", ("is a kind of rollout",)),
    "a rollout in the place of attempts": Mistake(
        ("stages.0.rejection_sampling={kind: retry}",),
        "stages[0].rejection_sampling.kind",
        ("write rollout: {kind: retry}",),
    ),
    "a list in the place of a kind": Mistake(
        ("stages.0.rejection_sampling={kind: [retry]}",),
        "stages[0].rejection_sampling.kind",
        ("Attempts has no key 'kind'",),
    ),
    "a key of SFT in a stage of RL": Mistake(
        ("stages.1.n_demonstrations=10",),
        "stages[1].n_demonstrations",
        ("'n_demonstrations' belongs to kind supervised;",),
    ),
    "a key of another world that other toolkits mean otherwise": Mistake(
        ("environment={kind: dataset, path: x.jsonl, max_steps: 4}",), "environment.max_steps", ("belongs to kind",)
    ),
    "a rollout beside attempts": Mistake(
        ("stages.0.rollout={kind: retry}",), "stages[0].rollout", ("rejection_sampling: {..., rollout: ...}",)
    ),
    "a model in the place of a policy": Mistake(
        ("policy=Qwen/Qwen3-0.6B",), "policy", ("the hub", "write {kind: pretrained, path: Qwen/Qwen3-0.6B}")
    ),
    "a file in the place of an environment": Mistake(
        ("environment=./tasks.jsonl",), "environment", ("write {kind: dataset, path: ./tasks.jsonl}",)
    ),
    "a data set in the place of an environment": Mistake(
        ("environment=openai/gsm8k",), "environment", ("write {kind: dataset, hub: openai/gsm8k}",)
    ),
    "a misspelt kind in the place of an environment": Mistake(
        ("environment=babyia",), "environment", ("write {kind: babyai}",)
    ),
    "a Python file in the place of an agent": Mistake(("agent=./parts.py",), "agent", ("{kind: ./parts.py:Name}",)),
    "text that is no agent": Mistake(("agent=zzz",), "agent", ("`rlhf recipes --kinds agent`",)),
    "a strategy in a stage": Mistake(
        ("stages.0.strategy={kind: retry}",), "stages[0].strategy", ("`rlhf evaluate --strategy`",)
    ),
}


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    return recipe_parts.write(tmp_path / "outside")


def refused(*arguments: str) -> str:
    """Run the command line in this process; return the message."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert "Traceback" not in result.output and "pydantic" not in result.output
    return result.stderr


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_recipe(echo: Path, mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(echo.parent)
    message = refused("show", str(echo), *mistake.overrides)
    assert message.startswith(f"error {mistake.where}"), message
    assert all(part in message for part in (*PARTS, *mistake.says)), message


def test_training_refuses_before_it_makes_anything(echo: Path, tmp_path: Path) -> None:
    message = refused("train", str(echo), "stages.1.group_size=1", "--out", str(tmp_path / "run"))
    assert "stages[1].group_size" in message and not (tmp_path / "run").exists()


def test_a_run_that_cannot_start_leaves_nothing_and_is_not_to_be_resumed(echo: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    broken = f"rewards.good={{kind: reward_model, path: {tmp_path}}}"
    message = refused("train", str(echo), broken, "stages=[{kind: policy_gradient}]", "--out", str(tmp_path / "run"))
    assert "cannot be loaded" in message and "--resume" not in message and not (tmp_path / "run").exists()
    # Demonstrations take time to play: these are kept, and what goes on from there is told.
    message = refused("train", str(echo), broken, "--out", str(tmp_path / "run"))
    assert f"--resume {tmp_path / 'run'}" in message and (tmp_path / "run/demonstrations/0.jsonl").is_file()


def test_a_reward_model_that_is_not_there_is_missed_before_a_run_begins(echo: Path, tmp_path: Path) -> None:
    gone = f"rewards.good={{kind: reward_model, path: {tmp_path / 'gone'}}}"
    message = refused("train", str(echo), gone, "--out", str(tmp_path / "run"))
    assert message.startswith("error rewards.good.path: there is no model") and not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_a_run(echo: Path, tmp_path: Path) -> None:
    assert "cannot be made" in refused("train", str(echo), "--out", str(echo))
    assert "other files" in refused("train", str(echo), "--out", str(echo.parent))


def test_a_model_is_no_recipe_and_a_name_no_checkpoint(echo: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert f"--checkpoint {tmp_path}" in refused("evaluate", str(tmp_path))
    assert "there is no such folder" in refused("evaluate", str(echo), "--checkpoint", "Qwen/Qwen3-0.6B")


def test_a_model_or_a_checkpoint_that_is_not_there_is_told_the_nearest(
    echo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "did you mean 'model'?" in refused("evaluate", "modle")
    assert "did you mean 'model'?" in refused("evaluate", str(echo), "--checkpoint", "modle")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text("seed: 0\n")
    assert "its run is run" in refused("evaluate", "run/checkpoints")


def test_a_policy_that_is_no_model_is_told(echo: Path) -> None:
    assert "did you mean 'base'?" in refused("train", str(echo), "policy={kind: pretrained, path: bse}")
    nowhere = refused("check", "recipe", str(echo), "policy={kind: pretrained, path: ./nowhere}")
    assert "there is no model in this folder" in nowhere


def test_data_is_no_recipe(tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    for command in ("train", "evaluate"):
        message = refused(command, str(data))
        assert "this is data and no recipe" in message and f"{{kind: dataset, path: {data}}}" in message


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    message = refused("train", str(tmp_path / "quickstrat.yaml"))
    assert "no such recipe" in message and all(part in message for part in PARTS)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("near.yam", "near.yaml"),
        ("nearr.yaml", "near.yaml"),
        ("near", "near.yaml"),
        ("sub/mine.yaml", "sub/main.yml"),
        ("sub/quickstrat", "quickstart"),  # nothing there is like it
        ("quickstart.yam", "quickstart"),  # more like it than `quick`
        ("quickstrat", "quickstart"),
    ],
)
def test_the_nearest_file_is_named(given: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("near.yaml", "quick.yaml", "near.txt", "sub/main.yml"):
        (tmp_path / name).write_text("seed: 0\n")
    assert f"did you mean '{named}'?" in refused("train", given)
    if Path(named).suffix and given != "near":
        assert f"did you mean '{named}'?" in refused("evaluate", "random", "--suite", given)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("policy: [1, 2\nseed: 0\n", ("invalid YAML", "line 2")),
        ("seed: 1\nseed: 2\n", ("'seed' is written twice",)),
        ("- policy\n", ("a recipe is a mapping",)),
        ("", ("an empty file",)),
        ("policy:\n  kind: from_scratch\n   family: llama\n", ("line 3",)),
    ],
    ids=["bracket left open", "a key twice", "a list", "empty", "indentation"],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str, says: tuple[str, ...]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    message = refused("show", str(path))
    assert all(part in message for part in (*PARTS, *says)), message


def test_a_file_that_raises_when_it_is_imported(echo: Path) -> None:
    (echo.parent / "angry.py").write_text("LIMITS = {}\nLIMITS['turns']\n")
    message = refused("check", "reward", f"{echo.parent}/angry.py:R")
    assert "KeyError: 'turns'" in message and "angry.py" in message


def test_debug_shows_the_stack_and_the_same_message(echo: Path) -> None:
    result = CliRunner().invoke(app, ["show", str(echo), "seed=x", "--debug"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and "error seed: invalid seed" in result.stderr


def test_a_message_is_json_for_scripts(echo: Path) -> None:
    result = CliRunner().invoke(app, ["show", str(echo), "sed=1", "--json"])
    error = json.loads(result.stdout.splitlines()[-1])["error"]
    assert result.exit_code == 2
    assert (error["type"], error["where"], error["do"]) == ("UnknownKeyError", "sed", "did you mean 'seed'?")


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [("{kind: textworld_express, game: coin}", "textworld_express", "twx"), ("{kind: babyai}", "minigrid", "babyai")],
    ids=["textworld_express", "babyai"],
)
def test_a_package_that_is_not_installed(echo: Path, tmp_path: Path, kind: str, package: str, extra: str) -> None:
    # Python itself marks a module that must not be imported by None; a start-up file does so before anything else.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    command = [sys.executable, "-m", "rlhf.cli", "show", str(echo), f"environment={kind}"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"do:       pip install 'rlhf-agents[{extra}]'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("engine", "package", "do"),
    [
        ("{kind: vllm}", "vllm", "make install-vllm"),
        ("{kind: vllm, servers: ['http://127.0.0.1:1']}", "aiohttp", "pip install 'rlhf-agents[servers]'"),
    ],
    ids=["vllm", "servers"],
)
def test_an_engine_that_is_not_installed_is_missed_before_a_run_begins(
    echo: Path, tmp_path: Path, engine: str, package: str, do: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    command = [sys.executable, "-m", "rlhf.cli", "train", str(echo), f"engine={engine}", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"do:       {do}" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_server_that_is_not_there_is_missed_before_a_run_begins(echo: Path, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    with socket.socket() as taken:  # bound and not listening: nobody answers, and nobody else gets it
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        out = str(tmp_path / "run")
        message = refused("train", str(echo), f"engine={{kind: vllm, servers: ['{address}']}}", "--out", out)
    assert "error engine.servers[0]: the server does not answer" in message and address in message
    assert not (tmp_path / "run").exists()


def test_a_class_that_raises_when_it_is_made(echo: Path) -> None:
    (echo.parent / "shy.py").write_text("class R:\n    def __init__(self):\n        {}['x']\n    __call__ = print\n")
    message = refused("show", str(echo), "rewards.right.kind=./shy.py:R")
    assert "rewards.right" in message and "KeyError: 'x'" in message


def test_a_trajectory_file_that_cannot_be_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "trajectories").mkdir(parents=True)
    (run / "trajectories" / "train-train-000000.parquet").write_text("no Parquet")
    assert "not a readable trajectory file" in refused("trajectories", str(run))
    assert "there is no run in this folder" in refused("trajectories", str(tmp_path))
    assert "did you mean 'solved'?" in refused("trajectories", str(run), "--outcome", "solvd")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("new", "enviroment", "maze"), "environment"),
        (("check", "recip", "quickstart"), "recipe"),
        (("compare", "runs/a", "runs/b", "--metric", "sucess"), "success"),
        (("score", "runs/a", "--reward", "outcome", "--phase", "trian"), "train"),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) else "",
)
def test_a_word_that_a_command_does_not_know(arguments: tuple[str, ...], meant: str) -> None:
    message = refused(*arguments)
    assert f"did you mean '{meant}'?" in message and all(part in message for part in PARTS)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (("check", "rewards", "outcome"), "rlhf check rewards: no such contract"),
        (("new", "agnet", "x"), "rlhf new agnet: no such part"),
        (("new", "agent", "X"), "rlhf new agent X: this is not a valid name"),
    ],
)
def test_an_argument_is_named_as_it_was_written(arguments: tuple[str, ...], where: str) -> None:
    assert refused(*arguments).startswith(f"error {where}")


def test_a_suite_of_another_command_is_named_and_none_that_is_far(echo: Path) -> None:
    for given in ("mathh", "math"):
        message = refused("evaluate", str(echo), "--suite", given)
        assert "did you mean" not in message
        assert "`rlhf check reward TARGET --suite math` judges a verifier" in message
    assert "did you mean 'quick'?" in refused("evaluate", str(echo), "--suite", "qick")


@pytest.mark.parametrize("more", [(), ("--suite", "quick")], ids=["alone", "suite"])
def test_a_run_that_is_not_there_is_told_the_nearest(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart-seed0", "maze-seed3"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.yaml").write_text("seed: 0\n")
    message = refused("evaluate", "runs/quickstart-seed1", *more)
    assert "no such recipe or run" in message and "got:      no such file or folder" in message
    assert "did you mean 'runs/quickstart-seed0'?" in message and all(part in message for part in PARTS)
    assert "did you mean 'runs/maze-seed3'?" in refused("trajectories", "runs/maze-sed3")
    assert "runs/maze-seed3, runs/quickstart-seed0" in refused("report", "runs/0")


def test_a_model_on_a_hub_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    assert is_model("Qwen/Qwen3-0.6B") and is_model("base")
    (tmp_path / "Qwen" / "one").mkdir()
    (tmp_path / "Qwen" / "one" / "recipe.yaml").write_text("seed: 0\n")
    assert not is_model("Qwen/Qwen3-0.6B")


def test_a_resumed_run_keeps_its_recipe(echo: Path, tmp_path: Path) -> None:
    from rlhf.recipe import dump, load

    run = tmp_path / "run"
    run.mkdir()
    assert "no recipe.yaml" in refused("train", "--resume", str(run))
    (run / "recipe.yaml").write_text(dump(load(echo)))
    for asked in (["seed=4"], [str(echo), "seed=4"]):
        message = refused("train", *asked, "stages.1.optimizer.lr=1", "stages.1.group_size=2", "--resume", str(run))
        assert (
            "another value of seed: 4 instead of 0, stages.1.group_size: 2 instead of " in message
            and f"rlhf train --resume {run}" in message
        )
        assert "stages.N.pairs_per_microbatch" in message and "stages.N.optimizer.lr" in message
    assert "its own folder" in refused("train", "--resume", str(run), "--out", str(tmp_path / "new"))
    assert "nothing to train" in refused("train")


@pytest.mark.parametrize("asked", ["agent.store.kind=notes", "agent.store={kind: notes, k: 2}"])
def test_a_resumed_run_keeps_the_kinds_of_its_parts(echo: Path, tmp_path: Path, asked: str) -> None:
    from rlhf.recipe import dump, load

    run = tmp_path / "run"
    run.mkdir()
    made = load(echo, ["agent={kind: remembering, store: {kind: cases, alpha: 0.5}}"])
    (run / "recipe.yaml").write_text(dump(made))
    message = refused("train", "--resume", str(run), asked)
    assert "error agent.store.kind: a run resumes with its own recipe" in message
    assert "got:      notes" in message and "expected: cases" in message
    assert f"rlhf train --resume {run}, or start a new run" in message
    # A trainer may be of another kind, and only what differs is told.
    message = refused("train", "--resume", str(run), "stages.0.trainer={kind: deepspeed}", "seed=4")
    assert "another value of seed: 4 instead of 0\n" in message


def test_a_folder_without_a_tokenizer_is_told_of(tmp_path: Path) -> None:
    """Whatever else it holds: without these files a tokenizer of no tokens would be made, and blamed on the texts."""
    from rlhf.errors import ModelError
    from rlhf.training.policy.model_files import load_folder

    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError) as error:
        load_folder(str(tmp_path))
    assert error.value.what == "there is no tokenizer in this folder" and "tokenizer.json" in error.value.expected


def test_the_folder_of_a_run_is_no_model_and_its_policy_is_named(echo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("0-supervised-000004", "1-policy_gradient-000002"):
        policy = run / "checkpoints" / name / "policy"
        policy.mkdir(parents=True)
        (policy / "config.json").write_text("{}")
        (policy.parent / "state.json").write_text("{}")
    os.utime(run / "checkpoints" / "0-supervised-000004" / "state.json", (0, 0))
    for named, kept in (
        (run, run / "checkpoints" / "1-policy_gradient-000002" / "policy"),
        (run / "checkpoints" / "0-supervised-000004", run / "checkpoints" / "0-supervised-000004" / "policy"),
    ):
        message = refused("show", str(echo), f"policy={{kind: pretrained, path: {named}}}")
        assert message.startswith("error policy.path: there is no model in this folder")
        assert f"keeps its policy in a folder of its own: {kept}" in message
    (policy / "config.json").rename(policy / "adapter_config.json")
    message = refused("show", str(echo), f"policy={{kind: pretrained, path: {run}}}")
    assert f"its policy is an adapter: `rlhf export {policy.parent} --out FOLDER`" in message
