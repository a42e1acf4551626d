"""The agents in `examples/`, each in its own interpreter, solving tasks with tools by a policy that knows how.

Those of other packages are played where a variable names an interpreter that has them: `RLHF_TEST_AGENTS_PYTHON` for
openai-agents and LangGraph, `RLHF_TEST_VERIFIERS_PYTHON` for verifiers and uv, `RLHF_TEST_NODE` for a folder with
node_modules/openai.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agents.tool_calls import ToolCall, write_calls
from environments.tasks.dataset import Dataset
from environments.tasks.tools import Tools
from rlhf.data import SamplingParams, Trajectory
from rlhf.gateway.agent import ExternalAgent
from rlhf.gateway.environment import External
from rlhf.inference.scripted import ScriptedEngine
from rlhf.rollout.group import run_groups
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer
from tests.gateway.talks import tokenizer

pytest.importorskip("uvicorn")
pytest.importorskip("openai")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def knowing(text: str) -> str:
    """Looks a price up, and answers with it."""
    name = re.findall(r"What does 1 (\w+) cost", text)[-1]
    price = re.findall(rf"{name}: (\d+)", text)
    call = ToolCall("answer", {"value": int(price[-1])}) if price else ToolCall("lookup", {"name": name})
    return f"<think>Well.</think>\n{write_calls([call], 'hermes')}"


def play(command: list[str], n: int = 2, **settings: Any) -> list[Trajectory]:
    """Have a program make `n` attempts."""
    world = Tools(questions=("price",))
    environment = External(environment=world, command=tuple(command), n_programs=1, reward="environment", **settings)

    async def body() -> list[list[Trajectory]]:
        engine = ScriptedEngine(knowing, tokenizer=tokenizer(), max_context=8192)
        limits = Limits(max_tokens=200, max_turns=8, start_timeout_s=200, step_timeout_s=100)
        parts = (environment, ExternalAgent(), engine, Renderer(tokenizer()), limits, SamplingParams())
        return await run_groups(list(world.tasks("train"))[:n], *parts, group_size=1, seed=0)

    try:
        return [trajectory for group in asyncio.run(body()) for trajectory in group]
    finally:
        environment.close()


def check_solved(played: list[Trajectory]) -> None:
    """Each is solved in two turns, whose prompts extend each other, and nothing forks."""
    for trajectory in played:
        assert trajectory.solved, (trajectory.outcome, trajectory.detail)
        first, second = trajectory.generations
        assert second.prompt.extends(first)
        assert not any(turn.action.notes for turn in trajectory.turns)


def test_the_agent_of_the_openai_sdk_solves_tasks_with_tools() -> None:
    check_solved(play([sys.executable, str(EXAMPLES / "openai_sdk.py")]))


@pytest.mark.parametrize("name", ["openai_agents", "langgraph_agent"])
def test_the_agents_of_other_packages_solve_tasks_with_tools(name: str) -> None:
    python = os.environ.get("RLHF_TEST_AGENTS_PYTHON")
    if not python:
        pytest.skip("RLHF_TEST_AGENTS_PYTHON names no interpreter with openai-agents and langgraph")
    check_solved(play([python, str(EXAMPLES / f"{name}.py")]))


SUMS = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = ""


class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.messages[-1].content == self.data.answer)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for i in range(4):
            yield Sum(Data(prompt=f"What is {i} + 1?", answer=str(i + 1)), self.config.task)


__all__ = ["Sums"]
"""


def test_a_taskset_of_verifiers_is_played_as_it_is(tmp_path: Path) -> None:
    python = os.environ.get("RLHF_TEST_VERIFIERS_PYTHON")
    if not python:
        pytest.skip("RLHF_TEST_VERIFIERS_PYTHON names no interpreter with verifiers")
    (tmp_path / "vf_sums.py").write_text(SUMS)
    variables = {"PYTHONPATH": str(tmp_path)}
    command = (python, str(EXAMPLES / "verifiers_agent.py"))
    listed = subprocess.run(
        [*command, "--list", "vf-sums"], env=os.environ | variables, check=True, capture_output=True
    )
    (tmp_path / "tasks.jsonl").write_bytes(listed.stdout)
    world = Dataset(path=tmp_path / "tasks.jsonl", split_ratios={"train": 1.0})
    environment = External(environment=world, command=(*command, "vf-sums"), variables=variables)
    engine = ScriptedEngine(lambda text: "3", tokenizer=tokenizer(), max_context=8192)

    async def body() -> list[list[Trajectory]]:
        limits = Limits(max_tokens=200, max_turns=8, start_timeout_s=500, step_timeout_s=100)
        parts = (environment, ExternalAgent(), engine, Renderer(tokenizer()), limits, SamplingParams())
        return await run_groups(list(world.tasks("train")), *parts, group_size=1, seed=0)

    played = [trajectory for group in asyncio.run(body()) for trajectory in group]
    environment.close()
    solved = {t.opening for t in played if t.solved}
    assert len(solved) == 1 and "What is 2 + 1?" in solved.pop(), [(t.outcome, t.detail) for t in played]
    assert len(played) == 4


def test_the_agent_in_node_solves_tasks_with_tools() -> None:
    folder = os.environ.get("RLHF_TEST_NODE")
    if not folder or not shutil.which("node"):
        pytest.skip("RLHF_TEST_NODE names no folder with node_modules/openai")
    copied = Path(shutil.copy(EXAMPLES / "node_agent.mjs", folder))
    check_solved(play(["node", str(copied)]))


@pytest.mark.parametrize("name", ["openai_sdk.py", "openai_agents.py", "langgraph_agent.py", "node_agent.mjs"])
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 60
