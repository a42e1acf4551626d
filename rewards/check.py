"""Contract checker for rewards and verifiers: reports each violated rule and the call that violated it.

print(check_reward(my_verifier))
print(check_reward(MyReward(weight=0.5), [(task, trajectory), ...]))
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle, product
from typing import Any

from rewards.base import Capabilities, GroupReward, name_of
from rewards.code.sandboxed_reward import Sandboxed
from rewards.trl_function import TrlFunction
from rewards.validation import checked_verdict
from rewards.verified import is_verifier, of_pair, takes_completions
from rlhf.data import Action, Finish, Generation, Message, Outcome, Prompt, Role, Task, Trajectory, Turn, Verdict
from rlhf.data.report import ContractChecker, Report, shorten
from rlhf.errors import RewardError

_PER_TURN_TOLERANCE = 1e-6

#: Text that a policy may well write, on purpose or not.
_TEXTS = (
    "", " \n\t", "42", "-1e309", "nan", "∞ · ٣ · ½ · 🙂", "\x00\x1b[2J\u202e\ufffd", "The answer is \\boxed{42",
    "\\frac{1}{0}", "9**9**9**9", "((((((((" * 200, '{"answer": [1, 2', "<think>so</think><answer></answer>",
    "__import__('os').getpid()", "%s %(x)d {0} {x}", "a" * 50_000,
)  # fmt: skip
_REFERENCES = ("42", "3/4", "the red ball", "x = 7\ny = 8")
_TASKS = tuple(
    Task(id=f"made-up/{i}", messages=(Message(Role.USER, "Do it."),), reference=text)
    for i, text in enumerate(_REFERENCES)
)


def check_reward(
    reward: Callable[..., Any] | GroupReward,
    tasks_and_trajectories: Iterable[tuple[Task, Trajectory]] | None = None,
    *,
    answers: Sequence[tuple[str, str]] | None = None,
    call_limit_s: float = 30.0,
) -> Report:
    """Hold `reward` to the contract of `rewards.base`.

    A callable whose first parameters are (answer, reference) is judged as a verifier, any other as a reward of
    (task, trajectory), and an object with `over_group` as one of (task, trajectories). Sync or async is the same.

    A reward for references of one form has an attribute `examples`, (answer, reference) pairs that deserve full marks;
    one that starts processes has `slow_s`, the seconds that a call may take, which else is 1; one that scores what was
    sampled has `reads_tokens`, and may refuse an attempt in which nothing was. One that runs programs,
    without examples and without records, is not ok: nothing that is made up here is a program.

    Args:
        reward: the object or function, as a recipe would build it.
        tasks_and_trajectories: real records to judge beside the made-up ones, whose tasks then are these. With a
            verifier, only the tasks' references are used.
        answers: (answer, reference) pairs that deserve full marks, for a verifier whose references are not answers
            in themselves; by default those of the reward's attribute `examples`.
        call_limit_s: a call that takes longer has hung; the walk ends there.

    Returns:
        one finding per promise; what the reward raises is a finding, never raised.
    """
    name = name_of(reward)
    if callable(reward) and takes_completions(reward):
        reward = TrlFunction(reward)
    declared = Capabilities(reward)
    records = list(tasks_and_trajectories or ())
    examples = answers if answers is not None else declared.examples
    if declared.over_group is not None:
        checker = ContractChecker(f"reward {name} of groups", call_limit_s)
        return checker.run(lambda: _check_group_reward(_Judge(checker, reward), records))
    verifier = is_verifier(reward)
    checker = ContractChecker(f"{'verifier' if verifier else 'reward'} {name}", call_limit_s)
    judge = _Judge(checker, of_pair(reward))
    if verifier:
        references = [task.reference for task, _ in records if task.reference is not None]
        pairs = examples or [(text, text) for text in references or _REFERENCES]
        return checker.run(lambda: _check_verifier(judge, pairs))
    return checker.run(lambda: _check_reward(judge, records, examples))


class _Judge:
    """Calls the reward twice each time, looks the verdicts over and keeps the time."""

    def __init__(self, checker: ContractChecker, reward: Any) -> None:
        self.checker, self.reward = checker, reward
        self.times_s: list[list[float]] = []

    async def over_group(self, task: Task, trajectories: Sequence[Trajectory], during: str) -> list[Verdict] | None:
        found, took_s = [], self._timed()
        for _ in range(2):
            begin = time.perf_counter()
            ok, given = await self.checker.call(
                "over_group: raises nothing", self.reward.over_group, task, trajectories, during=during
            )
            took_s.append(time.perf_counter() - begin)
            if not ok:
                return None
            aligned = isinstance(given, list | tuple) and len(given) == len(trajectories)
            if not self.checker.note(aligned, "over_group: one verdict per trajectory", f"{during}: {shorten(given)}"):
                return None
            verdicts = [self._verdict(one, during) for one in given]
            if None in verdicts:
                return None
            found.append([v for v in verdicts if v is not None])
        first, again = ([(v.value, v.per_turn) for v in verdicts] for verdicts in found)
        self.checker.note(
            first == again, "over_group: same arguments, same verdicts", f"{during}: {first}, then {again}"
        )
        return found[0]

    async def __call__(self, *arguments: Any, during: str) -> Verdict | None:
        verdicts, took_s = [], self._timed()
        for _ in range(2):
            begin = time.perf_counter()
            ok, given = await self.checker.call("call: raises nothing", self.reward, *arguments, during=during)
            took_s.append(time.perf_counter() - begin)
            verdict = self._verdict(given, during) if ok else None
            if verdict is None:
                return None
            verdicts.append(verdict)
        first, again = verdicts
        same = (first.value, first.per_turn) == (again.value, again.per_turn)
        got = f"{during}: {first.value!r}, then {again.value!r}"
        self.checker.note(same, "call: same arguments, same verdict", got)
        return first

    def _timed(self) -> list[float]:
        self.times_s.append([])
        return self.times_s[-1]

    def speed(self) -> None:
        # Every call is made twice, and the quicker counts: the first may load what it needs.
        times_s = [min(took_s) for took_s in self.times_s]
        median_s, longest_s = statistics.median(times_s), max(times_s)
        seen = f"median {median_s * 1e3:.3g} ms, longest {longest_s * 1e3:.3g} ms over {len(times_s)} calls"
        slow_s = float(Capabilities(self.reward).slow_s)
        self.checker.note(longest_s < slow_s, f"call: takes under {slow_s:g} s", seen, seen=seen)

    def _verdict(self, given: Any, during: str) -> Verdict | None:
        promise = "verdict: a Verdict or a number, finite"
        try:
            verdict = checked_verdict(given, during)
        except RewardError as error:
            self.checker.note(False, promise, f"{during}: {shorten(given)}: {error.what}")
            return None
        self.checker.note(True, promise)
        return verdict


async def _check_verifier(judge: _Judge, pairs: Sequence[tuple[str, str]]) -> None:
    note = judge.checker.note
    for answer, reference in pairs:
        for text in (answer, *_TEXTS):
            during = f"answer {shorten(text, 40)}, reference {shorten(reference, 40)}"
            verdict = await judge(text, reference, during=during)
            if verdict is None:
                continue
            got = f"{during}: {verdict.value!r}"
            note(0 <= verdict.value <= 1, "verifier: between 0 and 1", got)
            if text == answer:
                hint = "; give it pairs of another kind as an attribute `examples` where answers look otherwise"
                is_full = math.isclose(verdict.value, 1)
                note(is_full, "verifier: full marks for the right answer", got if is_full else got + hint)
            elif not text.strip() and reference.strip():
                note(verdict.value == 0, "verifier: nothing for an empty answer", got)
    judge.speed()


async def _check_reward(
    judge: _Judge, records: Sequence[tuple[Task, Trajectory]], examples: Sequence[tuple[str, str]]
) -> None:
    note = judge.checker.note
    _check_names(judge)
    if isinstance(judge.reward, Sandboxed) and not records:
        got = "none: nothing that is tried here is a program, so no program would be run"
        note(bool(examples), "examples: programs that deserve full marks, to try it with", got)
    right = [_example(*pair) for pair in examples]
    for task, trajectory in [*right, *records, *_made_up([task for task, _ in records or right] or _TASKS)]:
        before, during = repr((task, trajectory)), f"{task.id}, {len(trajectory.turns)} turns, {trajectory.outcome}"
        if trajectory.turns:
            during += f", the last action {shorten(trajectory.turns[-1].action.text, 40)}"
        verdict = await judge(task, trajectory, during=during)
        note(repr((task, trajectory)) == before, "call: leaves task and trajectory as they are", during)
        if verdict is not None:
            _check_per_turn(judge, verdict, trajectory, during)
        if verdict is not None and (task, trajectory) in right:
            note(math.isclose(verdict.value, 1), "call: full marks for its examples", f"{during}: {verdict.value!r}")
    judge.speed()


async def _check_group_reward(judge: _Judge, records: Sequence[tuple[Task, Trajectory]]) -> None:
    note = judge.checker.note
    _check_names(judge)
    found: dict[str, tuple[Task, list[Trajectory]]] = {}
    needs_tokens = Capabilities(judge.reward).reads_tokens
    for task, trajectory in [*records, *_made_up([task for task, _ in records] or _TASKS)]:
        if needs_tokens and not trajectory.n_tokens:
            continue
        found.setdefault(task.id, (task, []))[1].append(trajectory)
    for task, attempts in found.values():
        for n in sorted({1, 2, len(attempts)} & set(range(len(attempts) + 1))):
            group = tuple(replace(t, attempt=i) for i, t in enumerate(attempts[-n:]))
            before, during = repr((task, group)), f"{task.id}, {n} trajectories"
            verdicts = await judge.over_group(task, group, during)
            note(repr((task, group)) == before, "over_group: leaves task and trajectories as they are", during)
            for verdict, trajectory in zip(verdicts or (), group, strict=False):
                _check_per_turn(judge, verdict, trajectory, during)
    judge.speed()


def _check_names(judge: _Judge) -> None:
    declared = Capabilities(judge.reward)
    weight = declared.weight
    is_number = isinstance(weight, int | float) and math.isfinite(weight)
    judge.checker.note(is_number, "weight: is a finite number", shorten(weight))
    name = declared.name
    judge.checker.note(isinstance(name, str) and bool(name), "name: is a non-empty text", shorten(name))


def _check_per_turn(judge: _Judge, verdict: Verdict, trajectory: Trajectory, during: str) -> None:
    if verdict.per_turn is None:
        return
    n, k = len(verdict.per_turn), len(trajectory.turns)
    judge.checker.note(n == k, "Verdict.per_turn: one number per turn", f"{during}: {n} numbers")
    gap = abs(sum(verdict.per_turn) - verdict.value)
    right = gap <= _PER_TURN_TOLERANCE * max(1.0, abs(verdict.value))
    got = f"{during}: {shorten(verdict.per_turn)} against {verdict.value!r}"
    judge.checker.note(right or k == 0, "Verdict.per_turn: sums to the value", got)


def _made_up(tasks: Sequence[Task]) -> list[tuple[Task, Trajectory]]:
    """Synthetic trajectories: every text in one turn and in three, every outcome, and none of either.

    They attempt `tasks`, so that a reward meets only references of the kind it is made for.
    """
    outcomes = [outcome for outcome in Outcome if not outcome.is_infrastructure_error]
    shapes = [*product((0,), ("",) * len(outcomes)), *product((1, 3), _TEXTS)]
    records = []
    for i, ((n_turns, text), outcome) in enumerate(zip(shapes, cycle(outcomes), strict=False)):
        task = tasks[i % len(tasks)]
        turns = tuple(_turn(text, t, last=t == n_turns - 1) for t in range(n_turns))
        records.append((task, Trajectory(task.id, 0, "You see a door.", turns, outcome)))
    return records


def _example(answer: str, reference: str) -> tuple[Task, Trajectory]:
    task = Task(id=f"example/{shorten(answer, 20)}", messages=(Message(Role.USER, "Do it."),), reference=reference)
    return task, Trajectory(task.id, 0, "Go on.", (_turn(answer, 0, last=True),), Outcome.FAILED)


def _turn(text: str, index: int, *, last: bool) -> Turn:
    generation = Generation(Prompt((1, 2, 3)), (4, 5, 6), (-0.1, -0.2, -0.3), Finish.STOP, 0)
    unread = index == 1
    action = Action("" if unread else text, (generation,), "no action found" if unread else None)
    return Turn(action, text, reward=float(last), state_key=f"s{index}", valid=not unread)
