"""Branches within a reply: what is common is recorded once, and nothing that is trained on changes by it."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.chat import ChatAgent
from rewards.shaping.outcome import Outcome as OutcomeReward
from rlhf.batching.samples import make_samples
from rlhf.credit.contrib.tree import tree_of, trees
from rlhf.credit.contrib.treerl import TreeRL
from rlhf.credit.grpo import GRPO
from rlhf.data import (
    Action,
    Finish,
    Generation,
    Outcome,
    Prompt,
    SamplingParams,
    Score,
    ScoredGroup,
    Trajectory,
    Turn,
    Verdict,
)
from rlhf.data.generation import calls_of, joined, piece_of
from rlhf.evaluation.answers import spent_on
from rlhf.evaluation.groups import pack_groups, unpack_groups
from rlhf.evaluation.journal import AttemptJournal
from rlhf.evaluation.statistics import success_estimate
from rlhf.inference.scripted import ScriptedEngine, ScriptedReply
from rlhf.rollout.branching import Fork
from rlhf.rollout.counted_engine import tokens_by_version
from rlhf.rollout.group import run_groups
from rlhf.rollout.group_structure import Tree
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.runner import RolloutBatch
from rlhf.rollout.scoring import WeightedReward, score_group
from tests.rollout.small_world import Corridor, tokenizer
from tests.rollout.test_group import LIMITS, told

WORDS = ("go north", "look", "go nowhere", "look around you")


def letters(text: str, rng: random.Random) -> ScriptedReply:
    """Goes on with what it has begun to say: one of the words that begin so."""
    begun = text.rsplit("assistant\n", 1)[1]
    word = rng.choice([w for w in WORDS if w.startswith(begun)])
    rest = word[len(begun) :]
    return ScriptedReply(rest, [-0.1 - 0.01 * rng.random() for _ in rest][: len(tokenizer().encode(rest))])


def grow(tree: Tree, group_size: int, *, seed: int = 1, journal=None, **kwargs) -> list[Trajectory]:
    environment = Corridor(length=3)
    engine = ScriptedEngine(letters, tokenizer=tokenizer(), seeded=True)
    parts = (environment.tasks("test")[:1], environment, ChatAgent(system=""), engine, Renderer(tokenizer()))
    limits = replace(LIMITS, max_turns=4, **kwargs)
    how = {"group_size": group_size, "seed": seed, "grouping": tree, "journal": journal}
    [found] = asyncio.run(run_groups(*parts, limits, SamplingParams(), **how))
    assert environment.counts.alive == 0 and not engine.sessions
    return found


def scored(attempts: Sequence[Trajectory]) -> ScoredGroup:
    task = next(t for t in Corridor().tasks("test") if t.id == attempts[0].task_id)
    return asyncio.run(score_group(task, attempts, {"solved": WeightedReward("solved", 1.0, OutcomeReward())}))


def whole(t: Trajectory) -> Trajectory:
    """The attempt as it would be recorded if nothing had left it."""
    turns = (
        replace(turn, action=replace(turn.action, generations=tuple(map(joined, calls_of(turn.generations)))))
        for turn in t.turns
    )
    return replace(t, turns=tuple(turns))


@given(st.integers(1, 3), st.integers(1, 2), st.sampled_from(["random", "surprisal"]), st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_a_tree_that_branches_within_replies(n, rounds, choose, seed):
    tree = Tree(branches_per_round=n, rounds=rounds, choose=choose, at="token")
    group = grow(tree, tree.n_leaves, seed=seed)
    by_number = {t.attempt: t for t in group}
    for t in group:
        for turn in t.turns:
            [call] = calls_of(turn.generations)
            # What was done is what all pieces together say.
            said = tokenizer().decode(joined(call).token_ids, skip_special_tokens=True)
            assert said == turn.action.text or turn.action.error is not None
        if t.parent is not None:
            mine, theirs = t.turns[t.n_shared].generations, by_number[t.parent].turns[t.n_shared].generations
            common = [a for a, b in zip(mine, theirs, strict=False) if a is b]
            assert common and len(mine) > len(common), "they share the beginning of the reply and part there"
            assert all(a is b for a, b in zip(t.turns[: t.n_shared], by_number[t.parent].turns, strict=False))
    # It is one tree for the estimators, and every sampled token counts once.
    found = tree_of(scored(group))
    assert len(trees(found.parents_V, found.leaves_G)) == 1
    distinct = {id(g): len(g.token_ids) for t in group for g in t.generations}
    metrics = RolloutBatch((scored(group),), 1.0).metrics()
    assert metrics["rollout/n_tokens"] == sum(distinct.values()) and metrics["rollout/n_generations"] == len(distinct)
    assert spent_on(group, 0, "").n_tokens == sum(distinct.values())


def test_means_of_no_trajectory_are_left_out():
    metrics = RolloutBatch((), 0.0).metrics()
    assert metrics["rollout/n_episodes"] == metrics["rollout/n_generations"] == 0
    assert RolloutBatch((), 0.0).success_interval(success_estimate) == {}
    assert not {"rollout/success", "rollout/return_mean", "rollout/return_std", "rollout/n_turns_mean"} & metrics.keys()


def test_one_seed_gives_one_tree_however_many_run_at_once():
    tree = Tree(rounds=2, at="token")
    assert told([grow(tree, 5)]) == told([grow(tree, 5, max_concurrent=1)]) != told([grow(tree, 5, seed=2)])


@pytest.mark.parametrize("at", ["turn", "token"])
def test_a_tree_goes_on_from_a_journal_with_the_same_attempts_shared(at, tmp_path):
    tree, path = Tree(branches_per_round=2, rounds=2, at=at), tmp_path / "tree.jsonl"
    fresh = grow(tree, 10, journal=AttemptJournal(path, "p"), max_concurrent=1)
    lines = path.read_bytes().split(b"\n")[1:]
    assert told([fresh]) == told([grow(tree, 10)]) and len(lines) == 10
    for n in (10, 7, 4, 1):  # branches of the second round, of the first, and attempts from the start are left
        path.write_bytes(b"\n".join(lines[:n]))
        again = grow(tree, 10, journal=AttemptJournal(path, "p"))
        assert told([again]) == told([fresh]) and [t.parent for t in again] == [t.parent for t in fresh]
        assert len({id(g) for t in again for g in t.generations}) == len({id(g) for t in fresh for g in t.generations})
        assert spent_on(again, 0, "") == spent_on(fresh, 0, "")
        assert path.read_bytes().count(b"\n") == 9  # what was held is not written again


@pytest.mark.parametrize("at", ["turn", "token"])
@pytest.mark.parametrize("seed", range(6))
def test_groups_of_a_checkpoint_count_what_is_shared_once(at: str, seed: int) -> None:
    group = scored(grow(Tree(branches_per_round=3, rounds=2, at=at), 7, seed=seed))
    again = unpack_groups(pack_groups({0: group}))[0]
    assert again == group
    for t, same in zip(group.trajectories, again.trajectories, strict=True):
        for parent, copy in zip(group.trajectories, again.trajectories, strict=True):
            if parent.attempt == t.parent:
                assert [g is h for g, h in zip(t.generations, parent.generations, strict=False)] == [
                    g is h for g, h in zip(same.generations, copy.generations, strict=False)
                ]
    counted, told = (RolloutBatch((g,), 1.0).metrics() for g in (again, group))
    assert counted == told and tokens_by_version(again) == tokens_by_version(group)


def test_a_reply_that_was_sampled_twice_alike_counts_twice_after_a_checkpoint() -> None:
    g = Generation(Prompt((1,)), (5, 6), (-0.5, -0.5), Finish.STOP, 0)
    made = [
        Trajectory("t", i, "o", (Turn(Action("x", (same,)), "r"),), Outcome.FAILED, parent=parent)
        for i, parent, same in ((0, None, g), (1, 0, replace(g)))
    ]
    again = unpack_groups(pack_groups({0: scored_alike(made)}))[0]
    assert RolloutBatch((again,), 1.0).metrics()["rollout/n_tokens"] == 4


def scored_alike(attempts: Sequence[Trajectory]) -> ScoredGroup:
    return ScoredGroup("t", tuple(attempts), (Score({"r": Verdict(0.0)}, (0.0,), 0.0),) * len(attempts))


def test_a_branch_is_not_taken_from_a_journal_where_it_left_another_attempt(tmp_path):
    tree, path = Tree(branches_per_round=2), tmp_path / "tree.jsonl"
    grow(tree, 6, journal=AttemptJournal(path, "p"), max_concurrent=1)
    lines = path.read_bytes().split(b"\n")[1:]
    other = tmp_path / "other.jsonl"
    other_seed = grow(tree, 6, journal=AttemptJournal(other, "p"), max_concurrent=1, seed=4)
    path.write_bytes(b"\n".join([*other.read_bytes().split(b"\n")[1:3], *lines[2:]]))  # roots of one, leaves of another
    assert told([grow(tree, 6, journal=AttemptJournal(path, "p"), seed=4)]) == told([other_seed])


@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_trained_on_as_whole_replies_are(seed):
    group = scored(grow(Tree(branches_per_round=3, at="token"), 4, seed=seed))
    assert any(len(call) > 1 for t in group.trajectories for turn in t.turns for call in calls_of(turn.generations))
    apart = replace(group, trajectories=tuple(map(whole, group.trajectories)))
    rows = [make_samples([g], [GRPO()(g)])[0] for g in (group, apart)]
    for mine, theirs in zip(*rows, strict=True):
        for name in ("token_ids", "mask", "advantages", "sampler_logprobs"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)


def test_what_is_shared_of_a_reply_has_a_value_of_its_own():
    # Two attempts say token 1, then 2 or 3; the one that says 2 is right. A third says 4 alone, and is wrong. The
    # piece that two share: scores less the mean of the others are 1, −.5, −.5, so V = .25 and 2 · .25 / sqrt(2) = .354.
    a = Generation(Prompt((9,)), (1,), (-0.1,), Finish.STOP, 0)

    def tried(number, *pieces, solved=False):
        outcome = Outcome.SOLVED if solved else Outcome.FAILED
        return Trajectory("corridor/test/0", number, "", (Turn(Action("x", pieces), ""),), outcome)

    b, c = (Generation(Prompt((9, 1)), (i,), (-0.1,), Finish.STOP, 0) for i in (2, 3))
    d = Generation(Prompt((9,)), (4,), (-0.1,), Finish.STOP, 0)
    credit = TreeRL()(scored([tried(0, a, b, solved=True), tried(1, a, c), tried(2, d)]))
    flat = [round(x[0], 3) for rows in credit.advantages_GNT for x in rows]
    assert flat == [0.354, 1.75, 0.354, -1.25, -1.0]


def reply(*logprobs: float, prompt: int = 5) -> Generation:
    ids = tuple(range(len(logprobs)))
    return Generation(Prompt((prompt,)), ids, logprobs, Finish.LENGTH, 3, version_spans=((3, 1), (4, len(ids) - 1)))


def test_the_most_surprising_tokens_are_branched_at():
    first, second = reply(-9.0, -1.0, -3.0), reply(-0.5, -2.0, prompt=6)
    turns = tuple(Turn(Action("go", (g,)), "...") for g in (first, second))
    group = [Trajectory("t", 0, "", turns, Outcome.FAILED)]
    tree = Tree(branches_per_round=2, choose="surprisal", at="token")
    # The first token of a reply is no place, however surprising: −3 in the first turn, then −2 in the second.
    found = tree.branches(group, random.Random(0))
    assert [(len(b.turns), b.fork) for b in found] == [(0, Fork(0, 2)), (1, Fork(0, 1))]
    # Replies of one token have no place: then before a turn.
    short = [
        Trajectory("t", 0, "", tuple(Turn(Action("go", (reply_of_one(i),)), "") for i in range(3)), Outcome.FAILED)
    ]
    assert [(len(b.turns), b.fork) for b in tree.branches(short, random.Random(0))] == [(1, None), (2, None)]


def reply_of_one(i: int) -> Generation:
    return Generation(Prompt((i,)), (1,), (-math.inf if i < 0 else -1.0,), Finish.STOP, 0)


@given(st.lists(st.floats(-5, 0), min_size=2, max_size=6), st.data())
def test_pieces_make_the_reply_again(logprobs, data):
    generation = reply(*logprobs)
    at = data.draw(st.integers(1, len(logprobs) - 1))
    pieces = (piece_of(generation, 0, at), piece_of(generation, at, len(logprobs)))
    assert pieces[1].prompt.token_ids == pieces[0].full_ids and pieces[1].full_ids == generation.full_ids
    assert [p.finish for p in pieces] == [Finish.STOP, Finish.LENGTH] and pieces[1].versions == (4,)
    assert calls_of(pieces) == [pieces] and joined(pieces) == generation
    assert calls_of((generation, reply(-1.0, -1.0, prompt=8))) == [(generation,), (reply(-1.0, -1.0, prompt=8),)]
