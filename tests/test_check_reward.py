"""Each broken reward or verifier is caught, with the finding that names what it broke; sound ones pass."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from rewards.check import _TEXTS, check_reward
from rewards.code.sandboxed_reward import Sandboxed
from rewards.verified import Verified
from rlhf.data import Outcome, Task, Trajectory, Verdict
from rlhf.data.report import Report
from rlhf.errors import RecipeError
from tests.commands import last_json, run


def broken(report: Report) -> list[str]:
    return [finding.promise for finding in report.broken]


def same_text(answer: str, reference: str) -> float:
    return float(answer.strip() == reference.strip())


@dataclass(frozen=True)
class Solved:
    """Counts on the turns that the environment rewarded; async, as a judge over a network would be."""

    weight: float = 1.0

    async def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        per_turn = tuple(turn.reward for turn in trajectory.turns)
        return Verdict(sum(per_turn), per_turn=per_turn)


@pytest.mark.parametrize("reward", [same_text, Solved(), lambda task, trajectory: float(trajectory.solved)])
def test_sound_rewards_pass(reward: Any) -> None:
    report = check_reward(reward)
    assert report.ok, str(report)


def test_a_function_of_answer_and_reference_is_judged_as_a_verifier() -> None:
    assert check_reward(same_text).subject == "verifier same_text"
    assert check_reward(Solved()).subject == "reward Solved"


# --- verifiers that break a promise --------------------------------------------------------------------------------


def needs_a_number(answer: str, reference: str) -> float:
    return float(float(answer) == float(reference or "0"))


def kind_to_silence(answer: str, reference: str) -> float:
    return float(answer.strip() in reference)


def stingy(answer: str, reference: str) -> float:
    return 0.5 * (answer.strip() == reference.strip())


def generous(answer: str, reference: str) -> float:
    return 2.0 * (answer.strip() == reference.strip())


def says_yes(answer: str, reference: str) -> Any:
    return "yes"


_CALLS = itertools.count()


def moody(answer: str, reference: str) -> float:
    return (next(_CALLS) % 7) / 7


def dawdles_over_long_answers(answer: str, reference: str) -> float:
    time.sleep(1.1 if len(answer) > 10_000 and reference == "42" else 0)
    return same_text(answer, reference)


@pytest.mark.parametrize(
    ("verifier", "promise", "got"),
    [
        (needs_a_number, "call: raises nothing", "ValueError: could not convert string to float"),
        (kind_to_silence, "verifier: nothing for an empty answer", "answer '', reference '42': 1.0"),
        (stingy, "verifier: full marks for the right answer", "answer '42', reference '42': 0.5"),
        (generous, "verifier: between 0 and 1", "answer '42', reference '42': 2.0"),
        (says_yes, "verdict: a Verdict or a number, finite", "'yes'"),
        (moody, "call: same arguments, same verdict", "then"),
        (dawdles_over_long_answers, "call: takes under 1 s", "longest 1"),
    ],
)
def test_broken_verifiers_are_caught(verifier: Any, promise: str, got: str) -> None:
    report = check_reward(verifier)
    assert promise in broken(report), str(report)
    assert got in next(finding.detail for finding in report.broken if finding.promise == promise)


def test_a_verifier_with_its_parameters_the_wrong_way_round_is_refused() -> None:
    def judge(reference: str, answer: str) -> float:
        return float(answer.strip() == reference.strip() != "")

    with pytest.raises(RecipeError, match="a verifier takes the answer first"):
        check_reward(judge)


def test_answers_may_differ_from_their_references() -> None:
    def boxed(answer: str, reference: str) -> float:
        return float(answer.endswith(f"\\boxed{{{reference}}}"))

    assert broken(check_reward(boxed)) == ["verifier: full marks for the right answer"]
    assert check_reward(boxed, answers=[("It is \\boxed{7}", "7")]).ok


# --- rewards that break a promise ----------------------------------------------------------------------------------


def looks_at_the_last_turn(task: Task, trajectory: Trajectory) -> float:
    return trajectory.turns[-1].reward


def not_a_number(task: Task, trajectory: Trajectory) -> float:
    return math.nan


def one_share_for_all(task: Task, trajectory: Trajectory) -> Verdict:
    return Verdict(1.0, per_turn=(1.0,))


def shares_too_much(task: Task, trajectory: Trajectory) -> Verdict:
    return Verdict(1.0, per_turn=(1.0,) * len(trajectory.turns))


def nan_verdict(task: Task, trajectory: Trajectory) -> Verdict:
    return Verdict(math.nan)


@dataclass(frozen=True)
class Weightless(Solved):
    weight: Any = "heavy"


class Thief:
    def __call__(self, task: Task, trajectory: Trajectory) -> float:
        object.__setattr__(trajectory, "turns", ())
        return 0.0


@pytest.mark.parametrize(
    ("reward", "promise", "got"),
    [
        (looks_at_the_last_turn, "call: raises nothing", "0 turns, solved: IndexError"),
        (not_a_number, "verdict: a Verdict or a number, finite", "nan"),
        (nan_verdict, "call: raises nothing", "DataError"),
        (one_share_for_all, "Verdict.per_turn: one number per turn", "0 turns, solved: 1 numbers"),
        (shares_too_much, "Verdict.per_turn: sums to the value", "(1.0, 1.0, 1.0) against 1.0"),
        (Weightless(), "weight: is a finite number", "'heavy'"),
        (Thief(), "call: leaves task and trajectory as they are", ""),
    ],
)
def test_broken_rewards_are_caught(reward: Any, promise: str, got: str) -> None:
    report = check_reward(reward)
    details = [finding.detail for finding in report.broken if finding.promise == promise]
    assert details, str(report)
    assert got in details[0]


def test_every_text_is_tried_on_a_reward_in_one_turn_and_in_three() -> None:
    """As a verifier meets them all: a recipe holds it as a reward, whose check must not keep what the other breaks."""
    seen: set[tuple[str, int]] = set()

    def reward(task: Task, trajectory: Trajectory) -> float:
        seen.update((turn.reply, len(trajectory.turns)) for turn in trajectory.turns)
        return 0.0

    assert check_reward(reward).ok
    assert seen == {(text, n_turns) for text in _TEXTS for n_turns in (1, 3)}


def test_an_action_that_a_reward_fails_at_is_shown() -> None:
    def reward(task: Task, trajectory: Trajectory) -> float:
        return 1 / ("\0" not in "".join(turn.action.text for turn in trajectory.turns))

    [finding] = check_reward(reward).broken
    assert ", the last action '\\x00" in finding.detail and "ZeroDivisionError" in finding.detail


def test_the_parts_of_a_message_are_told_apart() -> None:
    [finding] = check_reward(Verified(same_text), [(Task("a"), Trajectory("a", 0, "Go.", (), Outcome.FAILED))]).broken
    assert "no reference to compare with; got: None; expected: Task.reference; do: use a reward" in finding.detail


def test_a_reward_meets_only_references_of_its_own_kind() -> None:
    def distance(task: Task, trajectory: Trajectory) -> float:
        return -abs(len(trajectory.turns) - int(task.reference or ""))

    assert broken(check_reward(distance)) == ["call: raises nothing"]
    task = Task(id="near", reference="3")
    record = (task, Trajectory("near", 0, "Go.", (), Outcome.FAILED))
    report = check_reward(distance, [record])
    assert report.ok, str(report)


def test_a_call_that_hangs_is_named() -> None:
    def hangs(answer: str, reference: str) -> float:
        time.sleep(20)
        return 0.0

    report = check_reward(hangs, call_limit_s=0.3)
    assert broken(report) == ["call: returns"]


# --- rewards of whole groups -----------------------------------------------------------------------------------------


class Ranks:
    def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[float]:
        return [float(sum(len(other.turns) < len(t.turns) for other in trajectories)) for t in trajectories]


class JudgesTheFirst:
    def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[float]:
        return [1.0]


class NeedsTwo:
    def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[float]:
        return [float(t.outcome == trajectories[1].outcome) for t in trajectories]


class SaysYes:
    def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Any]:
        return ["yes"] * len(trajectories)


class MoodyVote:
    def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[float]:
        return [float(next(_CALLS))] * len(trajectories)


class OneShare:
    def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        return [Verdict(1.0, per_turn=(1.0,)) for _ in trajectories]


def test_a_sound_reward_of_groups_passes() -> None:
    report = check_reward(Ranks())
    assert report.ok and report.subject == "reward Ranks of groups", str(report)


@pytest.mark.parametrize(
    ("reward", "promise", "got"),
    [
        (JudgesTheFirst(), "over_group: one verdict per trajectory", "2 trajectories: [1.0]"),
        (NeedsTwo(), "over_group: raises nothing", "1 trajectories: IndexError"),
        (SaysYes(), "verdict: a Verdict or a number, finite", "'yes'"),
        (MoodyVote(), "over_group: same arguments, same verdicts", "then"),
        (OneShare(), "Verdict.per_turn: one number per turn", "1 numbers"),
    ],
)
def test_broken_rewards_of_groups_are_caught(reward: Any, promise: str, got: str) -> None:
    report = check_reward(reward)
    details = [finding.detail for finding in report.broken if finding.promise == promise]
    assert details, str(report)
    assert got in details[0]


def test_a_reward_that_runs_programs_needs_examples_for_a_check_to_mean_anything() -> None:
    class Runs(Sandboxed):
        def __call__(self, task: Task, trajectory: Trajectory) -> float:
            return 0.0

    promise = "examples: programs that deserve full marks, to try it with"
    assert broken(check_reward(Runs())) == [promise]
    record = (Task(id="real", reference="{}"), Trajectory("real", 0, "Go.", (), Outcome.FAILED))
    assert check_reward(Runs(), [record]).ok
    report = check_reward(Runs(), answers=[("```python\nprint(1)\n```", "{}")])
    assert broken(report) == ["call: full marks for its examples"]


def test_a_reward_is_named_with_its_keys_as_score_takes_it() -> None:
    found = last_json(run("check", "reward", "{kind: numeric, rel_tol: 0.5}", "--json"))
    assert found["ok"]
