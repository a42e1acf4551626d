"""What `rlhf check` and the trial before a run say of a recipe whose agent is a program outside."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from environments.check import check_environment
from environments.games.key_door import Keyhole
from rlhf.gateway.environment import External
from rlhf.rollout.episode import lanes_of

pytest.importorskip("uvicorn")
#: Asks once, with the fields of the request that it is given, and posts a reward some time later.
AGENT = """
import json, os, sys, time, urllib.error, urllib.request
task, key = json.loads(os.environ["RLHF_TASK"]), os.environ["RLHF_KEY"]
def post(url, body):
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)))
asked = {"messages": [{"role": "user", "content": task["id"]}], **json.loads(sys.argv[1])}
post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked)
time.sleep(0.02)
post(os.environ["RLHF_SESSION"] + "/reward", {"reward": 1.0})
"""


def command_of(folder: Path, **how: Any) -> list[str]:
    """The command of such a program, written into a folder."""
    (folder / "agent.py").write_text(AGENT)
    return [sys.executable, str(folder / "agent.py"), json.dumps(how)]


def test_an_environment_that_waits_for_its_program_keeps_all_promises(tmp_path: Path) -> None:
    environment = External(world=Keyhole(), command=tuple(command_of(tmp_path)))
    try:
        report = check_environment(environment, n_tasks=1, max_steps=1)
    finally:
        environment.close()
    assert report.ok, str(report)
    assert lanes_of(environment).inline  # where its requests are answered
