"""Splits: which seeds they have, whose their tasks are, and what a world that draws its tasks has to say."""

from __future__ import annotations

import pytest

from environments.drawn import Drawn
from environments.splits import Seeded, split_in, split_of
from rlhf.data import Task
from rlhf.errors import DataError, EnvError


def test_splits_are_ranges_and_their_tasks_tell_whose_they_are() -> None:
    some = Seeded(n_train=2, n_dev=1, n_test=1)
    assert [task.id for task in some.listed("dev", "a/b")] == ["a/b/dev/10000000"]
    assert [split_of(task.seed) for task in (*some.listed("train", "a"), *some.listed("test", "a"))] == [
        *["train"] * 2,
        "test",
    ]
    assert split_in(some.listed("test", "a")[0], "a", "here") == "test"
    for task in (Task("a/test/1", seed=2), Task("b/test/20000000", seed=20_000_000), Task("a/tset/1", seed=1)):
        with pytest.raises(DataError, match="of another environment"):
            split_in(task, "a", "here")
    with pytest.raises(EnvError, match="no such split"):
        some.seeds("valid")


def test_a_drawn_world_has_to_say_what_it_draws() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Drawn()  # type: ignore[abstract]
