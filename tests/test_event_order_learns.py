"""Stories whose order decides: a policy learns by the attempts that read them in order."""

from __future__ import annotations

import json
import random
from itertools import permutations
from pathlib import Path

import pytest

from tests.combinations import ACTS, LOSSES
from tests.training import runs

TOWNS = ("Rome", "Oslo", "Bonn", "Kyiv", "Baku", "Lima", "Bern", "Riga", "Nice", "Cork")


def story(first: str, then: str) -> str:
    """A person's two moves, and the question where they led."""
    return f"go {first}\ngo {then}\nwhere?"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (1, 2))])
def test_where_a_story_ends_is_learnt_in_order(tmp_path: Path, seed: int) -> None:
    moves = list(permutations(TOWNS, 2))
    random.Random(seed).shuffle(moves)
    rows = [{"prompt": story(*pair), "reference": pair[1]} for pair in moves]
    for split, those in (("train", rows[:60]), ("test", rows[60:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in those))
    # Demonstrations name either town, the first as often as the last.
    said = [{"prompt": story(*pair), "completion": town} for pair in moves[:60] for town in pair]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    imitation = {
        "kind": "supervised", "data": {"path": "said.jsonl", "held_out": 0}, "epochs": 24, "batch_size": 8,
        "optimizer": {"lr": 3.0e-3},
    }  # fmt: skip
    learning = {
        "kind": "policy_gradient", **LOSSES["ppo_clip"], "steps": 45, "tasks_per_step": 8, "group_size": 9,
        "rollout": {"kind": "shuffled_events"}, "advantage": {"kind": "event_order"},
        "optimizer": {"lr": 2.0e-3, "schedule": "linear"},
    }  # fmt: skip
    world = {"kind": "dataset", "train": "train.jsonl", "test": "test.jsonl"}
    path = runs.write(tmp_path, [imitation, learning], seed=seed, environment=world, agent={"kind": "chat"})
    done = runs.run(path, tmp_path / "run")
    assert done.result["interval_before"][1] < done.result["interval_after"][0], done.result
    assert runs.ever_above(done.folder, *ACTS["event_order"])
