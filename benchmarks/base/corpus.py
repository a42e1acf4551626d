"""The corpus of the base model: observations of the suites' environments and actions of their oracles, as chats.

    python benchmarks/base/corpus.py                          # runs/base/corpus.jsonl, from the training tasks
    python benchmarks/base/corpus.py --suites babyai keyhole --characters 20000 --out runs/small

Each part of each suite lies in a file of its own under --out/parts, so that the command resumes where it was
interrupted; other chats there, such as the drills of recall.py, are shuffled in. The same arguments and versions of
packages give the same bytes. Tasks that a suite judges by are left out, also where they have another name among the
training tasks.

Some episodes leave the oracle's plan for a random action now and then, and it plans on from there. Such an action is in
the context of what follows and has the weight 0, so that its correction is imitated and not the mistake.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agents.memory.contrib.constant import ConstantMemory
from agents.memory.subgoals import Subgoals
from agents.memory.summary import Summary
from agents.memory.window import Window
from agents.planner import PlannerExecutor
from agents.tools import ToolAgent
from environments.base import Capabilities, StepResult
from rlhf.build.contamination import in_both
from rlhf.data import Role, Task
from rlhf.errors import EnvError, RlhfError
from rlhf.evaluation.baselines import MessageIdRenderer
from rlhf.inference.seeds import stable_seed
from rlhf.recipe.suites import Part, list_suites, load_suite, suite_of
from rlhf.rollout.env_session import EpisodeEnded
from rlhf.rollout.episode import executor_for
from rlhf.rollout.tasks import tasks_of
from rlhf.training.stages.demonstrations import Demonstration, play_one, render

#: Suites without training tasks, those whose parts are those of others, and those whose games or plans take hours.
WITHOUT = ("bfcl", "graded", "quick", "alfworld_generated", "scienceworld", "textworld")
#: Levels of BabyAI beside those of the suite. OpenDoor, GoToRedBall, UnlockLocal and PutNextLocal are left out: they
#: show how well the base carries over.
LEVELS = {"GoToDoor": 24, "PickupDist": 24, "ActionObjDoor": 24, "OpenRedDoor": 16, "GoToObjDoor": 24}
#: Characters of a suite, and most episodes of a part.
CHARACTERS, EPISODES = 1_000_000, 2000
#: Suite -> how many times as many characters, where there are many levels or much to tell apart.
TIMES = {"babyai": 3.0, "textworld_express": 2.5, "keyhole": 1.5, "toy_text": 1.5, "textarena": 1.5, "minihack": 1.5}
#: Suite -> most episodes of a part, where each takes long to plan.
SLOW = {"minihack": 250}
#: Plays of a part that may fail.
FAILURES = 10
#: Characters of a row: most rows are cut at the first, at the end of a reply, and one in ten at the second.
SHORT, LONG = 5_000, 10_000
#: Shares of random actions in an episode, of worlds that list the possible actions and of those where they are written.
LISTED, WRITTEN = (0.0, 0.0, 0.0, 0.1, 0.25, 0.5), (0.0, 0.0, 0.0, 0.0, 0.0, 0.3)


@dataclass
class Noise:
    """Random departures from the plan, which are remembered.

    Attributes:
        share: of the actions.
        pool: actions of earlier episodes, for worlds that list none.
        strayed: whether each action of this episode was random.
    """

    share: float
    rng: random.Random
    pool: Sequence[str]
    strayed: list[bool] = field(default_factory=list)

    def is_next(self, state: StepResult) -> bool:
        """True if the next action is random; asked once before each."""
        can = bool(state.admissible_actions or self.pool)
        self.strayed.append(can and self.rng.random() < self.share)
        return self.strayed[-1]

    def action(self, state: StepResult) -> str:
        """A random action, most often a possible one."""
        self.strayed[-1] = True
        elsewhere = self.pool and (not state.admissible_actions or self.rng.random() < 0.15)
        return self.rng.choice(self.pool if elsewhere else state.admissible_actions or ("",))


def formats(part: Part) -> list[tuple[float, Any]]:
    """The agents that a part is told through, with their weights."""
    own: Any = part.agent
    bare = replace(own, system="", show_admissible=False)
    listed = replace(own, system="", show_admissible=True)
    says = {name for name in ("recall", "subgoal") if callable(getattr(part.environment, name, None))}
    rare: list[Any] = [replace(bare, memory=Window(turns=4)), replace(own, think="require")]
    if own.show_admissible:
        rare += [listed, replace(own, format="tagged"), replace(listed, memory=Window(turns=2))]
    if "recall" in says:
        rare += [replace(bare, memory=Summary()), replace(bare, think="require", memory=ConstantMemory())]
    if "subgoal" in says:
        rare += [
            PlannerExecutor(executor=bare, plan_system=""),
            PlannerExecutor(executor=replace(own, memory=Window(turns=4))),
            replace(bare, memory=Subgoals()),
        ]
    if Capabilities(part.environment).offers_tools:
        rare += [
            ToolAgent(tool_format="hermes", tool_definitions="chat_template"),
            ToolAgent(),
            ToolAgent(tool_format="xml", system=""),
        ]
    return [(0.2, own), (0.6, bare), *((0.2 / len(rare), agent) for agent in rare)]


async def chats(part: Part, tasks: Sequence[Task], name: str, n_characters: int, n: int) -> list[dict[str, Any]]:
    """Rows of at most `n` plays of a part's tasks, until they have `n_characters`.

    Args:
        part: environment, agent and limits.
        tasks: from the first on, and again.
        name: of the part, which with the number of the play gives its seed.
        n_characters: of all rows together.
        n: most plays.

    Raises:
        EnvError: more than `FAILURES` plays failed.
    """
    found: list[dict[str, Any]] = []
    failed: list[str] = []
    pool: dict[str, None] = {}
    agents, executor = formats(part), executor_for(part.environment)
    needs = [need for need in ("recall", "subgoal") if callable(getattr(part.environment, need, None))]
    shares = LISTED if getattr(part.agent, "show_admissible", False) else WRITTEN
    try:
        for i in range(n):
            rng = random.Random(stable_seed(0, "base corpus", i, name))
            noise = Noise(rng.choice(shares), rng, list(pool)[-200:])
            [agent] = rng.choices([a for _, a in agents], [w for w, _ in agents])
            most = LONG if rng.random() < 0.1 else SHORT
            try:
                one = await play_one(
                    part.environment, tasks[i % len(tasks)], noise, part.limits, executor.open(), needs
                )
            except EpisodeEnded as ended:
                failed.append(ended.detail)
                if len(failed) > FAILURES:
                    raise EnvError("too many plays failed", where=name, got=failed[0]) from ended
                continue
            pool |= dict.fromkeys(turn.action.text for turn in one.trajectory.turns if turn.valid)
            new = await rows(one, noise.strayed, agent, most)
            found += new
            n_characters -= sum(len(m["content"]) for row in new for m in row["messages"])
            if n_characters <= 0:
                break
    finally:
        await executor.close()
    return found


async def rows(one: Demonstration, strayed: Sequence[bool], agent: Any, most: int) -> list[dict[str, Any]]:
    """Chats in which `agent` would have played a demonstration: one, or several where it rewrites its prompts."""
    renderer = MessageIdRenderer()
    [told] = await render([one], agent, renderer)
    found: list[tuple[list[int], set[int]]] = []
    for turn, stray in zip(told.turns, strayed, strict=False):
        for generation in turn.action.generations:
            prompt, reply = list(generation.prompt.token_ids), list(generation.token_ids)
            extends = bool(found) and prompt[: len(found[-1][0])] == found[-1][0]
            _, learnt = found.pop() if extends else ([], set())
            found.append(([*prompt, *reply], learnt if stray else learnt | {len(prompt)}))
    return [row for ids, learnt in found if (row := _row(ids, learnt, renderer, most)) is not None]


def _row(ids: Sequence[int], learnt: set[int], renderer: MessageIdRenderer, most: int) -> dict[str, Any] | None:
    """A chat of a row, cut at the end of a reply; None where nothing of it is learnt."""
    tools = renderer.tools(ids)
    first = 1 if tools else 0
    messages: list[dict[str, Any]] = []
    n, kept = 0, 0
    for i, message in enumerate(renderer.messages(ids), start=first):
        n += len(message.content)
        if n > most:
            break
        one: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.role is Role.ASSISTANT and i not in learnt:
            one["weight"] = 0
        if message.role is Role.ASSISTANT and not message.content.strip():
            break
        messages.append(one)
        kept = len(messages) if message.role is Role.ASSISTANT else kept
    messages = messages[:kept]
    if not any(m["role"] == "assistant" and "weight" not in m for m in messages):
        return None
    return {"messages": messages, **({"tools": list(tools)} if tools else {})}


def parts_of(name: str) -> list[Part]:
    """Parts of a suite, with further levels of BabyAI."""
    suite = load_suite(name)
    if name != "babyai":
        return list(suite.parts)
    agent, tasks = {"kind": "chat", "show_admissible": True}, {"split": "test", "n": 200}
    more = {
        level.lower(): {
            "environment": {"kind": "babyai", "level": level, "max_steps": steps},
            "agent": agent,
            "limits": {"max_turns": steps},
            "tasks": tasks,
        }
        for level, steps in LEVELS.items()
    }
    return [*suite.parts, *suite_of({"parts": more}, name="levels", base=Path()).parts]


def make(name: str, out: Path, n_characters: int) -> None:
    """Write the rows of each part of a suite, where that is not done."""
    parts = parts_of(name)
    budget = int(n_characters * TIMES.get(name, 1.0)) // len(parts)
    for part in parts:
        path = out / f"{name}-{part.name}.jsonl"
        if path.is_file():
            continue
        begun, n = time.perf_counter(), SLOW.get(name, EPISODES)
        tasks = tasks_of(part.environment, "train", n)
        judged = set(in_both(tasks, part.tasks.of(part.environment)))
        tasks = [task for task in tasks if task.id not in judged]
        found = asyncio.run(chats(part, tasks, path.stem, budget, n))
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in found))
        partial.rename(path)
        length = sum(len(m["content"]) for row in found for m in row["messages"])
        took = time.perf_counter() - begun
        print(f"{path.stem}: {len(found)} rows, {length:,} characters, {len(judged)} judged, {took:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [one.name for one in list_suites()]
    most = [name for name in known if name not in WITHOUT]
    parser.add_argument("--suites", nargs="+", default=most, choices=known)
    parser.add_argument("--characters", type=int, default=CHARACTERS, help="of each suite")
    parser.add_argument("--out", type=Path, default=Path("runs") / "base")
    asked = parser.parse_args()
    (asked.out / "parts").mkdir(parents=True, exist_ok=True)
    for name in asked.suites:
        try:
            make(name, asked.out / "parts", asked.characters)
        except RlhfError as error:
            print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
    files = sorted((asked.out / "parts").glob("*.jsonl"))
    lines = [line for path in files for line in path.read_text().splitlines()]
    random.Random(0).shuffle(lines)
    (asked.out / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{asked.out / 'corpus.jsonl'}: {len(lines)} rows of {len(files)} parts")


if __name__ == "__main__":
    main()
