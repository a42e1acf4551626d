"""Trajectories survive the disk exactly."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf.data import (
    Action,
    Failure,
    Finish,
    Generation,
    Outcome,
    Prompt,
    Score,
    Trajectory,
    Turn,
    Verdict,
)
from rlhf.errors import CheckpointError, DataError
from rlhf.evaluation import store
from rlhf.evaluation.rows import FailureRecord, TrajectoryRecord
from rlhf.evaluation.store import TrajectoryWriter, list_steps, read_failures, read_successes, read_trajectories
from tests.evaluation.synthetic import make_group, make_tokenizer

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
TEXT = st.text(max_size=12)
PARTS = st.lists(TEXT, max_size=2).map(tuple)
NOTES = st.dictionaries(TEXT, TEXT, max_size=2)


@st.composite
def generations(draw: Callable, before: tuple[int, ...]) -> Generation:
    new = draw(IDS.filter(bool))
    prompt = before + new if draw(st.booleans()) else new  # extends the last one, or is rewritten
    ids = draw(IDS)
    logprobs = draw(st.lists(st.floats(-50, 0), min_size=len(ids), max_size=len(ids)))
    return Generation(
        Prompt(prompt, draw(IDS)),
        ids,
        tuple(logprobs),
        draw(st.sampled_from(Finish)),
        draw(st.integers(0, 9)),
        role=draw(TEXT),
    )


@st.composite
def trajectories(draw: Callable) -> Trajectory:
    turns, before = [], ()
    for _ in range(draw(st.integers(0, 3))):
        calls = []
        for _ in range(draw(st.integers(0, 2))):
            calls.append(draw(generations(before)))
            before = calls[-1].full_ids
        action = Action(draw(TEXT), tuple(calls), draw(st.none() | TEXT), draw(NOTES), draw(PARTS))
        turns.append(Turn(action, draw(TEXT), draw(FLOATS), draw(st.none() | TEXT), draw(st.booleans())))
    return Trajectory(
        draw(TEXT),
        draw(st.integers(0, 99)),
        draw(TEXT),
        tuple(turns),
        draw(st.sampled_from(Outcome)),
        draw(TEXT),
        draw(FLOATS),
        draw(st.integers(0, 3)),
    )


@st.composite
def records(draw: Callable) -> TrajectoryRecord:
    t = draw(trajectories())
    verdict = st.builds(Verdict, FLOATS, TEXT, st.none() | st.lists(FLOATS, max_size=3).map(tuple))
    score = st.builds(
        Score, st.dictionaries(TEXT, verdict, max_size=2), st.lists(FLOATS, max_size=3).map(tuple), FLOATS
    )
    tokens = tuple(tuple(draw(FLOATS) for _ in g.token_ids) for g in t.generations)
    advantages = tokens if draw(st.booleans()) else None
    return TrajectoryRecord(7, "stage.1-a", "train", t.task_id, t, draw(st.none() | score), advantages)


@pytest.fixture
def record() -> TrajectoryRecord:
    group, credit = make_group(make_tokenizer(), random.Random(3), "coin/1", 2, 0.6, 5)
    return TrajectoryRecord(
        1, "train", "train", "coin/1", group.trajectories[0], group.scores[0], credit.advantages_GNT[0]
    )


def in_step(record: TrajectoryRecord, step: int, stage: str = "train", phase: str = "train") -> TrajectoryRecord:
    return TrajectoryRecord(step, stage, phase, record.task_id, record.trajectory, record.score, record.advantages)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(written=st.lists(records(), min_size=1, max_size=3))
def test_what_is_read_equals_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, written: list[TrajectoryRecord]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    TrajectoryWriter(folder).write("stage.1-a", 7, "train", written)
    assert list(read_trajectories(folder)) == written


def test_groups_are_written_with_failures_apart(tmp_path: Path) -> None:
    pairs = [make_group(make_tokenizer(), random.Random(i), f"coin/{i}", 3, 0.6, 5) for i in range(4)]
    failure = Failure(3, Outcome.ENV_ERROR, "the game died", retryable=True)
    groups = [group for group, _ in pairs]
    groups[1] = type(groups[1])(groups[1].task_id, groups[1].trajectories, groups[1].scores, (failure,))
    path = TrajectoryWriter(tmp_path).write_groups("train", 4, "train", groups, [c for _, c in pairs])
    assert path == tmp_path / "train-train-000004.parquet"
    found = list(read_trajectories(tmp_path))
    assert [r.trajectory for r in found] == [t for g in groups for t in g.trajectories]
    assert [r.score for r in found] == [s for g in groups for s in g.scores]
    assert [r.advantages for r in found] == [row for _, c in pairs for row in c.advantages_GNT]
    assert list(read_failures(tmp_path)) == [FailureRecord(4, "train", "train", "coin/1", failure)]
    # every attempt is a row, so a count of outcomes by any tool is complete
    outcomes = pq.read_table(path)["outcome"].to_pylist()
    assert len(outcomes) == 13 and outcomes.count("env_error") == 1


def test_a_prompt_that_extends_the_last_one_is_stored_as_its_new_tokens(tmp_path: Path) -> None:
    first = Generation(Prompt((1, 2, 3)), (4, 5), (-1.0, -1.0), Finish.STOP, 0)
    second = Generation(Prompt((*first.full_ids, 6)), (7,), (-1.0,), Finish.STOP, 0)
    rewritten = Generation(Prompt((1, 2, 6)), (7,), (-1.0,), Finish.LENGTH, 0)
    turns = tuple(Turn(Action("a", (g,)), "r") for g in (first, second, rewritten))
    t = Trajectory("t", 0, "o", turns, Outcome.FAILED)
    path = TrajectoryWriter(tmp_path).write("s", 0, "eval", [TrajectoryRecord(0, "s", "eval", "t", t)])
    assert path is not None
    [stored] = pq.read_table(path)["generations"].to_pylist()
    assert [(g["extends"], g["prompt_ids"]) for g in stored] == [(False, [1, 2, 3]), (True, [6]), (False, [1, 2, 6])]
    assert next(read_trajectories(tmp_path)).trajectory == t


def test_a_step_of_512_trajectories_is_small(tmp_path: Path) -> None:
    def make(i: int) -> TrajectoryRecord:
        ids, turns, rng = tuple(range(300)), [], random.Random(i)
        for k in range(15):
            tokens = tuple(rng.randrange(1000) for _ in range(10))
            generation = Generation(Prompt(ids), tokens, tuple(-rng.random() for _ in tokens), Finish.STOP, 1)
            turns.append(Turn(Action(f"action {k}", (generation,)), "You see a door.", 0.0, f"state {k}"))
            ids = (*generation.full_ids, *(rng.randrange(1000) for _ in range(40)))
        return TrajectoryRecord(0, "s", "train", "t", Trajectory("t", i, "o", tuple(turns), Outcome.FAILED))

    written = [make(i) for i in range(512)]
    path = TrajectoryWriter(tmp_path).write("s", 0, "train", written)
    assert path is not None and path.stat().st_size < 6e6  # 512 · 15 · (10 · (2 + 8) + 40 · 2) bytes = 1.4 MB at best
    assert list(read_trajectories(tmp_path, limit=3)) == written[:3]


def test_filters(tmp_path: Path, record: TrajectoryRecord) -> None:
    writer = TrajectoryWriter(tmp_path)
    for step in (1, 2, 10):
        writer.write("train", step, "train", [in_step(record, step)] * 2)
    writer.write("before", 0, "eval", [in_step(record, 0, "before", "eval")])
    steps = lambda **filters: [(r.stage, r.step) for r in read_trajectories(tmp_path, **filters)]  # noqa: E731
    assert steps(stage="train") == [("train", 1)] * 2 + [("train", 2)] * 2 + [("train", 10)] * 2
    assert steps(phase="eval") == [("before", 0)]
    assert steps(steps=[2]) == [("train", 2)] * 2
    assert steps(limit=2) == [("before", 0), ("train", 1)]
    assert steps(task_id="coin/2") == []
    assert len(steps(outcomes=[record.trajectory.outcome])) == 7
    assert steps(outcomes=[Outcome.REWARD_ERROR]) == []
    assert steps(limit=0) == []
    assert list(read_trajectories(tmp_path / "nowhere")) == []


def test_files_without_a_match_are_not_read_whole(
    tmp_path: Path, record: TrajectoryRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TrajectoryWriter(tmp_path)
    for step in (1, 2, 3):
        trajectory = replace(record.trajectory, task_id=f"coin/{step}", attempt=step)
        writer.write(
            "train", step, "train", [replace(record, step=step, task_id=f"coin/{step}", trajectory=trajectory)]
        )
    whole, read = list[str](), store.pq.read_table

    def seen(path: Path, columns: list[str] | None = None, **options: Any) -> Any:
        whole.extend([path.stem] * (columns is None))
        return read(path, columns=columns, **options)

    monkeypatch.setattr(store.pq, "read_table", seen)
    for asked in ({"task_id": "coin/2"}, {"task_ids": {"coin/2", "coin/9"}}, {"attempt": 2}):
        assert [found.step for found in read_trajectories(tmp_path, **asked)] == [2]
    assert whole == ["train-train-000002"] * 3
    assert not list(read_trajectories(tmp_path, outcomes=[Outcome.REWARD_ERROR])) and len(whole) == 3


def test_successes_leave_failures_of_parts_out(tmp_path: Path) -> None:
    def make(task: str, outcome: Outcome) -> TrajectoryRecord:
        return TrajectoryRecord(0, "after", "eval", task, Trajectory(task, 0, "o", (), outcome))

    outcomes = [("a", Outcome.SOLVED), ("a", Outcome.TURN_LIMIT), ("b", Outcome.FAILED), ("b", Outcome.TIMEOUT)]
    failure = FailureRecord(0, "after", "eval", "c", Failure(0, Outcome.ENV_ERROR, "died"))
    TrajectoryWriter(tmp_path).write("after", 0, "eval", [*(make(*pair) for pair in outcomes), failure])
    assert read_successes(tmp_path, stage="after") == {"a": [True, False], "b": [False]}
    assert read_successes(tmp_path, stage="before") == {}


def test_rewinding_deletes_later_steps_of_the_stage(tmp_path: Path, record: TrajectoryRecord) -> None:
    writer = TrajectoryWriter(tmp_path)
    for stage, step in (("a", 5), ("b", 1), ("b", 2), ("b", 3)):
        writer.write(stage, step, "train", [in_step(record, step, stage)])
    writer.rewind("b", 1)
    assert [(s.stage, s.step) for s in list_steps(tmp_path)] == [("a", 5), ("b", 1)]
    writer.write("b", 2, "train", [in_step(record, 2, "b")])
    writer.rewind("", 0)
    assert list_steps(tmp_path) == []


def test_a_step_is_written_once_by_one_process_and_replaced_by_the_next(
    tmp_path: Path, record: TrajectoryRecord
) -> None:
    writer = TrajectoryWriter(tmp_path)
    writer.write("train", 1, "train", [record])
    with pytest.raises(DataError, match="already written"):
        writer.write("train", 1, "train", [record])
    TrajectoryWriter(tmp_path).write("train", 1, "train", [record] * 2)
    assert len(list(read_trajectories(tmp_path))) == 2


def test_bad_steps_and_records_are_errors(tmp_path: Path, record: TrajectoryRecord) -> None:
    writer = TrajectoryWriter(tmp_path)
    for stage, step, phase in (("a/b", 1, "train"), ("", 1, "train"), ("train", -1, "train"), ("train", 1, "test")):
        with pytest.raises(DataError, match="no file can be named"):
            writer.write(stage, step, phase, [])
    with pytest.raises(DataError, match="another step"):
        writer.write("train", 2, "train", [record])
    with pytest.raises(DataError, match="advantages do not match"):
        TrajectoryRecord(1, "train", "train", "coin/1", record.trajectory, None, ((0.0,),))
    assert writer.write("train", 3, "train", []) is None
    assert list(tmp_path.iterdir()) == []


def test_lone_surrogates_are_written_out(tmp_path: Path) -> None:
    t = Trajectory("t", 0, "broken \ud83d text", (Turn(Action("\udc80"), "ok é 🙂"),), Outcome.FAILED)
    TrajectoryWriter(tmp_path).write("s", 0, "eval", [TrajectoryRecord(0, "s", "eval", "t", t)])
    found = next(read_trajectories(tmp_path)).trajectory
    assert found.opening == "broken \\ud83d text"
    assert (found.turns[0].action.text, found.turns[0].reply) == ("\\udc80", "ok é 🙂")


def test_damaged_and_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a-train-000001.parquet"
    path.write_bytes(b"PAR1 rubbish")
    with pytest.raises(DataError, match="a-train-000001"):
        list(read_trajectories(tmp_path))
    pq.write_table(pa.table({"is_failure": [False]}), path)
    with pytest.raises(DataError, match="another format"):
        list(read_trajectories(tmp_path))
    (tmp_path / "notes.parquet").write_bytes(b"not ours")
    path.unlink()
    assert list(read_trajectories(tmp_path)) == []


def test_a_full_disk_says_so_and_leaves_no_half_file(tmp_path: Path, record: TrajectoryRecord) -> None:
    writer = TrajectoryWriter(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # no file of this process may grow beyond 1000 bytes
    try:
        with pytest.raises(CheckpointError, match="free disk space"):
            writer.write("train", 1, "train", [record] * 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    writer.write("train", 1, "train", [record] * 8)
    assert len(list(read_trajectories(tmp_path))) == 8
