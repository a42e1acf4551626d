"""Signs of collapse: the figures of a step, and when the run is told of a trap."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Score, ScoredGroup, Trajectory, Turn
from rlhf.training.hooks.collapse import MAX_TRAJECTORIES, N_NORMS, WINDOW, CollapseHook, collapse_metrics


def episode(says: Sequence[tuple[Sequence[int], Sequence[int]]], surprisal: float = 0.5) -> Trajectory:
    """A trajectory of (prompt, reply) pairs."""
    turns = []
    for prompt, reply in says:
        generation = Generation(Prompt(tuple(prompt), (0,)), tuple(reply), (-surprisal,) * len(reply), Finish.STOP, 0)
        turns.append(Turn(Action("act", (generation,)), "reply"))
    return Trajectory("task", 0, "opening", tuple(turns), Outcome.FAILED)


def group(totals: Sequence[float], trajectory: Trajectory) -> ScoredGroup:
    scores = tuple(Score({}, (0.0,) * (len(trajectory.turns) - 1) + (total,), total) for total in totals)
    return ScoredGroup("task", (trajectory,) * len(totals), scores)


ONE = episode([((1, 2), (3, 4))])


def test_figures_of_a_step() -> None:
    # Deviations .5 and 0, and a group of one that says nothing: mean .25, half of two groups silent.
    values = collapse_metrics([group([0, 1], ONE), group([1, 1], ONE), group([1], ONE)])
    assert values["collapse/group_std_mean"] == 0.25 and values["collapse/zero_std_groups_share"] == 0.5
    assert values["collapse/surprisal"] == 0.5
    assert values["collapse/echo_share"] == values["collapse/repeat_share"] == 0, "two tokens have no 4-gram"


def test_what_is_said_again() -> None:
    # First reply: 4-grams 3456 and 4567, the first stands in the prompt. Second: 9999 three times, so two are repeated,
    # and none is in its prompt. Third equals the first, whose 4-grams are both in the prompt by now.
    first = ((1, 3, 4, 5, 6), (3, 4, 5, 6, 7))
    second = ((*first[0], *first[1], 2), (9, 9, 9, 9, 9, 9))
    third = ((*second[0], *second[1], 2), first[1])
    values = collapse_metrics([group([1], episode([first, second, third]))])
    assert values["collapse/echo_share"] == 3 / 7 and values["collapse/repeat_share"] == 2 / 7
    assert values["collapse/same_reply_share"] == 1 / 3


def test_a_prompt_that_is_rewritten_is_read_anew() -> None:
    # The second prompt holds nothing of the first, so that the 4-gram 3456 is no echo there.
    values = collapse_metrics([group([1], episode([((3, 4, 5, 6), (1,)), ((8, 8), (3, 4, 5, 6))]))])
    assert values["collapse/echo_share"] == 0


def test_text_is_read_of_no_more_trajectories_than_the_limit() -> None:
    # Every other trajectory says the same twice: of 1.5 times the limit every second is read, which are the others.
    again = episode([((1,), (2, 3)), ((1,), (2, 3))])
    groups = [group([1], trajectory) for _ in range(MAX_TRAJECTORIES * 3 // 4) for trajectory in (ONE, again)]
    assert collapse_metrics(groups)["collapse/same_reply_share"] == 0
    assert collapse_metrics(groups[:MAX_TRAJECTORIES])["collapse/same_reply_share"] == 1 / 3


@pytest.mark.parametrize("groups", [[], [ScoredGroup("task", (), ())]])
def test_a_step_without_trajectories(groups: list[ScoredGroup]) -> None:
    assert set(collapse_metrics(groups).values()) == {0.0}
    figures, cautions = CollapseHook().learn(groups, {}, "step 1")
    assert "collapse/grad_spike" not in figures and not cautions


def step(spread: float, surprisal: float, mean: float) -> list[ScoredGroup]:
    return [group([mean - spread, mean + spread], episode([((1,), (2, 3))], surprisal))]


def told(monitor: CollapseHook, steps: Sequence[list[ScoredGroup]]) -> list[set[str]]:
    return [set(monitor.learn(groups, {}, f"step {i}")[1]) for i, groups in enumerate(steps)]


HEALTHY = [step(0.5, 1.0, 0.4)] * WINDOW


def test_the_echo_trap_is_told() -> None:
    # Deviation .5 -> .1 and surprisal 1 -> .1, both below half of their peak once three of five steps are bad:
    # (2 · .5 + 3 · .1)/5 = .26, (2 · 1 + 3 · .1)/5 = .46, so from the third for surprisal and the fourth for both.
    # The return fell by then from .4 to (.4 + 4 · .1)/5 = .16: by .24, more than a quarter of .5.
    monitor = CollapseHook()
    cautions = told(monitor, HEALTHY + [step(0.1, 0.1, 0.1)] * WINDOW)
    assert cautions == [set()] * (WINDOW + 3) + [{"echo_trap"}] * 2
    figures, _ = monitor.learn(step(0.1, 0.1, 0.1), {}, "step 11")
    assert figures["collapse/echo_trap"] == 1


@pytest.mark.parametrize(
    "later",
    [step(0.1, 0.1, 0.9), step(0.5, 0.1, 0.1), step(0.1, 1.0, 0.1), step(0.1, 0.1, 0.38)],
    ids=["solved", "attempts still differ", "still unsure", "the return holds"],
)
def test_what_is_no_trap(later: list[ScoredGroup]) -> None:
    assert not any(told(CollapseHook(), HEALTHY + [later] * 3 * WINDOW))


def test_a_spike_of_the_gradient_is_told_and_is_not_the_usual_at_once() -> None:
    monitor = CollapseHook()
    norms = [1.0] * WINDOW + [5.0, 5.1, 1.0]
    assert monitor.learn([], {"optimizer/grad_norm": math.inf}, "")[0].keys().isdisjoint({"collapse/grad_spike"})
    found = [monitor.learn([], {"optimizer/grad_norm": norm}, "step 6 of 0-policy_gradient") for norm in norms]
    assert [figures["collapse/grad_spike"] for figures, _ in found] == norms
    assert [bool(cautions) for _, cautions in found] == [False] * 6 + [True, False], "a spike is more than five times"
    assert "step 6 of 0-policy_gradient is 5 times the usual one (5.1 against 1)" in found[6][1]["grad_spike"]
    for _ in range(2 * N_NORMS):
        monitor.learn([], {"optimizer/grad_norm": 5.0}, "")
    assert monitor.learn([], {"optimizer/grad_norm": 5.0}, "")[0]["collapse/grad_spike"] == 1


def test_a_gradient_that_has_always_been_zero_is_usual() -> None:
    monitor = CollapseHook()
    for _ in range(WINDOW + 1):
        figures, cautions = monitor.learn([], {"optimizer/grad_norm": 0.0}, "")
        assert figures["collapse/grad_spike"] == 1 and not cautions


@pytest.mark.parametrize("at", range(2 * WINDOW))
def test_a_resumed_monitor_tells_what_one_that_ran_on_tells(at: int) -> None:
    steps = HEALTHY + [step(0.1, 0.1, 0.1)] * WINDOW
    first, second = CollapseHook(), CollapseHook()
    begun = told(first, steps[:at])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + told(second, steps[at:]) == told(CollapseHook(), steps)
