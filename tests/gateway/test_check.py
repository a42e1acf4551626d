"""What `rlhf check` and the trial before a run say of a recipe whose agent is a program outside."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from environments.check import check_environment
from environments.games.key_door import Keyhole
from rlhf.build.preflight import try_once
from rlhf.build.train import train
from rlhf.commands.output import EXIT_USER_ERROR
from rlhf.errors import EnvError
from rlhf.gateway.environment import External
from rlhf.recipe import load
from rlhf.recipe.text import to_text
from rlhf.rollout.episode import executor_for
from tests.commands import run

pytest.importorskip("uvicorn")
#: Asks once, with the fields of the request that it is given, and posts a reward some time later.
AGENT = """
import json, os, sys, time, urllib.error, urllib.request
task, key = json.loads(os.environ["RLHF_TASK"]), os.environ["RLHF_KEY"]
def post(url, body):
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)))
if "early" in sys.argv: raise SystemExit("I end early")
asked = {"messages": [{"role": "user", "content": task["id"]}], **json.loads(sys.argv[1])}
try:
    post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked)
except urllib.error.HTTPError:
    if "unmoved" not in sys.argv: raise
if "late" in sys.argv: raise SystemExit("I end late")
time.sleep(0.02)
post(os.environ["RLHF_SESSION"] + "/reward", {"reward": 1.0})
"""


def command_of(folder: Path, *words: str, **how: Any) -> list[str]:
    """The command of such a program, written into a folder."""
    (folder / "agent.py").write_text(AGENT)
    return [sys.executable, str(folder / "agent.py"), json.dumps(how), *words]


def recipe_with(folder: Path, *words: str, agent: dict[str, Any] | None = None, **how: Any) -> str:
    """The path of a recipe of a program that sends these fields."""
    recipe = {
        "name": "outside",
        "policy": {"kind": "from_scratch", "hidden_size": 32, "n_layers": 1, "n_heads": 2},
        "environment": {
            "kind": "external",
            "environment": {"kind": "keyhole"},
            "command": command_of(folder, *words, **how),
        },
        "agent": {"kind": "external", **(agent or {})},
        "rewards": {"earned": {"kind": "environment"}},
        "limits": {"max_tokens": 4, "max_turns": 2},
        "evaluation": {"n_tasks": 2},
        "stages": [{"kind": "policy_gradient", "steps": 1, "tasks_per_step": 2, "group_size": 2}],
    }
    path = folder / "outside.yaml"
    path.write_text(to_text(recipe))
    return str(path)


def test_an_environment_that_waits_for_its_program_keeps_all_promises(tmp_path: Path) -> None:
    environment = External(environment=Keyhole(), command=tuple(command_of(tmp_path)))
    try:
        report = check_environment(environment, n_tasks=1, max_steps=1)
    finally:
        environment.close()
    assert report.ok, str(report)
    assert executor_for(environment).inline  # where its requests are answered


def test_a_run_whose_program_sends_refused_parameters_ends_before_it_begins(tmp_path: Path) -> None:
    recipe = load(recipe_with(tmp_path, temperature=0.3))
    with pytest.raises(EnvError, match=r"(?s)refused with 400.*temperature=0\.3.*override_sampling.*status 1"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("word", "place"), [("early", "start"), ("late", "step")])
def test_a_program_that_crashes_is_to_be_mended_and_no_environment(word: str, place: str, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="agent's program fails at its first tasks") as refused:
        attempted_with(recipe_with(tmp_path, word))
    assert f"agent_error: {place}: " in refused.value.got and f"I end {word}" in refused.value.got
    assert refused.value.hint == "mend the program"


@pytest.mark.parametrize(("body", "status"), [({"reward": "much"}, 400), (None, 401)])
def test_a_reward_that_was_refused_is_named_in_the_trial(body: Any, status: int, tmp_path: Path) -> None:
    """400 for a reward that is none, 401 for one without the key."""
    path = recipe_with(tmp_path)
    sent = f', json.dumps({body}).encode(), {{"Authorization": f"Bearer {{key}}"}}' if body else ', b"{}"'
    posts = f'urllib.request.urlopen(urllib.request.Request(os.environ["RLHF_SESSION"] + "/reward"{sent}))'
    unheard = f"try:\n    {posts}\nexcept urllib.error.HTTPError: pass\n"
    program = tmp_path / "agent.py"
    program.write_text(program.read_text().rpartition("post(")[0] + unheard)
    with pytest.raises(EnvError, match="the attempt ended without a reward") as raised:
        asyncio.run(try_once(load(path, ["environment.reward_timeout_s=0.5"])))
    assert f"refused with {status}: " in raised.value.got, raised.value.got
    assert raised.value.where.count("/train/0") == 1
    command = raised.value.hint.partition("to try it alone: ")[2]
    assert command.startswith('`rlhf check environment external \'environment={"kind": "keyhole"}\''), command


def attempted_with(recipe: str) -> list[str]:
    """What the trial before a run says of a recipe."""
    said: list[str] = []
    asyncio.run(try_once(load(recipe), said.append))
    return said


def test_a_program_that_gets_over_a_refusal_is_told_of(tmp_path: Path) -> None:
    (said,) = attempted_with(recipe_with(tmp_path, "unmoved", n=2))
    assert "refused with 400" in said and "n=2" in said and "override_sampling" in said


def test_a_program_may_send_parameters_that_the_recipe_overrides_or_has(tmp_path: Path) -> None:
    assert not attempted_with(recipe_with(tmp_path, n=2, agent={"override_sampling": True}))
    assert not attempted_with(recipe_with(tmp_path, temperature=1))


def test_the_check_of_a_recipe_says_what_its_program_is_refused(tmp_path: Path) -> None:
    done = run("check", "recipe", recipe_with(tmp_path, "unmoved", temperature=0.3))
    assert done.exit_code == EXIT_USER_ERROR, done.output
    assert done.stdout.count("BROKEN") == 1 and "BROKEN  program: makes an attempt" in done.stdout
    assert "400" in done.stdout and "temperature=0.3" in done.stdout and "override_sampling" in done.stdout


def test_the_check_of_a_sound_recipe_finds_nothing(tmp_path: Path) -> None:
    done = run("check", "recipe", recipe_with(tmp_path))
    assert done.exit_code == 0 and "environment.command: 1 of 1" in done.stdout, done.output
