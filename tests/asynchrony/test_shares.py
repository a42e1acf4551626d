"""Cuts that several processes share: nothing is lost between the run's ordinals and those of its processes."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.asynchrony.controller import Counts, figures
from rlhf.asynchrony.pipeline import Ledger, Pipeline, Rules
from rlhf.asynchrony.settings import Asynchrony
from rlhf.asynchrony.shares import merged, split_state
from rlhf.data import ScoredGroup, Task
from rlhf.processes import ProcessGroup
from rlhf.tasks.shuffled import ShuffledTasks
from rlhf.training.rollouts_ahead import Lookahead, RolloutsAhead, length_caution
from rlhf.training.stages.policy_gradient import PolicyGradient


def shares_of(n_processes: int, n_per_step: int) -> list[slice]:
    return [ProcessGroup(rank, n_processes).share(n_per_step) for rank in range(n_processes)]


def played(rules: Rules, rng: random.Random, n_steps: int) -> Pipeline:
    """A pipeline after so many steps, with groups that run and groups that wait."""
    made = Pipeline(rules)
    made.join("server", 0)
    while made.step < n_steps or rng.random() < 0.8:
        made.begin()
        for ordinal in [o for o in made.running if rng.random() < 0.5]:
            made.sampled(ordinal, made.version, 3)
            made.finish(ordinal, {made.version: rng.randint(0, 3)})
        if made.step < n_steps and (batch := made.batch()) is not None:
            made.train(batch)
            made.install("server", made.step)
    return made


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(0, 2**32))
def test_a_cut_goes_on_in_another_number_of_processes(
    before: int, after: int, n_steps: int, staleness: int, seed: int
) -> None:
    rng, n = random.Random(seed), 5
    rules = Rules(n, 8, staleness, staleness)
    parts = [
        played(replace(rules, n_per_step=share.stop - share.start), rng, n_steps) for share in shares_of(before, n)
    ]
    whole = merged([part.state() for part in parts], shares_of(before, n), n)
    Pipeline.restored(rules, whole).check()
    others = []
    for share in shares_of(after, n):
        own = replace(rules, n_per_step=share.stop - share.start)
        others.append(Pipeline.restored(own, split_state(whole, share, n, after)))
    again = merged([part.state() for part in others], shares_of(after, n), n)
    assert again["counts"] == whole["counts"] and again["tokens"] == whole["tokens"]
    assert sorted(again["store"]) == sorted(whole["store"])
    assert again["running"] == whole["running"]


@given(st.integers(1, 4), st.integers(0, 2**32))
def test_the_same_processes_find_their_own_cut_again(n_processes: int, seed: int) -> None:
    rng, n = random.Random(seed), 5
    shares = shares_of(n_processes, n)
    parts = [played(Rules(share.stop - share.start, 8), rng, 2) for share in shares]
    whole = merged([part.state() for part in parts], shares, n)
    for part, share in zip(parts, shares, strict=True):
        cut = split_state(whole, share, n, n_processes)
        assert cut["store"] == part.state()["store"]
        assert set(part.state()["running"]) <= set(cut["running"])


def test_length_bias_compares_trained_groups_with_finished_ones() -> None:
    def counts(**tokens: int) -> Counts:
        return Counts({0: 1}, Ledger(sum(tokens.values()), **tokens), 2, 2, 1, 0, 7, 0.0)

    # Four groups of 100 tokens are trained and two are stored; one that runs has sampled 30, and does not count.
    assert figures([counts(trained=400, stored=200, running=30)], 2)["asynchrony/length_bias"] == 1.0
    assert figures([counts(trained=200, stored=400, running=30)], 2)["asynchrony/length_bias"] == 0.5
    assert length_caution(0.98, "step 3") == {}
    assert "up to step 3 a trained group has 50% fewer tokens" in length_caution(0.5, "step 3")["length_bias"]


def test_a_resumed_run_has_the_tasks_of_every_group_that_is_to_begin_again() -> None:
    pipeline = Pipeline(Rules(1, 20, order="first_finished"))
    pipeline.join("engine", 0)
    pipeline.begin()
    for step in range(4):  # group 0 is begun again and again, and each time others may overtake it
        pipeline.give_back(0)
        pipeline.begin()
        while (ordinal := pipeline.begin()) is not None:
            pipeline.finish(ordinal, {})
        pipeline.train(pipeline.batch() or ())
        pipeline.install("engine", step + 1)
    state = merged([pipeline.state()], [slice(0, 1)], 1)
    assert (state["running"], state["counts"]["step"]) == ([0], 4)

    groups = {ordinal: ScoredGroup("t", (), (), ()) for ordinal in pipeline.store}
    source = ShuffledTasks([Task(f"t/{i}", i) for i in range(30)], 0)
    lookahead = Lookahead(Asynchrony(staleness=1, order="first_finished"), lambda _: b"", lambda _: groups)
    hook = RolloutsAhead(lookahead, PolicyGradient(steps=20, tasks_per_step=1), source)
    hook.load_state_dict({"pipeline": state, "groups": torch.zeros(1, dtype=torch.uint8)})
    source.n_drawn = hook._n_learned = 4
    assert hook._new_tasks() == {k: [task] for k, task in enumerate(ShuffledTasks(source.tasks, 0).draw(6))}
