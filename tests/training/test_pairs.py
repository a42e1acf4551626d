"""Pairs: which of two attempts or actions is the better one, token by token; and files of pairs, line by line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Score, ScoredGroup, Trajectory, Turn
from rlhf.errors import RecipeError, TrainingError
from rlhf.training.stages import pair_files
from rlhf.training.stages.pairs import Pair, Pairs, Side

#: What an attempt is made of: per turn the token that is said, the reward, the state it is said in.
Said = tuple[int, float, str | None]


def attempt(number: int, turns: Sequence[Said], observation: int = 9, valid: Sequence[bool] = ()) -> Trajectory:
    """Each turn reads one token more, `observation`, and says one."""
    ids: tuple[int, ...] = (1, 2)
    made = []
    for k, (token, reward, state) in enumerate(turns):
        said = Generation(Prompt(ids), (token,), (0.0,), Finish.STOP, 0)
        is_valid = valid[k] if valid else True
        made.append(Turn(Action(f"say {token}", (said,)), "", reward, state, is_valid))
        ids = (*ids, token, observation)
    return Trajectory("t", number, "", tuple(made), Outcome.FAILED)


def group(*attempts: Sequence[Said], **settings: Any) -> ScoredGroup:
    trajectories = tuple(attempt(i, turns, **settings) for i, turns in enumerate(attempts))
    turns = [tuple(reward for _, reward, _ in turns) for turns in attempts]
    return ScoredGroup("t", trajectories, tuple(Score({}, rewards, sum(rewards)) for rewards in turns))


def one(*scores: float) -> ScoredGroup:
    """Attempts of one turn with these scores, each of which says another token."""
    return group(*([(10 + i, score, None)] for i, score in enumerate(scores)))


def said(pair: Pair) -> tuple[list[int], list[int]]:
    """The compared tokens of both sides."""
    chosen, rejected = (
        [i for i, m in zip(side.token_ids, side.mask, strict=True) if m] for side in (pair.chosen, pair.rejected)
    )
    return chosen, rejected


# --- whole attempts --------------------------------------------------------------------------------------------------


def test_every_two_attempts_that_differ_enough_are_a_pair_the_furthest_first() -> None:
    # Scores 1, 0 and .4: (1, 0) is ahead by 1, (1, .4) by .6, (.4, 0) by .4.
    pairs = Pairs(max_per_task=9).of([one(1.0, 0.0, 0.4)], 0)
    assert [said(p) for p in pairs] == [([10], [11]), ([10], [12]), ([12], [11])]
    assert [p.margin for p in pairs] == pytest.approx([1.0, 0.6, 0.4])
    assert [said(p) for p in Pairs(margin=0.5).of([one(1.0, 0.0, 0.4)], 0)] == [([10], [11]), ([10], [12])]
    assert [said(p) for p in Pairs(max_per_task=1).of([one(1.0, 0.0, 0.4)], 0)] == [([10], [11])]


def test_attempts_at_different_prompts_are_no_pair() -> None:
    [better, worse] = (found := one(1.0, 0.0)).trajectories
    told = replace(worse.turns[0].action.generations[0], prompt=Prompt((1, 2, 10, 3)))  # a retry has read the first
    turn = replace(worse.turns[0], action=replace(worse.turns[0].action, generations=(told,)))
    assert len(Pairs().of([found], 0)) == 1
    assert Pairs().of([replace(found, trajectories=(better, replace(worse, turns=(turn,))))], 0) == []


def test_attempts_of_equal_score_are_no_pair() -> None:
    assert Pairs().of([one(0.5, 0.5, 0.5)], 0) == []


def test_observations_are_read_and_not_compared() -> None:
    found = group([(10, 0.0, None), (11, 1.0, None)], [(12, 0.0, None)])
    [pair] = Pairs().of([found], 0)
    # The prompt 1 2, what is said, the observation 9, and what is said then.
    assert pair.chosen == Side((1, 2, 10, 9, 11), (False, False, True, False, True))
    assert pair.rejected == Side((1, 2, 12), (False, False, True))


@given(scores=st.lists(st.integers(0, 3), min_size=2, max_size=6), most=st.integers(1, 4), seed=st.integers(0, 9))
def test_a_pair_is_ordered_by_score_and_tasks_have_no_more_than_their_share(
    scores: list[int], most: int, seed: int
) -> None:
    pairs = Pairs(max_per_task=most, margin=1.0).of([one(*map(float, scores))], seed)
    for pair in pairs:
        (better,), (worse,) = said(pair)
        assert scores[better - 10] - scores[worse - 10] == pair.margin >= 1
    n_possible = sum(a > b for a in scores for b in scores)
    assert len(pairs) == min(most, n_possible) == len(set(pairs))
    assert pairs == Pairs(max_per_task=most, margin=1.0).of([one(*map(float, scores))], seed)


def test_an_attempt_whose_prompts_are_rewritten_says_what_to_do() -> None:
    rewritten = Generation(Prompt((7, 8)), (5,), (0.0,), Finish.STOP, 0)
    first = attempt(0, [(10, 1.0, None)])
    turns = (*first.turns, Turn(Action("x", (rewritten,)), ""))
    two = Trajectory("t", 0, "", turns, Outcome.FAILED)
    found = ScoredGroup("t", (two, attempt(1, [(11, 0.0, None)])), (Score({}, (1.0, 0.0), 1.0), Score({}, (0.0,), 0.0)))
    with pytest.raises(TrainingError, match="do not extend each other") as caught:
        Pairs().of([found], 0)
    assert caught.value.where == "attempt 0 at t" and "level: parting, of one role by pairs.role" in caught.value.hint


# --- actions ---------------------------------------------------------------------------------------------------------


def test_actions_in_one_state_are_compared_by_what_came_after() -> None:
    # In state s: 10 earns 0 + 1, 12 earns 0, and 13, after another action, earns .5 and then .25.
    found = group([(10, 0.0, "s"), (11, 1.0, "u")], [(12, 0.0, "s")], [(11, 0.0, "v"), (13, 0.5, "s"), (10, 0.25, "w")])
    pairs = Pairs(level="state", max_per_task=9).of([found], 0)
    assert [(said(p), p.margin) for p in pairs] == [(([10], [12]), 1.0), (([13], [12]), 0.75), (([10], [13]), 0.25)]
    # Both are read after the prompt of the chosen one: 13 was said after 1 2 11 9, and 12 is read after that too.
    assert pairs[1].chosen.token_ids == (1, 2, 11, 9, 13) and pairs[1].rejected.token_ids == (1, 2, 11, 9, 12)
    # Half of what comes a turn later: 10 earns 0 + .5, and 13 earns .5 + .125.
    discounted = Pairs(level="state", gamma=0.5, max_per_task=9).of([found], 0)
    assert [(said(p), p.margin) for p in discounted][:2] == [(([13], [12]), 0.625), (([10], [12]), 0.5)]


def test_states_without_a_key_and_equal_actions_are_no_pair() -> None:
    assert Pairs(level="state").of([group([(10, 1.0, None)], [(11, 0.0, None)])], 0) == []
    assert Pairs(level="state").of([group([(10, 1.0, "s")], [(10, 0.0, "s")])], 0) == []


def test_an_action_that_was_not_understood_is_never_chosen() -> None:
    assert Pairs(level="state").of([group([(10, 1.0, "s")], [(11, 0.0, "s")], valid=[False])], 0) == []


def test_attempts_part_where_they_first_say_something_else() -> None:
    found = group(
        [(10, 0.0, None), (11, 1.0, None)],
        [(10, 0.0, None), (12, 0.0, None), (13, 0.0, None)],
        [(14, 0.5, None)],
    )
    pairs = Pairs(level="parting", max_per_task=9).of([found], 0)
    # The first two part in their second turn; the third parts from both in the first, where 10 earns 1 and 0 in all.
    assert sorted((said(p), p.margin) for p in pairs) == [
        (([10], [14]), 0.5), (([11], [12]), 1.0), (([14], [10]), 0.5)
    ]  # fmt: skip
    [pair] = [p for p in pairs if p.margin == 1.0]
    assert pair.chosen == Side((1, 2, 10, 9, 11), (False, False, False, False, True))


def test_attempts_that_read_something_else_before_they_part_are_no_pair() -> None:
    first, second = attempt(0, [(10, 0.0, None), (11, 1.0, None)], 9), attempt(1, [(10, 0.0, None), (12, 0.0, None)], 8)
    scores = (Score({}, (0.0, 1.0), 1.0), Score({}, (0.0, 0.0), 0.0))
    assert Pairs(level="parting").of([ScoredGroup("t", (first, second), scores)], 0) == []


def test_segments_are_compared_from_where_attempts_part() -> None:
    found = group(
        [(10, 0.0, None), (11, 0.0, None), (15, 1.0, None), (16, 0.0, None)], [(10, 0.0, None), (12, 0.0, None)]
    )
    [pair] = Pairs(level="parting", turns=2).of([found], 0)
    # Both have read 1 2 10 9; the chosen one says 11, reads 9 and says 15, the rejected one ends with 12.
    assert pair.chosen == Side((1, 2, 10, 9, 11, 9, 15), (False,) * 4 + (True, False, True))
    assert pair.rejected == Side((1, 2, 10, 9, 12), (False,) * 4 + (True,))


def test_calls_of_one_role_are_compared_whatever_was_done() -> None:
    def planned(number: int, plan: int, score: float) -> tuple[Trajectory, Score]:
        said = Generation(Prompt((1, 2)), (plan,), (0.0,), Finish.STOP, 0, role="plan")
        done = Generation(Prompt((3, plan)), (30,), (0.0,), Finish.STOP, 0)
        turns = (Turn(Action("go", (said, done)), "", valid=False), Turn(Action("on", (done,)), ""))
        return Trajectory("t", number, "", turns, Outcome.FAILED), Score({}, (0.0, score), score)

    made = [planned(0, 20, 1.0), planned(1, 21, 0.0), planned(2, 22, 0.5)]
    attempts, scores = tuple(t for t, _ in made), tuple(s for _, s in made)
    [first, *others] = Pairs(level="parting", role="plan").of([ScoredGroup("t", attempts, scores)], 0)
    assert (said(first), first.margin) == (([20], [21]), 1.0)
    assert sorted(said(p) for p in others) == [([20], [22]), ([22], [21])]
    assert Pairs(level="parting").of([ScoredGroup("t", attempts, scores)], 0) == []  # what is done is the same


def test_the_oracles_action_is_preferred_to_every_other_in_its_state() -> None:
    [shown] = attempt(9, [(10, 0.0, None)]).turns
    found = group([(10, 0.0, None), (12, 0.0, None)], [(11, 1.0, None)], [(13, 0.0, None)])
    pairs = Pairs(level="expert").against([(shown, found)], 0)
    assert sorted(said(p) for p in pairs) == [([10], [11]), ([10], [13])]


@pytest.mark.parametrize("settings", [Pairs(), Pairs(level="state"), Pairs(level="parting")])
def test_pairs_of_attempts_that_begin_in_the_middle_are_of_the_whole_task(settings: Pairs) -> None:
    given = replace(attempt(9, [(10, 0.0, "a")]).turns[0], action=Action("given"), state_key=None)
    made = group([(10, 1.0, "s")], [(11, 0.0, "s")])
    begun = [
        replace(t, task_id="world/1@1", turns=(given, *t.turns), n_given=1) for t in made.trajectories
    ]  # fmt: skip
    scores = [replace(s, turns=(0.0, *s.turns)) for s in made.scores]
    found = settings.of([ScoredGroup("world/1@1", tuple(begun), tuple(scores))], 0)
    assert [pair.task_id for pair in found] == ["world/1"]


def test_the_best_of_a_later_policy_is_compared_with_the_worst_of_an_earlier_one() -> None:
    from rlhf.build.pair_data import opposed

    [found] = opposed([one(1.0, 0.0), one(0.75)], [one(0.5, 0.25), ScoredGroup("u", (), ())][:1])
    assert [score.total for score in found.scores] == [1.0, 0.25]
    [pair] = Pairs().of([found], 0)
    assert said(pair) == ([10], [11]) and pair.margin == 0.75
    assert Pairs().of(opposed([one(0.25)], [one(0.5)]), 0) == []  # the earlier one was better


# --- files -----------------------------------------------------------------------------------------------------------

GOOD = {"prompt": "Say red.", "chosen": "red", "rejected": "blue"}
TALK = [{"role": "user", "content": "Say red."}, {"role": "assistant", "content": "red"}]


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_line_is_texts_or_messages(tmp_path: Path) -> None:
    messages = {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say red."}],
        "chosen": [{"role": "assistant", "content": "red"}],
        "rejected": "blue",
    }
    first, second = pair_files.read(written(tmp_path, GOOD, "", messages), "x")
    assert (first.line, second.line) == (1, 3)
    assert [m.content for m in first.prompt] == ["Say red."] and len(second.prompt) == 2
    assert (first.chosen, first.rejected) == (second.chosen, second.rejected) == ("red", "blue")


def test_a_line_may_have_the_messages_of_chats(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "red."}]
    shared = [{"from": "human", "value": "Say red."}]
    rows = (
        GOOD | {"prompt": [{"role": "user", "content": parts, "name": "ann"}]},
        {side: [*shared, {"from": "gpt", "value": GOOD[side]}] for side in ("chosen", "rejected")},
        GOOD | {"prompt": shared, "chosen": {"from": "gpt", "value": "red"}},
        GOOD | {"prompt": shared, "rejected": json.dumps({"from": "gpt", "value": "blue"})},
    )
    for pair in pair_files.read(written(tmp_path, *rows), "x"):
        assert [(m.role.value, m.content) for m in pair.prompt] == [("user", "Say red.")]
        assert (pair.chosen, pair.rejected) == ("red", "blue")


def test_a_reply_may_be_a_list_in_json(tmp_path: Path) -> None:
    calls = '[{"name": "say", "arguments": {"text": "red"}}]'
    [pair] = pair_files.read(written(tmp_path, GOOD | {"chosen": calls}), "x")
    assert (pair.chosen, pair.rejected) == (calls, "blue")


def test_a_text_may_hold_what_python_takes_for_the_end_of_a_line(tmp_path: Path) -> None:
    texts = {"prompt": "one\u2028two", "chosen": "yes\x85", "rejected": "no\x0c"}
    [pair] = pair_files.read(written(tmp_path, json.dumps(texts, ensure_ascii=False)), "x")
    assert (pair.prompt[0].content, pair.chosen, pair.rejected) == tuple(texts.values())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": ', ["no JSON"]),
        ("[1]", ["no mapping of columns", "[1]"]),
        ({"prompt": "a", "chosen": "b"}, ["'rejected' is missing", "prompt, chosen"]),
        ({"prompt": "a", "chosen": "b", "reject": "c"}, ["no field 'reject'", "did you mean 'rejected'?"]),
        (
            {"chosen": [{"role": "user", "content": "a"}] * 2, "rejected": [{"role": "user", "content": "b"}] * 2},
            ["part before their last message", "0 of them in common"],
        ),
        ({**GOOD, "chosen": "blue"}, ["are the same"]),
        ({"chosen": TALK, "rejected": TALK}, ["are the same"]),
        ({**GOOD, "chosen": " "}, ["chosen says nothing"]),
        ({"question": "a", "response_a": "b", "response_b": "c"}, ["no field 'question'", "'prompt' needs that name"]),
        ({"prompt": "a", "completion": "b", "label": True}, ["no field 'completion'", "loss: kto"]),
        ({**GOOD, "prompt": 3}, ["prompt is no chat"]),
        ({**GOOD, "prompt": []}, ["prompt is no chat"]),
        ({**GOOD, "prompt": [{"role": "users", "content": "a"}]}, ["nobody has this role", "did you mean 'user'?"]),
        ({**GOOD, "prompt": [{"role": "user", "text": "a"}]}, ["no field 'text'", "did you mean 'content'?"]),
        ({**GOOD, "prompt": [{"role": "user", "content": None, "name": "ann"}]}, ["a message of prompt has no text"]),
        ({**GOOD, "prompt": [{"role": "user", "content": 3}]}, ["content of a message is no text"]),
        ({**GOOD, "chosen": [{"role": "user", "content": "a"}]}, ["chosen is not one reply", "messages of user"]),
        (
            {**GOOD, "chosen": [{"role": "assistant", "content": "", "tool_calls": [{"name": "say"}]}]},
            ["a message of chosen calls tools"],
        ),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: Any, says: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        pair_files.read(written(tmp_path, GOOD, line), "stages[0].pairs.file")
    text = str(caught.value)
    assert "stages[0].pairs.file" in text and re.search(r"pairs\.jsonl(:|, line )2\b", text)
    assert all(part in text for part in says), text


def test_a_file_without_pairs_or_without_a_file(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("prompt,chosen,rejected\n")
    for path in (written(tmp_path, ""), tmp_path / "pairs.csv"):
        with pytest.raises(RecipeError, match="no pairs in this file"):
            pair_files.read(path, "x")
    with pytest.raises(RecipeError, match="cannot be read") as caught:
        pair_files.read(tmp_path / "nowhere.jsonl", "x")
    assert "No such file" in caught.value.got and "beside the recipe" in (caught.value.hint or "")


def test_what_is_kept_can_be_read(tmp_path: Path) -> None:
    [pair] = Pairs().of([one(1.0, 0.0)], 0)
    pair_files.save(tmp_path / "deep" / "pairs.jsonl", [pair])
    [line] = (tmp_path / "deep" / "pairs.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "task_id": "t", "margin": 1.0, "chosen": {"token_ids": [1, 2, 10], "mask": [False, False, True]},
        "rejected": {"token_ids": [1, 2, 11], "mask": [False, False, True]},
    }  # fmt: skip
