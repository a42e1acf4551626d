"""The commands, on a stranger's environment, agent and reward that lie in a file outside the repository."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import rlhf
from rlhf.commands import output
from rlhf.commands.output import command, print_json
from rlhf.estimate.arithmetic import arithmetic
from rlhf.recipe import load
from tests import recipe_parts
from tests.commands import last_json, run

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    return recipe_parts.write(tmp_path / "outside")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished run of the stranger's recipe, and what the command line said about it."""
    folder = tmp_path_factory.mktemp("outside")
    recipe = recipe_parts.write(folder)
    result = run("train", recipe, "stages.1.steps=2", "seed=3", "--out", folder / "run", "--json")
    return folder / "run", last_json(result)


# --- train and what follows it ---------------------------------------------------------------------------------------


def test_training_prints_its_result_as_json(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, result = trained
    wanted = {"success_before", "success_after", "interval_after", "train_s", "n_episodes", "report"}
    assert wanted <= set(result)
    assert (result["name"], result["seed"]) == ("echo", 3)
    assert result["n_episodes"] == 2 * 4 * 5  # steps x tasks_per_step x group_size
    assert Path(result["report"]).is_file() and Path(result["run"]) == folder


def test_the_resolved_recipe_of_a_run_is_its_recipe(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    assert load(folder) == load(folder.parent / "echo.yaml", ["stages.1.steps=2", "seed=3"])


def test_a_finished_run_can_be_resumed_and_trains_no_more(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, result = trained
    again = last_json(run("train", "--resume", folder, "--json"))
    assert (again["n_episodes"], again["success_after"]) == (result["n_episodes"], result["success_after"])


def test_a_run_is_evaluated_from_its_newest_checkpoint(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    result = last_json(run("evaluate", folder, "--n", "6", "--split", "dev", "--json"))
    assert (result["n"], result["n_errors"], result["split"]) == (6, 0, "dev")
    assert "1-policy_gradient-000002" in result["checkpoint"]
    low, high = result["interval"]
    assert 0 <= low <= result["success"] <= high <= 1


def test_a_checkpoint_is_evaluated_with_the_recipe_of_its_run(trained: tuple[Path, dict[str, Any]]) -> None:
    checkpoint = trained[0] / "checkpoints" / "1-policy_gradient-000000"
    result = last_json(run("evaluate", checkpoint, "--n", "4", "--json"))
    assert (result["n"], Path(result["checkpoint"])) == (4, checkpoint)


def test_the_policy_in_a_checkpoint_stands_for_it(trained: tuple[Path, dict[str, Any]]) -> None:
    checkpoint = trained[0] / "checkpoints" / "1-policy_gradient-000000"
    result = last_json(run("evaluate", checkpoint / "policy", "--n", "2", "--json"))
    assert Path(result["checkpoint"]) == checkpoint


def test_an_evaluation_says_that_a_split_is_shorter_than_asked(trained: tuple[Path, dict[str, Any]]) -> None:
    result = run("evaluate", trained[0], "--n", "50", "environment.n_tasks=3", "--json")
    assert last_json(result)["n"] == 3 and "'test' has 3 tasks, fewer than the 50 asked for" in result.stderr


@pytest.mark.parametrize(
    "override",
    ["stages.1.steps=3", "policy.hidden_size=64", "evaluation.before=false", "evaluation={allow_overlap: true}"],
)
def test_an_evaluation_refuses_what_it_would_ignore(trained: tuple[Path, dict[str, Any]], override: str) -> None:
    result = run("evaluate", trained[0], override)
    assert result.exit_code == 2 and "this key has no effect on an evaluation" in result.stderr
    assert ("--allow-overlap" in result.stderr) == ("allow_overlap" in override)


def test_a_server_refuses_what_it_would_ignore(trained: tuple[Path, dict[str, Any]]) -> None:
    result = run("serve", trained[0], "rewards.right.weight=2")
    assert result.exit_code == 2 and "this key has no effect on a server" in result.stderr


def test_a_recipe_made_from_scratch_has_nothing_to_evaluate(echo: Path) -> None:
    result = run("evaluate", echo)
    assert result.exit_code == 2 and "there are no weights" in result.stderr


def test_trajectories_are_read_and_filtered(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    everything = last_json(run("trajectories", folder, "--limit", "500", "--json"))["trajectories"]
    assert len([t for t in everything if t["phase"] == "train"]) == 40
    one_task = everything[-1]["task"]
    chosen = last_json(run("trajectories", folder, "--task", one_task, "--limit", "3", "--tokens", "--json"))
    assert {t["task"] for t in chosen["trajectories"]} == {one_task}
    generation = chosen["trajectories"][0]["turns"][0]["generations"][0]
    assert len(generation["token_ids"]) == len(generation["logprobs"]) > 0
    shown = run("trajectories", folder, "--limit", "2", "--tokens")
    assert shown.exit_code == 0 and "log-prob" in shown.stdout and "echo/" in shown.stdout
    unknown = run("trajectories", folder, "--task", f"{one_task}0", "--outcome", "failed")
    assert unknown.exit_code == 2 and "nothing is stored for this task" in unknown.stderr
    assert "did you mean '" in unknown.stderr and "one of" in unknown.stderr
    none = last_json(run("trajectories", folder, "--outcome", "env_error", "--json"))
    assert none == {"n_found": 0, "failures": []}


def test_trajectories_says_how_many_are_not_shown(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    everything = last_json(run("trajectories", folder, "--limit", "5000", "--json"))
    n = len(everything["trajectories"])
    assert everything["n_found"] == n > 40
    some = last_json(run("trajectories", folder, "--limit", "2", "--json"))
    assert (some["n_found"], len(some["trajectories"])) == (n, 2)
    assert run("trajectories", folder, "--limit", "2").stdout.splitlines()[-1] == f"2 of {n}; --limit shows more"
    assert "--limit" not in run("trajectories", folder, "--limit", "5000").stdout
    of_step = last_json(run("trajectories", folder, "--step", "1", "--limit", "3", "--json"))
    assert of_step["n_found"] == sum(t["step"] == 1 for t in everything["trajectories"]) == 20


def test_trajectories_that_are_not_there_are_told_from_those_that_are(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    for more in ((), ("--outcome", "solved"), ("--outcome", "env_error")):
        unknown = run("trajectories", folder, "--step", "99", *more)
        assert unknown.exit_code == 2 and "nothing is stored for this step" in unknown.stderr
        assert "one of steps 0 (eval, before), 1 to 2 (train, 1-policy_gradient), 2 (eval, after)" in unknown.stderr
        assert "the nearest is --step 2" in unknown.stderr
    far = run("trajectories", folder, "--attempt", "99")
    assert far.exit_code == 2 and "from 0 to 4" in far.stderr
    counts = last_json(run("trajectories", folder, "--limit", "5000", "--json"))["n_found"]
    none = run("trajectories", folder, "--outcome", "timeout")
    said = "no attempt ended as timeout; those like this ended as: "
    assert none.exit_code == 0 and none.stdout.startswith(said)
    told = none.stdout.splitlines()[0].removeprefix(said)
    assert sum(int(part.split()[0]) for part in told.split(", ")) == counts
    assert "stored are steps 0 (eval, before)" in none.stdout
    trained_on, [judged] = (
        last_json(run("trajectories", folder, "--step", step, "--limit", limit, "--json"))["trajectories"]
        for step, limit in ((1, 100), (0, 1))
    )
    assert judged["task"] not in {t["task"] for t in trained_on}
    apart = run("trajectories", folder, "--step", "1", "--task", judged["task"])
    assert apart.exit_code == 0 and "is stored, and not of one attempt" in apart.stdout


def test_the_report_can_be_written_again(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    (folder / "report.html").unlink()
    assert Path(last_json(run("report", folder, "--json"))["report"]).is_file()


def test_a_run_without_trajectories_is_a_run(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    young = tmp_path / "young"
    shutil.copytree(trained[0], young, ignore=shutil.ignore_patterns("trajectories", "report.html", "result.json"))
    assert "this run has no trajectories yet" in run("trajectories", young).stderr
    assert Path(last_json(run("report", young, "--json"))["report"]).is_file()
    assert "there is no run in this folder" in run("report", tmp_path).stderr


@pytest.mark.parametrize(
    ("sent", "ctrl_c"), [(signal.SIGINT, signal.SIG_DFL), (signal.SIGTERM, signal.SIG_IGN)], ids=["ctrl-c", "term"]
)
def test_a_stopped_run_keeps_what_was_done_and_says_how_to_go_on(
    echo: Path, tmp_path: Path, sent: signal.Signals, ctrl_c: signal.Handlers
) -> None:
    folder = tmp_path / "stopped"
    arguments = ["train", str(echo), "stages.1.steps=100000", "evaluation.n_tasks=1", "--out", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf.cli", *arguments],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what it puts into the background with Ctrl-C switched off, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, ctrl_c),
    )
    metrics = folder / "metrics.jsonl"
    give_up = time.monotonic() + 600
    while not (metrics.exists() and "policy_gradient" in metrics.read_text() and time.monotonic() < give_up):
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.1)
    process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert f"rlhf train --resume {folder}" in said and "Traceback" not in said and "got:" not in said
    assert list((folder / "checkpoints").glob("1-policy_gradient-*/state.json"))


# --- show ------------------------------------------------------------------------------------------------------------


def test_show_prints_every_default_and_the_arithmetic(echo: Path) -> None:
    shown = run("show", echo, "limits.max_turns=2")
    assert shown.exit_code == 0
    for text in ("betas: [0.9, 0.99]", "3 steps of 20 episodes", "limits.max_tokens ends a generation at 8 tokens"):
        assert text in shown.stdout
    assert "caution limits.max_turns 2 cuts episodes" in shown.stdout
    values = last_json(run("show", echo, "--json"))
    assert values["recipe"]["stages"][1]["group_size"] == 5 and values["cautions"] == []


def test_batch_arithmetic(echo: Path) -> None:
    recipe = load(echo, ["stages.1.minibatches=2", "stages.1.epochs=3", "evaluation.n_tasks=200"])
    figures = arithmetic(recipe)
    supervised, improved = figures["stages"]
    assert supervised["n_updates"] == 6  # 2 epochs x ceil(20 / 8)
    assert improved["episodes_per_step"] == 20 and improved["episodes_per_update"] == 10
    assert improved["max_turns_per_step"] == 60  # x limits.max_turns 3
    assert improved["max_sampled_tokens_per_step"] == 480  # x limits.max_tokens 8
    assert improved["max_samples_per_step"] == 20 and improved["n_episodes"] == 60
    assert improved["n_updates"] == 3 * 3 * 2
    # p = 1/2, n = 200: N = 203.6 values of which half are 1, s^2 = N / 4 / (N - 1), t(0.975, N - 1) s / sqrt(N)
    # = 1.971727 x 0.5 / sqrt(202.6) = 0.069263
    assert figures["evaluation"]["half_width_at_half"] == pytest.approx(0.069263, abs=1e-6)
    per_turn = arithmetic(load(echo, ["stages.1.layout=generation"]))["stages"][1]
    assert per_turn["max_samples_per_step"] == 60


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("lora", ["null", "{rank: 4}"])
def test_parameters_are_counted_without_building_the_model(echo: Path, family: str, lora: str) -> None:
    asked = [f"policy.family={family}", f"policy.lora={lora}", "policy.n_kv_heads=1", "policy.vocab_size=300"]
    recipe = load(echo, asked)
    # Byte-level pieces fill a vocabulary this small, so the tokenizer learns as many as it may.
    text = [" ".join(f"say {i} and {i * 7919}" for i in range(500))]
    policy = recipe.policy.build(0, text)
    assert len(policy.tokenizer) == 300
    figures = arithmetic(recipe)
    assert figures["policy"]["n_parameters"] == policy.n_parameters
    trainable = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    assert figures["policy"]["n_trainable"] == trainable
    memory = figures["memory_bytes"]
    # float32: weights 4 bytes each; gradient 4 and two moments 8 per trained parameter
    assert memory["training_total"] == 4 * policy.n_parameters + 12 * trainable


def test_a_reference_model_takes_memory_unless_it_is_the_base_of_an_adapter(echo: Path) -> None:
    kl = "stages.1.loss={kind: ppo_clip, kl: k3, kl_coef: 0.1}"
    full = arithmetic(load(echo, [kl]))
    assert full["memory_bytes"]["reference"] == 4 * full["policy"]["n_parameters"]
    found = arithmetic(load(echo, [kl, "policy.lora={}"]))
    assert found["memory_bytes"]["reference"] == 4 * found["policy"]["n_trainable"], "as stage 0 trains the adapter"


@pytest.mark.parametrize("lora", ["null", "{rank: 4}"])
def test_a_critic_takes_memory_for_what_it_holds_and_trains(echo: Path, lora: str) -> None:
    def bytes_of(critic: str, advantage: str = "gae") -> int:
        asked = [f"stages.1.advantage={{kind: {advantage}}}", f"stages.1.critic={critic}", f"policy.lora={lora}"]
        recipe = load(echo, [*asked, "policy.vocab_size=300"])
        policy = recipe.policy.build(0, text)
        model = recipe.stages[1].critic.value_model(policy, None, 0)
        trained = sum(p.numel() for p in model.trained_backbone())
        owned = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in model.head.parameters())
        # float32: an own backbone is held; gradient and two moments of what is trained, or the moments alone
        expected = 8 * trained if model.shared else 4 * owned + 12 * trained
        expected += 4 * trained if advantage == "archer" else 0  # the slow copy
        found: int = arithmetic(recipe)["memory_bytes"]["critic"]
        assert found == expected
        return found

    text = [" ".join(f"say {i} and {i * 7919}" for i in range(500))]
    own, adapted, frozen = (bytes_of(c) for c in ("{}", "{lora: {rank: 2}}", "{gradient: head}"))
    assert own == 4 * frozen > adapted > frozen
    assert bytes_of("{backbone: policy, gradient: backbone}") > 0 == bytes_of("{backbone: policy}")
    assert 4 * bytes_of("{kind: archer}", "archer") == 5 * own
    # One that is told the answer keeps what it began as.
    told = ["stages.1.advantage={kind: sweet}", "stages.1.critic={kind: sweet, warmup_steps: 1}"]
    recipe = load(echo, [*told, f"policy.lora={lora}", "policy.vocab_size=300"])
    assert 4 * arithmetic(recipe)["memory_bytes"]["critic"] == 5 * own


# --- check, recipes, version -----------------------------------------------------------------------------------------


def test_check_walks_a_strangers_parts(echo: Path) -> None:
    parts = f"{echo.parent}/parts.py"
    good = run("check", "environment", f"{parts}:Echo", "n_tasks=5")
    assert good.exit_code == 0, good.output
    bad = run("check", "agent", f"{parts}:Plumber", "--json")
    assert bad.exit_code == 2
    found = json.loads(bad.stdout.splitlines()[-1])
    assert not found["ok"] and any("NotImplementedError" in f["detail"] for f in found["reports"][0]["findings"])
    assert run("check", "reward", f"{parts}:same").exit_code == 0


def test_check_says_what_it_does_where_that_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n\n\ndef same(answer, reference):\n    time.sleep(0.02)\n    return float(answer == reference)\n"
    )
    monkeypatch.setattr(output, "_SLOW_S", 0.05)
    slow = run("check", "reward", f"{tmp_path}/slow.py:same")
    assert slow.exit_code == 0 and slow.stderr.startswith("checking the reward slow.py:same: ")
    monkeypatch.setattr(output, "_SLOW_S", 600.0)
    assert not run("check", "reward", f"{tmp_path}/slow.py:same").stderr


def test_check_walks_every_part_of_a_recipe(echo: Path) -> None:
    reports = json.loads(run("check", "recipe", str(echo), "--json").stdout.splitlines()[-1])["reports"]
    assert [r["subject"] for r in reports] == [
        "environment (parts.py:Echo)",
        "agent (parts.py:Parrot)",
        "rewards.right (parts.py:solved)",
    ]


def test_check_says_one_line_of_each_part_of_a_recipe_that_is_in_order(echo: Path) -> None:
    lines = run("check", "recipe", str(echo), "agent={kind: chat}").stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["environment (parts.py", "agent (chat)"]
    assert len(lines) == 4 and lines[2].endswith("promises kept") and lines[3].endswith("--json")
    one_broken = run("check", "recipe", str(echo)).stdout
    assert "  BROKEN  " in one_broken and one_broken.count("class: can be pickled") == 1


def test_check_tries_the_rewards_of_a_recipe_on_the_tasks_of_its_environment(tmp_path: Path) -> None:
    recipe = tmp_path / "answers.yaml"
    recipe.write_text(
        "policy: {kind: from_scratch}\nenvironment: {kind: keyhole, rows: 2, columns: 2, loops: 0}\n"
        "rewards: {right: {kind: math}, solved: {kind: outcome}}\nstages: [{kind: policy_gradient, group_size: 4}]\n"
    )
    found = run("check", "recipe", str(recipe))
    assert found.exit_code == 2
    lines = [line.strip() for line in found.stdout.splitlines()]  # the houses of Keyhole have none
    assert sum("BROKEN" in line for line in lines) == 1 and any(
        line.startswith("rewards.right (math): ") for line in lines
    )
    said = "rewards.right.kind: this reward needs references, and the tasks have none"
    assert lines.index(said) == lines.index("BROKEN  task: has the reference that this needs") + 1
    assert "expected: Task.reference" in lines and any(line.startswith("do:") for line in lines)


def test_check_leaves_a_reward_model_that_the_run_trains_to_its_stage() -> None:
    found = run("check", "recipe", "largest-reward-model", "--json")
    assert found.exit_code == 0, found.output
    [report] = [r for r in last_json(found)["reports"] if r["subject"] == "rewards.learned (reward_model)"]
    assert [f["promise"] for f in report["findings"]] == ["path: a model that stages[1] trains; it is checked there"]


def test_recipes_lists_files_and_kinds(echo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe_parts.write(tmp_path / "recipes", name="unlikely_recipe.yaml")
    monkeypatch.chdir(tmp_path)
    listed = {r["name"]: r["what"] for r in last_json(run("recipes", "--json"))["recipes"]}
    assert listed["unlikely_recipe"] == "Say the word: the smallest thing that can be trained."
    assert "gigpo" in {k["kind"] for k in last_json(run("recipes", "--kinds", "--json"))["kinds"]}
    # A terminal of 80 columns shows every name whole.
    shown = run("recipes").stdout.splitlines()
    assert max(map(len, shown)) <= 80 and set(listed) <= {line.partition(" ")[0] for line in shown}


def test_recipes_are_found_by_words() -> None:
    found = last_json(run("recipes", "Nim", "older", "--json"))["recipes"]
    assert [one["name"] for one in found] == ["textarena/nim-opponents"]
    assert {one["kind"] for one in last_json(run("recipes", "--kinds", "gigpo", "--json"))["kinds"]} == {"gigpo"}
    by_kind = {one["name"] for one in last_json(run("recipes", "dataset", "reward_model", "--json"))["recipes"]}
    assert "largest/largest-reward-model" in by_kind, "what a recipe is made of is searched too"
    missed = run("recipes", "sokobn")
    assert missed.exit_code == 2 and "got:      sokobn" in missed.stderr and "did you mean 'sokoban'?" in missed.stderr


def test_version(tmp_path: Path) -> None:
    assert last_json(run("version", "--json"))["rlhf"] == rlhf.__version__
    assert run("--version").stdout == run("version").stdout


# --- how commands fail -----------------------------------------------------------------------------------------------


def ends(function: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and message of a command that does `function`."""
    with pytest.raises(typer.Exit) as caught:
        command(function)()
    return caught.value.exit_code, capsys.readouterr().err


def test_a_full_disk_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")

    def fill() -> None:
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)

    code, said = ends(fill, capsys)
    assert code == 2 and "the disk is full" in said and os.strerror(errno.ENOSPC) in said and "--resume" in said


def test_an_unexpected_error_is_one_line_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ends(lambda: {}["x"], capsys)  # type: ignore[index]
    assert code == 1 and "KeyError: 'x'" in said and "test_cli.py, line" in said and "--debug" in said
    assert len(said.strip().splitlines()) == 1


def test_an_interrupt_has_its_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert ends(interrupted, capsys) == (130, "interrupted\n")


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), 1.0, float("inf")], "p": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.0, None], "p": "x"}
