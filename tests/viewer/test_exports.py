"""Attempts in other formats: inspect's own loader reads its logs, any Parquet reader the table; keys in neither."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Score, ScoredGroup, Task, Trajectory, Turn, Verdict
from rlhf.evaluation.groups import pack_groups, unpack_groups
from rlhf.evaluation.store import TrajectoryWriter, list_steps, read_failures, read_trajectories
from rlhf.rollout.scoring import WeightedReward, score_group
from rlhf.viewer.messages import _sampled
from tests.commands import last_json, run
from tests.evaluation.synthetic import SYSTEM, make_run, make_tokenizer
from tests.viewer.served import SECRET, hostile_run

ROOT = Path(__file__).parent.parent.parent
#: Where `make install-inspect` puts inspect_ai, whose dependencies other packages here do not agree with.
INSPECT = Path(os.environ.get("INSPECT_PYTHON", ROOT / ".venv" / "inspect" / "bin" / "python"))
READ = """
import json, sys
from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_sample_summaries
found = {}
for info in list_eval_logs(sys.argv[1]):
    log = read_eval_log(info)
    assert len(log.samples) == len(read_eval_log_sample_summaries(info)) == log.results.total_samples
    found[info.name.rpartition("/")[2]] = {
        "status": log.status,
        "step": log.eval.metadata["step"],
        "accuracy": log.results.scores[0].metrics["accuracy"].value if log.results.scores else None,
        "samples": [
            [s.id, s.epoch, s.scores["success"].value if s.scores else None, [m.text for m in s.messages],
             s.error.message if s.error else None,
             s.limit.type if s.limit else None, s.limit.limit if s.limit else None]
            for s in log.samples
        ],
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def coin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "coin", n_steps=3, n_eval=6)


@pytest.fixture(scope="module")
def logs(coin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "logs"
    assert last_json(run("export", coin, "--format", "inspect", "--out", out, "--json"))["n_logs"] == 5
    return out


def _said(played: Trajectory) -> list[str]:
    """What was sampled and read in turns, without the last reply, which nobody read."""
    return [text for turn in played.turns for text in (turn.action.text, turn.reply)][:-1]


@pytest.mark.skipif(not INSPECT.is_file(), reason="no inspect_ai: make install-inspect")
def test_inspects_own_loader_reads_the_logs(coin: Path, logs: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([INSPECT, "-c", READ, logs], capture_output=True, text=True, check=True, env=clean, cwd=logs)
    found = json.loads(done.stdout.splitlines()[-1])
    stored = list_steps(coin / "trajectories")
    assert set(found) == {f"{s.path.stem}.eval" for s in stored}
    for one in stored:
        log = found[f"{one.path.stem}.eval"]
        where = {"stage": one.stage, "phase": one.phase}
        records = list(read_trajectories(coin / "trajectories", steps=[one.step], **where))
        failures = [f for f in read_failures(coin / "trajectories", **where) if f.step == one.step]
        assert (log["status"], log["step"]) == ("success", one.step)
        assert log["accuracy"] == pytest.approx(sum(r.trajectory.solved for r in records) / len(records))
        assert len(log["samples"]) == len(records) + len(failures)
        by_key = {(id_, epoch): rest for id_, epoch, *rest in log["samples"]}
        first = records[0].trajectory
        value, texts, error, limit, reached = by_key[first.task_id, 1]
        assert value == ("C" if first.solved else "I") and error is None
        assert limit == (None if first.solved else "message")
        assert reached in (None, 1 + 2 * len(first.turns))
        assert texts == [SYSTEM, first.opening, *_said(first)]


def test_a_log_says_the_same_to_who_reads_the_zip(coin: Path, logs: Path) -> None:
    with zipfile.ZipFile(logs / "after-eval-000003.eval") as log:
        assert {"header.json", "summaries.json", "_journal/start.json"} < set(log.namelist())
        header = json.loads(log.read("header.json"))
        summaries = json.loads(log.read("summaries.json"))
    assert header["eval"]["metadata"] == {"run": "coin", "stage": "after", "phase": "eval", "step": 3}
    assert header["version"] == 2 and header["eval"]["dataset"]["samples"] == 6 == len(summaries)


def test_samples_of_all_logs_have_ids_of_their_own(coin: Path, logs: Path, tmp_path: Path) -> None:
    twin = shutil.copytree(coin, tmp_path / "elsewhere" / coin.name)  # a folder of the same name
    run("export", twin, "--format", "inspect", "--out", tmp_path / "logs")
    samples = []
    for path in (*logs.glob("*.eval"), *(tmp_path / "logs").glob("*.eval")):
        with zipfile.ZipFile(path) as log:
            samples += [json.loads(log.read(n)) for n in log.namelist() if n.startswith("samples/")]
    ids = [sample["uuid"] for sample in samples]
    assert len(set(ids)) == len(ids) > 10


def test_one_table_has_every_attempt(coin: Path, tmp_path: Path) -> None:
    out = tmp_path / "attempts.parquet"
    told = last_json(run("export", coin, "--format", "parquet", "--out", out, "--json"))
    rows = pq.read_table(out).to_pylist()
    records = list(read_trajectories(coin / "trajectories"))
    failures = list(read_failures(coin / "trajectories"))
    assert len(rows) == told["n_attempts"] == len(records) + len(failures)
    assert sum(row["solved"] for row in rows) == sum(r.trajectory.solved for r in records)
    [row] = [r for r in rows if (r["step"], r["stage"], r["task_id"]) == (3, "after", "coin/test/2")]
    [record] = read_trajectories(coin / "trajectories", stage="after", task_id="coin/test/2")
    assert record.score is not None and row["score"] == record.score.total
    assert dict(row["parts"])["environment"] == record.score.parts["environment"].value
    played = record.trajectory
    roles = ["system", *["user", "assistant"] * len(played.turns)]
    said = zip(roles, [SYSTEM, played.opening, *_said(played)], strict=True)
    assert row["messages"] == [{"role": role, "content": text} for role, text in said]
    assert row["end"] == played.turns[-1].reply and row["finish"] == str(played.generations[-1].finish)
    assert dict(row["why"]) == {name: part.why for name, part in record.score.parts.items()}
    again = run("export", coin, "--format", "parquet", "--out", out)
    assert again.exit_code == 2 and "nothing is overwritten" in again.output


def test_the_table_has_the_reference_and_the_columns_of_each_row(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} + 1?", "answer": str(i + 1), "level": i % 3} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    suite, kept = tmp_path / "sums.yaml", tmp_path / "kept"
    suite.write_text(
        "parts: {sums: {environment: {kind: dataset, path: rows.jsonl}, rewards: {right: {kind: exact_match}}}}\n"
    )
    assert run("evaluate", "oracle", "--suite", suite, "--out", kept).exit_code == 0
    run("export", kept, "--format", "parquet", "--out", tmp_path / "first.parquet")
    exported = pq.read_table(tmp_path / "first.parquet").to_pylist()
    levels = {row["answer"]: row["level"] for row in rows}
    assert exported and all(json.loads(one["columns"]) == {"level": levels[one["reference"]]} for one in exported)
    (tmp_path / "rows.jsonl").unlink()
    told = run("export", kept, "--format", "parquet", "--out", tmp_path / "then.parquet")
    then = pq.read_table(tmp_path / "then.parquet").to_pylist()
    assert "cannot be made again" in told.stderr and {one["reference"] for one in then} == {None}


#: Special tokens of a template, a prompt as it writes it, and what a reader makes of that.
TEMPLATES = [
    (
        ["<|im_start|>", "<|im_end|>"],
        "<|im_start|>system\nuser\nBe.<|im_end|>\n<|im_start|>tool\nr\n<|im_end|>\n<|im_start|>assistant\n<think>\n",
        [("system", "user\nBe."), ("tool", "r"), ("assistant", "<think>\nab")],
    ),
    (
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|start_header_id|>user<|end_header_id|>\n\ntool\nq<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        [("user", "tool\nq"), ("assistant", "ab")],
    ),
    (
        ["<start_of_turn>", "<end_of_turn>"],
        "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
        [("user", "hi"), ("assistant", "ab")],
    ),
    (
        ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
        "[SYSTEM_PROMPT]Be.[/SYSTEM_PROMPT][INST]hi[/INST]",
        [("system", "Be."), ("user", "hi"), ("assistant", "ab")],
    ),
    (["<end>"], "Be.<end>", [("user", "Be."), ("assistant", "ab")]),
    (
        ["<|user|>", "<|observation|>", "<|tool_sep|>", "<|assistant|>"],
        "<|user|>hi<|observation|>3<|tool_sep|>4<|assistant|>",
        [("user", "hi"), ("tool", "34"), ("assistant", "ab")],
    ),
]


@pytest.mark.parametrize(("special", "prompt", "expected"), TEMPLATES, ids=lambda value: str(value)[:16])
def test_messages_are_parted_as_the_templates_of_model_families_do(
    special: list[str], prompt: str, expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    core = make_tokenizer()
    core.add_special_tokens(special)
    sampled = [core.encode(text).ids for text in ("ab", "b")]
    prompts = [core.encode(prompt).ids] * 2
    calls = tuple(
        Generation(Prompt(ids), said, [-1.0] * len(said), Finish.STOP, 0)
        for ids, said in zip(prompts, sampled, strict=True)
    )
    played = Trajectory("t", 0, "?", (Turn(Action("b", calls), "{}"),), Outcome.FAILED)
    write_run(tmp_path, core, ScoredGroup("t", (played,), (Score({}, (0.0,), 0.0),)))
    out = tmp_path / "t.parquet"
    run("export", tmp_path, "--format", "parquet", "--out", out)
    (row,) = pq.read_table(out).to_pylist()
    last = (expected[-1][0], expected[-1][1].replace("ab", "b"))
    found = [(message["role"], message["content"]) for message in row["messages"]]
    assert found == [*expected, *expected[:-1], last] and row["end"] == "{}"


def test_of_calls_in_two_conversations_each_is_read_once_and_what_opponents_said_is_not() -> None:
    core = make_tokenizer()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    asks = "<|im_start|>user\n{}<|im_end|><|im_start|>assistant\n"

    def call(ids: list[int], text: str, by: str = "") -> Generation:
        said = core.encode(f"{text}<|im_end|>").ids
        return Generation(Prompt(ids), said, [-1.0] * len(said), Finish.STOP, 0, opponent=by)

    def after(said: Generation, text: str) -> list[int]:
        return [*said.full_ids, *core.encode(asks.format(text)).ids]

    plan, act = (call(core.encode(asks.format(text)).ids, f"{text}!") for text in ("plan", "act"))
    rival = call(core.encode(asks.format("rival")).ids, "mine", by="step 20")
    calls = (plan, act, rival, call(after(plan, "plan on"), "so"), call(after(act, "act on"), "go"))
    played = Trajectory("t", 0, "?", (Turn(Action("go", calls), ""),), Outcome.FAILED)
    found = _sampled(played, core)
    assert [(one["role"], one["content"]) for one in found] == [
        *(("user", "plan"), ("assistant", "plan!"), ("user", "act"), ("assistant", "act!")),
        *(("user", "plan on"), ("assistant", "so"), ("user", "act on"), ("assistant", "go")),
    ]


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.REWARD_ERROR])
def test_a_failed_attempt_keeps_what_was_said(outcome: Outcome, tmp_path: Path) -> None:
    def judge(task: Task, trajectory: Trajectory) -> Verdict:
        raise RuntimeError("no judge is there")

    core = make_tokenizer()
    ids = core.encode("<|user|>Begin.<|assistant|>").ids
    said = Generation(Prompt(ids), core.encode("ab<|end|>").ids, [-1.0] * 3, Finish.STOP, 0)
    own = Outcome.FAILED if outcome is Outcome.REWARD_ERROR else outcome
    played = Trajectory("t", 3, "Begin.", (Turn(Action("ab", (said,)), ""),), own, "step took 30 s")
    rewards = {"judge": WeightedReward("judge", 1.0, judge)}
    group = asyncio.run(score_group(Task("t"), [played], rewards, timeout_s=30))
    write_run(tmp_path, core, group)
    out = tmp_path / "t.parquet"
    run("export", tmp_path, "--format", "parquet", "--out", out)
    (row,) = pq.read_table(out).to_pylist()
    assert (row["is_failure"], row["outcome"], row["attempt"], row["score"]) == (True, outcome, 3, None)
    expected = [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": "ab"}]
    assert row["messages"] == expected and row["n_turns"] == 1
    assert next(read_failures(tmp_path / "trajectories")).failure == group.failures[0]
    assert not list(read_trajectories(tmp_path / "trajectories"))
    assert unpack_groups(pack_groups({0: group}))[0].failures[0].trajectory == replace(
        played, outcome=outcome, detail=row["detail"]
    )


def write_run(folder: Path, core: Tokenizer, group: ScoredGroup) -> None:
    """A run folder with the attempts of one group."""
    core.save(str(folder / "tokenizer.json"))
    (folder / "metrics.jsonl").write_text("")
    TrajectoryWriter(folder / "trajectories").write_groups("s", 1, "train", [group])


def test_a_planted_key_is_in_no_export(tmp_path: Path) -> None:
    folder = hostile_run(tmp_path / "run", length=100)
    assert any(SECRET in r.trajectory.opening for r in read_trajectories(folder / "trajectories"))  # it is planted
    run("export", folder, "--format", "inspect", "--out", tmp_path / "logs", "--redact", "right to [a-z]+")
    run("export", folder, "--format", "parquet", "--out", tmp_path / "t.parquet", "--redact", "right to [a-z]+")
    texts = [str(pq.read_table(tmp_path / "t.parquet").to_pylist())]
    for path in (tmp_path / "logs").iterdir():
        with zipfile.ZipFile(path) as log:
            texts += [name + log.read(name).decode() for name in log.namelist()]
    for text in texts:
        assert SECRET[8:] not in text and "right to left" not in text
    assert "█" in texts[0]


def test_what_cannot_be_exported_is_refused(tmp_path: Path, coin: Path) -> None:
    none = run("export", tmp_path, "--format", "inspect", "--out", tmp_path / "logs")
    assert none.exit_code == 2 and "there is no run" in none.output
    wrong = run("export", coin, "--format", "inspct", "--out", tmp_path / "logs")
    assert wrong.exit_code == 2 and "inspect" in wrong.output
    run_folder = shutil.copytree(coin, tmp_path / "copy")
    next((run_folder / "trajectories").glob("*.parquet")).write_bytes(b"half a file")
    damaged = run("export", run_folder, "--format", "parquet", "--out", tmp_path / "t.parquet")
    assert damaged.exit_code == 2 and "not a readable trajectory file" in damaged.output
    assert not list(tmp_path.glob("*.partial")) and not (tmp_path / "t.parquet").exists()
