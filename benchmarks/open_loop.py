"""Open-loop baseline: the best sequence of actions that looks at no reply, chosen on training tasks.

    python benchmarks/open_loop.py twenty_questions matrix_game     # of suites: the share solved, and by which sequence

A suite that such a policy solves as well as a trained one shows no learning from what the environment replies. The
candidates are actions that oracles take most often, again and again; the plans that they follow most often; an action
of the list in the opening, again and again; and that list in order, whole or those with the verb that ends most plans.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

from environments.base import Capabilities, can_demonstrate
from environments.transcript import awaited
from rlhf.data import Task
from rlhf.recipe.suites import Part, load_suite
from rlhf.rollout.tasks import tasks_of
from rlhf.stats import share_interval

#: Training tasks that a sequence is chosen on, and actions or plans that are tried.
N_CHOSEN_ON, N_TRIED = 100, 6
#: Actions without an end or with one, by those that are listed at the opening.
Sequencer = Callable[[Sequence[str]], Iterator[str]]


@dataclass(frozen=True)
class Solved:
    """What a sequence comes to: number of tasks that it solves, of all, and what it does."""

    n_solved: int
    n: int
    sequence: str


def candidates(environment: Any, tasks: Sequence[Task]) -> dict[str, Sequencer]:
    """Sequences by their names."""
    found: dict[str, Sequencer] = {"the list in order": iter}
    found |= {f"always number {place} of the list": place_of_list(place) for place in (0, 1, 2, -1)}
    if not can_demonstrate(environment):
        return found
    plans = [tuple(plan) for task in tasks if (plan := environment.plan(task, ()))]
    actions, ends = Counter(action for plan in plans for action in plan), Counter(plan[-1] for plan in plans)
    verbs = Counter(plan[-1].partition(" ")[0] for plan in plans)
    often = [action for counted in (actions, ends) for action, _ in counted.most_common(N_TRIED)]
    found |= {f"always {action}": always(action) for action in often}
    found |= {", ".join(plan): plan_of(plan) for plan, _ in Counter(plans).most_common(N_TRIED)}
    return found | {f"the list in order, of {verb}": verb_of_list(verb) for verb, _ in verbs.most_common(1)}


def place_of_list(place: int) -> Sequencer:
    """The action at a place of the list, again and again."""
    return lambda listed: repeat(listed[place]) if -len(listed) <= place < len(listed) else iter(())


def always(action: str) -> Sequencer:
    """One action, again and again."""
    return lambda listed: repeat(action)


def plan_of(plan: Sequence[str]) -> Sequencer:
    """A plan of an oracle at another task."""
    return lambda listed: iter(plan)


def verb_of_list(verb: str) -> Sequencer:
    """The listed actions that begin with a word, in order."""
    return lambda listed: (action for action in listed if action.partition(" ")[0] == verb)


async def solves(environment: Any, task: Task, sequence: Sequencer, max_turns: int) -> bool:
    """True if a sequence solves a task."""
    episode = await awaited(environment.start(task))
    try:
        for action in islice(sequence(episode.opening.admissible_actions), max_turns):
            result = await awaited(episode.step(action))
            if result.terminated or result.truncated:
                return bool(result.success)
        return False
    finally:
        if close := getattr(episode, "close", None):
            await awaited(close())


async def best(part: Part, most: int | None) -> Solved:
    """What the sequence that solves most training tasks comes to on a part's own tasks, `most` at most."""
    environment, turns = part.environment, part.limits.max_turns
    seen = tasks_of(environment, "train", N_CHOSEN_ON)
    tried = candidates(environment, seen)
    solved = {name: sum([await solves(environment, task, one, turns) for task in seen]) for name, one in tried.items()}
    name = max(solved, key=solved.__getitem__)
    tasks = part.tasks.of(environment)[:most]
    n_solved = sum([await solves(environment, task, tried[name], turns) for task in tasks])
    return Solved(n_solved, len(tasks), name)


def measured(name: str, most: int | None = None) -> dict[str, Solved]:
    """Part of a suite -> what its best sequence comes to on its tasks, `most` at most."""
    found = {}
    for part in load_suite(name).parts:
        found[part.name] = asyncio.run(best(part, most))
        Capabilities(part.environment).close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", help="names of `rlhf suites`; keyhole if left out")
    for name in parser.parse_args().suites or ["keyhole"]:
        parts = measured(name)
        n_solved, n = sum(found.n_solved for found in parts.values()), sum(found.n for found in parts.values())
        low, high = share_interval(n_solved, n)
        print(f"{name}: {n_solved / n:.1%} ({low:.1%} to {high:.1%}; {n} tasks)", flush=True)
        for part, found in parts.items():
            print(f"  {part}: {found.n_solved / found.n:.1%}, {found.sequence[:100]}", flush=True)


if __name__ == "__main__":
    main()
