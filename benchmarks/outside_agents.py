"""Agents of other packages, trained through the gateway, beside the inner agent with the same prompt.

    python -m venv agents-venv && agents-venv/bin/pip install openai-agents langgraph langchain-openai
    python benchmarks/outside_agents.py --python agents-venv/bin/python --seeds 0 1 2

A small model is made from scratch and taught to look up a price and to answer with it, at last by an oracle that is
wrong four times in ten: its success is then low, and reinforcement has something to find. From this one start the three
agents learn from a recipe each. Success is on unseen tasks, with 95% intervals; a finished run is not repeated.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from environments.tasks.tools import Tools, written
from rlhf.data import Task
from rlhf.settings import STRICT

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
WORLD = {"kind": "tools", "questions": ["price"], "max_steps": 6}
#: The same calls and the same telling of tools, so that inner and outside agents make the same prompts.
CALLS = {"tool_format": "python", "tool_definitions": "chat_template"}
COMMON = {
    "rewards": {"success": {"kind": "outcome"}},
    "limits": {"max_turns": 6, "max_tokens": 16, "start_timeout_s": 180.0},
    "evaluation": {"n_tasks": 100},
}
TEACH = {"kind": "supervised", "batch_size": 8}
TAUGHT: dict[str, Any] = {
    **COMMON,
    "policy": {
        "kind": "from_scratch", "hidden_size": 96, "n_layers": 2, "n_heads": 4, "max_context": 1024, "vocab_size": 512,
    },
    "environment": {**WORLD, "kind": f"{Path(__file__).resolve()}:Doubtful"},
    "agent": {"kind": "tools", **CALLS},
    "stages": [
        {
            **TEACH, "n_demonstrations": 1500, "epochs": 4, "observation_weight": 0.1,
            "optimizer": {"lr": 2.0e-3, "schedule": "cosine", "warmup_steps": 20},
        },
        {
            **TEACH, "split": "dev", "n_demonstrations": 400, "epochs": 1,
            "optimizer": {"lr": 5.0e-4, "schedule": "cosine", "warmup_steps": 5},
        },
    ],
}  # fmt: skip
STAGE = {
    "kind": "policy_gradient", "steps": 24, "tasks_per_step": 12, "group_size": 8, "minibatches": 2,
    "checkpoint_every": 0, "optimizer": {"lr": 5.0e-4, "schedule": "linear", "warmup_steps": 5},
}  # fmt: skip
#: Agent -> its program; the inner one has none.
AGENTS = {"inner": "", "openai-agents": "openai_agents.py", "langgraph": "langgraph_agent.py"}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Doubtful(Tools):
    """Prices, by an oracle that on `dev` looks up anything, and answers with anything, four times in ten."""

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Give the calls, some of them wrong."""
        rng, problem = random.Random(f"doubtful {task.seed}"), self._problem(task.seed)
        prices, right = dict(problem.prices), 0.6 if "/dev/" in task.id else 1.0
        name = problem.calls[0][1] if rng.random() < right else rng.choice(list(prices))
        value = prices[name] if rng.random() < right else rng.randint(2, 60)
        return [written("lookup", name), written("answer", value)][len(taken) :]


def recipe_of(agent: str, taught: Path, python: str) -> dict[str, Any]:
    """The recipe by which an agent learns from a taught policy."""
    found = {**COMMON, "policy": {"kind": "pretrained", "path": str(taught)}, "stages": [STAGE]}
    if not AGENTS[agent]:
        return {**found, "environment": WORLD, "agent": {"kind": "tools", **CALLS}}
    environment = {
        "kind": "external",
        "environment": WORLD,
        "reward": "environment",
        "command": [str(Path(python).absolute()), str(EXAMPLES / AGENTS[agent])],
        "n_programs": 8,
    }
    return {**found, "environment": environment, "agent": {"kind": "external", **CALLS}}


def share(found: dict[str, Any], when: str) -> str:
    """Success with its interval."""
    low, high = found[f"interval_{when}"]
    return f"{found[f'success_{when}']:.1%} ({low:.1%} to {high:.1%})"


def main() -> None:
    # Here, because runs load this file by its path, and find no other of this folder.
    from learning import run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="an interpreter with openai-agents and langgraph")
    parser.add_argument("--agents", nargs="+", choices=AGENTS, default=list(AGENTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/outside"))
    asked = parser.parse_args()
    if asked.python is None:
        print("outside_agents: name an interpreter that has openai-agents and langgraph: --python PATH")
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    print("| agent | seed | success before | success after | episodes | training, s |\n|---|---|---|---|---|---|")
    run({"name": "taught", **TAUGHT}, 0, asked.out / "taught-seed0")
    last = max((asked.out / "taught-seed0" / "checkpoints").glob("1-supervised-*/policy"))
    for seed in asked.seeds:
        for agent in asked.agents:
            recipe = {"name": agent, **recipe_of(agent, last.absolute(), asked.python)}
            found = run(recipe, seed, asked.out / f"{agent}-seed{seed}")
            print(
                f"| {agent} | {seed} | {share(found, 'before')} | {share(found, 'after')} | {found['n_episodes']:,} "
                f"| {found['train_s']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
