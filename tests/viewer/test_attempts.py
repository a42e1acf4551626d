"""Attempts are read a file at a time, by what is looked for."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf.errors import DataError
from rlhf.evaluation.rows import decode
from rlhf.evaluation.store import read_trajectories
from rlhf.evaluation.transcript import pieces
from rlhf.viewer import attempts as module
from rlhf.viewer.attempts import Attempts, Filter, groups
from tests.evaluation.synthetic import make_run, make_tokenizer
from tests.viewer.served import HOSTILE, SECRET, hostile_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "coin", n_steps=12, n_eval=20)


def test_steps_stand_in_the_order_they_were_made(run: Path) -> None:
    found = Attempts(run / "trajectories").steps()
    assert [one.stage for one in found] == ["before", *["policy_gradient"] * 12, "after"]
    assert [one.step for one in found[1:-1]] == list(range(1, 13))


def test_groups_have_mean_and_spread_of_their_scores(run: Path) -> None:
    store = Attempts(run / "trajectories")
    rows = store.rows(store.find("policy_gradient", "train", 3))
    first = groups(rows)[0]
    scores = [r["score"] for r in rows if r["task_id"] == first["task_id"] and not r["is_failure"]]
    assert first["mean"] == pytest.approx(sum(scores) / len(scores))
    assert len(groups(rows)) == 8
    assert [a["attempt"] for a in first["attempts"]][:4] == [0, 1, 2, 3]


def test_one_attempt_is_the_one_that_was_stored(run: Path) -> None:
    store = Attempts(run / "trajectories")
    stored = store.find("policy_gradient", "train", 5)
    whole = list(read_trajectories(run / "trajectories", stage="policy_gradient", steps=[5]))
    rows = [row for row in store.rows(stored) if not row["is_failure"]]
    assert [decode(store.record(stored, row["row"])) for row in rows] == whole
    with pytest.raises(DataError, match="no such attempt"):
        store.record(stored, 10_000)


@pytest.mark.parametrize(
    "wanted",
    [
        Filter(outcomes=("solved",)),
        Filter(task="train/3-1"),
        Filter(exact="coin/train/3-1"),
        Filter(least=0.5),
        Filter(most=-0.05),
        Filter(text="you WIN"),
        Filter(text="pantry", outcomes=("turn_limit",)),
    ],
)
def test_search_finds_what_reading_everything_finds(run: Path, wanted: Filter) -> None:
    store = Attempts(run / "trajectories")
    hits, cursor = [], -1
    while cursor is not None:
        found = store.search(wanted, cursor, 10.0, limit=7)
        hits += [(h["stage"], h["step"], h["task_id"], h["attempt"]) for h in found["hits"]]
        cursor = found["cursor"]
    expected = []
    for record in read_trajectories(run / "trajectories"):
        t = record.trajectory
        texts = [t.opening, *(x for turn in t.turns for x in (turn.action.text, turn.reply))]
        score = record.score.total
        if (
            (not wanted.outcomes or str(t.outcome) in wanted.outcomes)
            and wanted.task in t.task_id
            and wanted.exact in ("", t.task_id)
            and (wanted.least is None or score >= wanted.least)
            and (wanted.most is None or score <= wanted.most)
            and any(wanted.text.lower() in text.lower() for text in texts)
        ):
            expected.append((record.stage, record.step, t.task_id, t.attempt))
    assert expected
    assert sorted(hits) == sorted(expected)
    assert hits[0][0] == max(expected, key=lambda e: (e[0] == "after", e[1]))[0]


def test_texts_are_found_wherever_they_stand(tmp_path: Path) -> None:
    store = Attempts(hostile_run(tmp_path / "run", length=5000) / "trajectories")
    for text in ("<script>", "RIGHT TO", "opening a\0b", "name", SECRET[:9], "thought long"):
        assert store.search(Filter(text=text), -1, 10.0, 50)["hits"], text
    assert not store.search(Filter(text="nowhere said"), -1, 10.0, 50)["hits"]
    assert store.search(Filter(text=HOSTILE[0], outcomes=("env_error",)), -1, 10.0, 50)["hits"]


def test_few_steps_are_kept_and_a_replaced_file_is_read_anew(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEPT", 2)
    folder = hostile_run(tmp_path / "run", length=100) / "trajectories"
    store = Attempts(folder)
    [first, second] = store.steps()
    n = len(store.rows(first))
    table = pq.read_table(first.path, partitioning=None)
    pq.write_table(table.slice(0, 2), first.path)
    assert (n, len(store.rows(first))) == (8, 2)
    store.rows(second)
    store.rows(first)
    assert len(store._kept) == 2


def test_damaged_and_vanished_files_are_said_and_passed_over(tmp_path: Path) -> None:
    folder = hostile_run(tmp_path / "run", length=100) / "trajectories"
    store = Attempts(folder)
    [first, second] = store.steps()
    first.path.write_bytes(first.path.read_bytes()[:500])
    pq.write_table(pa.table({"a": [1]}), folder / "0-policy_gradient-train-000003.parquet")
    second.path.unlink()
    with pytest.raises(DataError, match="not a readable trajectory file"):
        store.rows(first)
    found = Attempts(folder).search(Filter(text="<script>"), -1, 5.0, 50)
    assert (found["hits"], len(found["problems"]), found["cursor"]) == ([], 2, None)


def test_files_of_older_versions_are_read(tmp_path: Path) -> None:
    folder = hostile_run(tmp_path / "run", length=100) / "trajectories"
    path = Attempts(folder).steps()[0].path
    table = pq.read_table(path, partitioning=None)
    older = table.drop_columns(["n_given", "parent", "n_shared", "spent", "n_retries"])
    pq.write_table(older.replace_schema_metadata(table.schema.metadata), path)
    store = Attempts(folder)
    assert store.rows(store.steps()[0])[0]["parent"] is None
    assert store.search(Filter(text="<script>"), -1, 5.0, 50)["hits"]


def test_pieces_of_a_long_text_are_those_of_the_whole() -> None:
    tokenizer = make_tokenizer()
    text = "You see the kitchen. ünïcode 漢字 🎲 go north " * 40
    ids = tokenizer.encode(text).ids
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids)
    whole = []
    before = ""
    for k in range(1, len(ids) + 1):  # the plain way, which takes the square of the length
        decoded = tokenizer.decode(ids[:k], skip_special_tokens=False)
        added = decoded[len(before) :] if decoded.startswith(before) and not decoded.endswith("�") else ""
        before += added
        whole.append(added or tokenizer.id_to_token(ids[k - 1]))
    assert found == whole
