"""Question files that are too large to hold: the same tasks, read row by row, in a fraction of the memory."""

from __future__ import annotations

import csv
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rlhf
from environments.base import Environment
from environments.games.key_door import Keyhole
from environments.tasks.dataset import Dataset
from environments.tasks.dataset_index import ReadTasks
from environments.wrappers.difficulty_levels import Graded
from environments.wrappers.mixed import Mixed, Share
from rlhf.data import Task
from rlhf.errors import EnvError, RecipeError
from rlhf.rollout.tasks import tasks_of
from rlhf.tasks.shuffled import Shuffled
from tests.environments.test_dataset import lines
from tests.training import runs

RIGHT = {"right": {"kind": "numeric"}}
ODD = 'One, "two"\u2028\nand three?'
ROWS = [{"question": ODD, "answer": "3"}, *({"question": f"{a} + {a % 7}", "answer": str(a)} for a in range(60))] * 2
SPLITS = ("train", "dev", "test")


def told(world: Dataset) -> dict[str, list[Task]]:
    return {split: list(world.tasks(split)) for split in SPLITS}


def write(folder: Path, form: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"rows.{form}"
    if form == "jsonl":
        path.write_text("\ufeff\n" + "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif form == "saved":
        pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(path)
    else:
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["question", "answer"], delimiter="\t" if form == "tsv" else ",")
            writer.writeheader()
            for row in rows:
                writer.writerow(row)
                file.write("\r\n")
    return path


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv", "parquet", "saved"])
def test_tasks_that_are_read_are_those_that_are_held(form: str, tmp_path: Path) -> None:
    path = write(tmp_path, form, ROWS)
    held, read = Dataset(path=path), Dataset(path=path, max_held_mb=0)
    assert told(read) == told(held) and sum(map(len, told(held).values())) == len(ROWS) // 2
    tasks = read.tasks("train")
    assert isinstance(tasks, ReadTasks) and tasks_of(read, "train") is tasks
    assert tasks[-1] == held.tasks("train")[-1] and list(tasks[2:9:3]) == list(held.tasks("train")[2:9:3])
    assert read.fingerprint() == held.fingerprint()


@pytest.mark.parametrize("kind", ["mixed", "graded"])
def test_a_composite_reads_the_tasks_of_its_members_when_they_are_asked_for(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", ROWS)
    rooms = Keyhole(rows=2, columns=2, n_train=40)

    def composite(questions: Dataset) -> Environment:
        if kind == "graded":
            return Graded(levels=(rooms, questions))
        return Mixed(parts={"rooms": Share(environment=rooms), "questions": Share(environment=questions, weight=2)})

    held, read = composite(Dataset(path=path)), composite(Dataset(path=path, max_held_mb=0))
    tasks, wanted = read.tasks("train"), held.tasks("train")
    assert isinstance(wanted, list) and not isinstance(tasks_of(read, "train"), list)
    assert list(tasks) == wanted and tasks[-1] == wanted[-1] and list(tasks[2:9:3]) == wanted[2:9:3]
    path.write_text("")  # nothing was kept of it
    with pytest.raises(EnvError):
        list(tasks)


def test_a_composite_refuses_read_tasks_that_have_its_key_already(tmp_path: Path) -> None:
    inner = Graded(levels=(Dataset(path=write(tmp_path, "jsonl", ROWS), max_held_mb=0), Keyhole()))
    with pytest.raises(EnvError, match="have a level already"):
        Graded(levels=(Keyhole(), inner)).tasks("train")


@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_a_table_whose_lines_end_otherwise(end: str, tmp_path: Path) -> None:
    rows = end.join(["question,answer", *(f"{a} + 1,{a + 1}" for a in range(60))]) + end
    (tmp_path / "a.csv").write_bytes(rows.encode())
    held, read = (told(Dataset(path=tmp_path / "a.csv", **keys)) for keys in ({}, {"max_held_mb": 0}))
    assert read == held and sum(map(len, held.values())) == 60


@pytest.mark.parametrize("keys", [{}, {"max_held_mb": 0}], ids=["held", "read"])
def test_a_table_may_have_long_cells(keys: dict[str, int], tmp_path: Path) -> None:
    [task] = Dataset(train=write(tmp_path, "csv", [{"question": "long " * 40_000, "answer": "3"}]), **keys).tasks(
        "train"
    )
    assert len(task.info["prompt"]) == 200_000 and task.reference == "3"


def test_rows_of_several_files_and_only_the_first_of_each(tmp_path: Path) -> None:
    train, test = write(tmp_path, "jsonl", ROWS), write(tmp_path, "csv", ROWS[3:9])
    keys: dict[str, Any] = {"train": train, "test": test, "overlap": "drop", "max_rows": 30}
    held, read = Dataset(**keys), Dataset(**keys, max_held_mb=0)
    for split in ("train", "test"):
        assert list(read.tasks(split)) == list(held.tasks(split))
    assert (len(read.tasks("train")), len(read.tasks("test"))) == (24, 6)
    with pytest.raises(EnvError) as refused:
        Dataset(train=train, test=test, max_held_mb=0).tasks("train")
    assert "6 of them: rows.jsonl:8 is rows.csv:2; " in str(refused.value)  # a blank line is behind each


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_a_file_that_changes_under_a_run_is_told(form: str, tmp_path: Path) -> None:
    tasks = Dataset(train=write(tmp_path, form, ROWS), max_held_mb=0).tasks("train")
    assert tasks[0].reference == "3"
    write(tmp_path, form, ROWS[1:])
    with pytest.raises(EnvError, match="the file changed while a run reads it"):
        tasks[0]


def test_memory_is_that_of_an_index(tmp_path: Path) -> None:
    text = "".join(random.Random(0).choices("abcdefgh ", k=30_000))
    path = lines(tmp_path / "a.jsonl", [{"question": f"{n} {text}", "answer": n} for n in range(300)])

    def peak(**keys: int) -> int:
        tracemalloc.start()
        source = Shuffled().start(tasks_of(Dataset(train=path, **keys), "train"), 0)
        assert len({task.reference for task in source.draw(100)}) == 100
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    read, held = peak(max_held_mb=0), peak()
    assert held > path.stat().st_size  # 10 MB: prompts alone
    assert read < 300 * 300 + 4_000_000, (read, held)  # an index, and what one chunk of the file takes


def test_a_run_that_reads_its_rows_goes_on_as_one_that_holds_them(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "sums.jsonl", [{"question": f"{a}+{b}", "answer": a + b} for a in range(6) for b in range(6)]
    )
    policy = {"kind": "from_scratch", "hidden_size": 16, "n_layers": 1, "n_heads": 2, "max_context": 64}
    stage = {"kind": "policy_gradient", "steps": 3, "tasks_per_step": 4, "group_size": 2}

    def train(name: str, **keys: int) -> Path:
        found = rlhf.train(
            policy=policy, environment={"kind": "dataset", "path": str(path), **keys}, rewards=RIGHT, stages=[stage],
            limits={"max_tokens": 2}, evaluation={"n_tasks": 4}, out=tmp_path / name, progress=False,
            callbacks=[(lambda step: step.stop() if step.step == 2 else None)] if name == "stopped" else [],
        )  # fmt: skip
        return Path(found.run)

    held, stopped = train("held"), train("stopped", max_held_mb=0)
    assert len(runs.curve(stopped, "rollout/success")) == 2
    read = Path(rlhf.train(resume=stopped, progress=False).run)
    assert runs.lines(read) == runs.lines(held)
    assert runs.weights(runs.newest(read)) == runs.weights(runs.newest(held))


def test_a_data_set_of_the_hub_is_read_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for split, part in (("train", slice(1, 40)), ("validation", slice(40, 50)), ("test", slice(50, 60))):
        lines(tmp_path / "mine" / f"{split}.jsonl", ROWS[part])
    world = Dataset(hub=str(tmp_path / "mine"))
    assert world.splits == SPLITS and [len(world.tasks(split)) for split in SPLITS] == [39, 10, 10]
    assert isinstance(world.tasks("dev"), ReadTasks) and world.tasks("dev")[0].reference == ROWS[40]["answer"]
    lines(tmp_path / "one" / "train.jsonl", ROWS[:60])
    alone = Dataset(hub=str(tmp_path / "one"))
    assert alone.splits == SPLITS and sum(len(alone.tasks(split)) for split in SPLITS) == 60
    assert alone.fingerprint() and alone.fingerprint() != world.fingerprint()
    with pytest.raises(EnvError, match=r"cannot be loaded") as refused:
        Dataset(hub="nobody/nothing").tasks("train")
    assert refused.value.where == "environment.hub" and "nobody/nothing" in refused.value.got
    for keys in ({"split_ratios": {"train": 0.5, "test": 0.5}}, {"split_column": "part"}):
        with pytest.raises(RecipeError, match="divided already"):
            Dataset(hub=str(tmp_path / "mine"), **keys).tasks("train")
    halved = Dataset(hub=str(tmp_path / "one"), split_ratios={"train": 0.5, "test": 0.5})
    assert sum(len(halved.tasks(split)) for split in halved.splits) == 60
    with pytest.raises(RecipeError, match="hub_config belongs to hub"):
        Dataset(path=tmp_path / "a.jsonl", hub_config="main")


def test_the_first_rows_of_a_hub_are_streamed_and_nothing_else_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for split, part in (("train", slice(1, 40)), ("test", slice(40, 60))):
        lines(tmp_path / "mine" / f"{split}-00000-of-00002.jsonl", ROWS[part])
        (tmp_path / "mine" / f"{split}-00001-of-00002.jsonl").write_text("what cannot be read\n")
    world = Dataset(hub=str(tmp_path / "mine"), max_rows=7)
    assert world.splits == ("train", "test") and not list((tmp_path / "cache").rglob("*.arrow"))
    for split, first in (("train", 1), ("test", 40)):
        assert [task.reference for task in world.tasks(split)] == [row["answer"] for row in ROWS[first : first + 7]]
    same, other = (Dataset(hub=str(tmp_path / "mine"), max_rows=n) for n in (7, 8))
    assert same.fingerprint() == world.fingerprint() != other.fingerprint()
    with pytest.raises(EnvError, match="cannot be loaded"):
        Dataset(hub=str(tmp_path / "mine"), max_rows=100).tasks("train")  # which the second file would have to give
    with pytest.raises(EnvError, match="cannot be loaded"):
        Dataset(hub=str(tmp_path / "mine")).tasks("train")
