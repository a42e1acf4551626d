"""A run whose agent is a program with the OpenAI SDK: its success rises, and its record reads as any other."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from rlhf.build.train import train
from rlhf.evaluation.store import read_trajectories
from rlhf.recipe import load
from rlhf.recipe.text import to_text
from tests.gateway.talks import model, tokenizer

pytest.importorskip("uvicorn")
pytest.importorskip("openai")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: Asks once, with two tools, and is content where the policy calls, or begins to call, the one to look with.
AGENT = """
import openai
from attempts import attempts

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "add")
]
for attempt in attempts():
    client = openai.OpenAI(base_url=attempt.base_url, api_key=attempt.key)
    asked = [{"role": "user", "content": "Look."}]
    said = client.chat.completions.create(model="policy", messages=asked, tools=TOOLS).choices[0].message
    called = [call.function.name for call in said.tool_calls or ()]
    attempt.finish(reward=float("look" in called or '"look"' in (said.content or "")))
"""


def run_with(folder: Path, steps: int, n_tasks: int) -> dict[str, float]:
    """Train a tiny model by a program, in `folder`, and return what the run says at its end."""
    model().save_pretrained(folder / "tiny")
    tokenizer().save_pretrained(folder / "tiny")
    (folder / "agent.py").write_text(AGENT)
    recipe = {
        "name": "outside",
        "policy": {"kind": "pretrained", "path": str(folder / "tiny"), "dtype": "float32"},
        "environment": {
            "kind": "external",
            "environment": {"kind": "keyhole"},
            "command": [sys.executable, str(folder / "agent.py")],
            "variables": {"PYTHONPATH": str(EXAMPLES)},
            "n_programs": 2,
        },
        "agent": {"kind": "external"},
        "rewards": {"earned": {"kind": "environment"}},
        "limits": {"max_tokens": 3, "max_context": 512, "max_turns": 2, "start_timeout_s": 120.0},
        "evaluation": {"n_tasks": n_tasks},
        "stages": [
            {
                "kind": "policy_gradient",
                "steps": steps,
                "tasks_per_step": 4,
                "group_size": 8,
                "optimizer": {"lr": 2.0e-2},
            }
        ],
    }
    path = folder / "outside.yaml"
    path.write_text(to_text(recipe))
    return train(load(str(path)), folder / "run")


@pytest.mark.extended
def test_an_agent_of_another_program_learns(tmp_path: Path) -> None:
    told = run_with(tmp_path, steps=15, n_tasks=40)
    print(told)
    assert told["success_before"] < 0.4 and told["success_after"] > 0.85


def test_a_run_trains_on_what_a_program_does(tmp_path: Path) -> None:
    told = run_with(tmp_path, steps=1, n_tasks=4)
    assert told["n_episodes"] == 32
    records = list(read_trajectories(tmp_path / "run" / "trajectories", phase="train"))
    assert len(records) == 32 and all(len(record.trajectory.generations) == 1 for record in records)
    assert {record.score.parts["earned"].value for record in records} <= {0.0, 1.0}


def test_the_recipe_of_the_page_trains_with_its_program(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "gateway.md").read_text("utf-8")
    for name in ("outside.yaml", "agent.py"):
        [text] = re.findall(rf"```\w+\n(# {re.escape(name)}\n.*?)```", page, re.DOTALL)
        (tmp_path / name).write_text(text)
    questions = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(40)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    model().save_pretrained(tmp_path / "tiny")
    tokenizer().save_pretrained(tmp_path / "tiny")
    here = [f"policy.path={tmp_path / 'tiny'}", "policy.dtype=float32", f"environment.folder={tmp_path}"]
    here += [f"environment.command=[{sys.executable}, agent.py]", "limits.max_tokens=4", "evaluation.n_tasks=2"]
    small = ["stages.0.steps=1", "stages.0.tasks_per_step=2", "stages.0.group_size=2", "evaluation.allow_overlap=true"]
    told = train(load(str(tmp_path / "outside.yaml"), [*here, *small]), tmp_path / "run")
    assert told["n_episodes"] == 4
    records = list(read_trajectories(tmp_path / "run" / "trajectories", phase="train"))
    assert len(records) == 4 and all(len(record.trajectory.generations) == 1 for record in records)
    assert all(record.score is not None and record.score.parts["right"].value == 0.0 for record in records)
