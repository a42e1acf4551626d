"""What the viewer answers: behind its key, read-only, redacted, and live."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.sinks import JsonlSink, LogLine
from tests.commands import last_json, run
from tests.evaluation.synthetic import make_run
from tests.training import runs
from tests.viewer.served import HOSTILE, SECRET, Viewer, hostile_run, viewer

STEP = {"stage": "policy_gradient", "phase": "train"}
HOSTILE_STEP = {"stage": "0-policy_gradient", "phase": "train", "step": 1}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    home = tmp_path_factory.mktemp("runs")
    make_run(home / "coin", n_steps=12, n_eval=20)
    make_run(home / "other", n_steps=6, n_eval=20, seed=1)
    hostile_run(home / "hostile", length=20_000)
    with viewer(home, redact=["my-[0-9]+"]) as found:
        yield found


def test_nothing_is_shown_without_the_key(shown: Viewer) -> None:
    root = shown.url.rsplit("/", 2)[0]
    other = Viewer(f"{root}/", shown.library)
    for path in ("", "api/runs", "static/main.js", "wrong/api/runs", "docs", "openapi.json", f"{shown.url[-8:-2]}/"):
        assert other.status(path) == 404, path
    assert shown.status("") == shown.status("api/runs") == shown.status("static/main.js") == 200
    for path in ("docs", "openapi.json", "static/../app.py", "static/%2e%2e/app.py", "api/run/..%2f..%2fetc"):
        assert shown.status(path) == 404, path


def test_it_can_only_be_read(shown: Viewer) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert shown.status("api/runs", method) == 405


def test_every_answer_keeps_the_page_to_itself(shown: Viewer) -> None:
    for path in ("", "api/runs", "static/main.js", "static/uplot/uPlot.iife.min.js"):
        with shown.open(path) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none';")
            assert "unsafe" not in policy and "http" not in policy and "*" not in policy
            assert answer.headers["Referrer-Policy"] == "no-referrer"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_all_addresses_of_the_page_are_relative() -> None:
    import rlhf.viewer.page as module

    files = [
        *(module.HERE / "static").glob("*.js"),
        *(module.HERE / "templates").glob("*"),
        *(module.HERE / "static").glob("*.css"),
    ]
    assert len(files) > 8
    for path in files:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and 'src="/' not in text and 'href="/' not in text, path
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text, path


def test_what_a_browser_loads_is_small() -> None:
    import rlhf.viewer.page as module

    sizes = {path.name: path.stat().st_size for path in (module.HERE / "static").rglob("*") if path.is_file()}
    assert sizes["uPlot.iife.min.js"] + sizes["uPlot.min.css"] + sizes["LICENSE"] < 60_000
    assert sum(sizes.values()) < 200_000


def test_runs_and_their_heads(shown: Viewer) -> None:
    found = {one["id"]: one for one in shown.get("runs")["runs"]}
    assert set(found) == {"coin", "other", "hostile"}
    assert (found["coin"]["state"], found["coin"]["step"]) == ("finished", 12)
    assert [e["name"] for e in found["coin"]["evaluations"]] == ["before", "after"]
    told = shown.get("run/coin")
    assert told["stored"] == ["before", "after"]
    assert told["metrics"]["rollout/success"]["unit"] == "share"
    assert told["metrics"] and {c["level"] for c in told["cautions"]} <= {"fine", "look", "problem"}


def test_curves_are_the_log(shown: Viewer) -> None:
    run = shown.library.get("coin")
    assert run is not None
    lines = run.poll().lines
    found = shown.get("run/coin/metrics", names="rollout/success,absent")
    values = [one.values.get("rollout/success") for one in lines]
    assert found["values"]["rollout/success"] == [v if v is None else pytest.approx(v, rel=1e-5) for v in values]
    assert set(found["values"]) == {"rollout/success"}
    assert found["step"] == [one.step for one in lines]


def test_groups_are_paged_and_filtered(shown: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.viewer.answers.PAGE_N", 3)
    pages = [shown.get("run/coin/groups", **STEP, step=3, offset=n) for n in (0, 3, 6)]
    assert [len(page["groups"]) for page in pages] == [3, 3, 2]
    assert len({group["task_id"] for page in pages for group in page["groups"]}) == pages[0]["n_groups"] == 8
    some = shown.get("run/coin/groups", **STEP, step=3, outcome="solved")
    assert 0 < some["n_found"] < some["n_attempts"]
    assert all(any(a["found"] for a in group["attempts"]) for group in some["groups"])
    assert not shown.get("run/coin/groups", **STEP, step=3, text="never said")["groups"]


def test_a_trajectory_has_its_tokens_and_what_each_was_worth(shown: Viewer) -> None:
    found = shown.get("run/coin/trajectory", **STEP, step=12, row=0)
    tokens = found["turns"][0]["generations"][0]["tokens"]
    assert "".join(tokens["piece"]) == f"{found['turns'][0]['action']}<|end|>"
    n = len(tokens["id"])
    assert n == len(tokens["logprob"]) == len(tokens["advantage"]) == len(tokens["version"]) > 0
    assert found["score"]["parts"]["environment"]["per_turn"] is not None
    assert found["colours"]["advantage"] == found["colours"]["version"] == ""
    assert found["colours"]["entropy"].startswith("not recorded")
    assert [s["attempt"] for s in found["siblings"]][:4] == [0, 1, 2, 3]
    assert "<|system|>" in found["turns"][0]["generations"][0]["read"]
    before = shown.get("run/coin/trajectory", stage="before", phase="eval", step=0, row=0)
    assert before["colours"]["advantage"] and before["colours"]["logprob"] == ""


def test_the_same_task_is_found_elsewhere(shown: Viewer) -> None:
    hits = shown.get("run/coin/search", like="before:eval:0:2")["hits"]
    assert {(hit["stage"], hit["task_id"]) for hit in hits} == {("after", "coin/test/2"), ("before", "coin/test/2")}


def test_evaluations_are_compared_task_by_task(shown: Viewer) -> None:
    found = shown.get("compare", first="coin:before", second="coin:after")
    assert found["n"] == 20
    assert len(found["flipped"]) == found["n_better"] + found["n_worse"]
    assert shown.get("compare", first="coin:before", second="other:after")["n"] == 20
    assert "no task" in shown.get("compare", first="coin:before", second="hostile:none")["problem"]


def test_what_is_not_there_is_said(shown: Viewer) -> None:
    assert shown.status("api/run/nothing") == 404
    assert shown.status("api/run/coin/groups?stage=x&phase=train&step=1") == 422
    assert shown.status("api/run/coin/trajectory?stage=policy_gradient&phase=train&step=1&row=9999") == 422
    assert shown.status("api/run/coin/search?like=nonsense") == 422
    assert shown.status("api/run/coin/search?like=before:eval:0:9999") == 422
    assert shown.status("api/run/coin/groups?stage=policy_gradient&phase=train&step=none") == 422


def everything(shown: Viewer) -> str:
    """All that the viewer says of the hostile run, as text."""
    rows = [shown.get("run/hostile/trajectory", **HOSTILE_STEP, row=row) for row in range(8)]
    pages = ["run/hostile", "run/hostile/metrics", "run/hostile/steps", "runs"]
    found: list[Any] = [*rows, *(shown.get(page) for page in pages), shown.get("run/hostile/groups", **HOSTILE_STEP)]
    return json.dumps([*found, shown.get("run/hostile/search", text="opening")], ensure_ascii=False)


def test_a_planted_key_is_shown_nowhere(shown: Viewer) -> None:
    text = everything(shown)
    assert "█████" in text
    for part in (SECRET, SECRET[8:], SECRET[:14]):
        assert part not in text
    joined = ["".join(g["tokens"]["piece"]) for g in _generations(shown)]
    assert not any("Abcdefghij" in words.replace("█", "") for words in joined)
    assert any("█" in words for words in joined)
    assert "<script>document.title" in text  # other texts come as they are, as text


def _generations(shown: Viewer) -> list[Any]:
    rows = [shown.get("run/hostile/trajectory", **HOSTILE_STEP, row=row) for row in range(7)]
    return [g for row in rows for turn in row["turns"] for g in turn["generations"]]


def test_a_search_does_not_tell_what_is_blacked_out(shown: Viewer) -> None:
    assert not shown.get("run/hostile/search", text=SECRET[:12])["hits"]
    assert not shown.get("run/hostile/groups", **HOSTILE_STEP, text=SECRET[:12])["groups"]
    assert shown.get("run/hostile/search", text="right to left")["hits"]


def test_a_search_does_not_tell_of_a_key_that_what_is_shown_would_cut(tmp_path: Path) -> None:
    lines = "\n".join(f"line{i}{'Zz9' * 18}" for i in range(6))
    pem = f"-----BEGIN PRIVATE KEY-----\n{lines}\n-----END PRIVATE KEY-----"
    run = hostile_run(tmp_path / "run", length=100, secret=f"{pem} so ends the key, and {SECRET} the other one")
    with viewer(run) as found:
        assert not found.get("run/run/search", text="line3Zz9")["hits"]
        for text in ("so ends", "the other one"):
            hits = found.get("run/run/search", text=text)["hits"]
            around = json.dumps([hit["around"] for hit in hits])
            assert hits and "Zz9" not in around and SECRET[-9:] not in around, around


def test_own_patterns_are_blacked_out_too(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run", length=100)
    with viewer(run, redact=["right to [a-z]+"]) as found:
        text = json.dumps(found.get("run/run/groups", **HOSTILE_STEP), ensure_ascii=False)
    assert "right to" not in text
    assert "█████" in text


def events(answer: Any) -> Iterator[Any]:
    """Events of a stream, each with its id and its data."""
    number = ""
    for raw in answer:
        text = raw.decode().rstrip("\n")
        if text.startswith("id: "):
            number = text[4:]
        elif text.startswith("data: "):
            yield number, json.loads(text[6:])


def test_new_lines_come_within_a_second(tmp_path: Path) -> None:
    run = tmp_path / "run"
    sink = JsonlSink(run / "metrics.jsonl")
    sink.write(LogLine(1, "0-policy_gradient", time.time(), {"rollout/success": 0.1}))
    with viewer(run) as found, found.open("api/run/run/events") as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        stream = events(answer)
        number, told = next(stream)
        assert (number, told["fresh"]["step"]) == ("0:1", [1])
        delays = []
        for step in range(2, 7):
            sink.write(LogLine(step, "0-policy_gradient", time.time(), {"rollout/success": step / 10}))
            written = time.monotonic()
            number, told = next(stream)
            delays.append(time.monotonic() - written)
            assert (number, told["fresh"]["step"], told["head"]["step"]) == (f"0:{step}", [step], step)
        assert sorted(delays)[2] < 10  # tenfold: a busy machine must not fail this
        with found.open("api/run/run/events", **{"Last-Event-ID": "0:4"}) as again:
            assert next(events(again))[1]["fresh"]["step"] == [5, 6]
        sink.rewind("0-policy_gradient", 2)
        number, told = next(stream)
        assert (number, told["is_new"], told["fresh"]["step"]) == ("1:2", True, [1, 2])
        shutil.rmtree(run)
        assert next(stream)[1]["head"]["state"] == "gone"


def test_two_viewers_show_one_run_and_write_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "coin", n_steps=3, n_eval=4)
    before = {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}
    with viewer(run) as one, viewer(run) as two:
        for shown in (one, two):
            assert shown.get("run/coin")["step"] == 3
            shown.get("run/coin/groups", **STEP, step=1)
            shown.get("run/coin/trajectory", **STEP, step=1, row=0)
    assert {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]} == before


def test_runs_appear_as_they_begin_and_names_that_are_alike_differ(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    home.mkdir()
    with viewer(home, tmp_path / "else") as shown:
        assert [one["state"] for one in shown.get("runs")["runs"]] == ["gone"]  # the one that was named itself
        make_run(home / "coin", n_steps=2, n_eval=2)
        make_run(home / "a b<c>", n_steps=2, n_eval=2)
        assert {one["id"] for one in shown.get("runs")["runs"]} == {"else", "coin", "a_b_c_"}
        (home / "a b_c>").mkdir()
        (home / "a b_c>" / "recipe.yaml").write_text("seed: 1\n")
        assert len({one["id"] for one in shown.get("runs")["runs"]}) == 4


def test_a_real_run_is_shown_and_its_test_passes(tmp_path: Path) -> None:
    stage = {"kind": "policy_gradient", "steps": 2, "tasks_per_step": 2, "group_size": 2}
    done = runs.run(runs.write(tmp_path, [stage], evaluation={"n_tasks": 4}), tmp_path / "run")
    assert "success 0% (0%-" in done.said
    with viewer(done.folder) as shown:
        head = shown.get("run/run")
        assert (head["state"], head["step"], head["n_steps"]) == ("finished", 2, 2)
        found = shown.get("run/run/trajectory", stage="0-policy_gradient", phase="train", step=2, row=0)
    assert found["has_tokenizer"] and found["turns"][0]["generations"][0]["tokens"]["advantage"]
    assert found["commands"]["play"] == f"rlhf play {done.folder} --from 0-policy_gradient:train:2:0"
    passes(found["test"])


def test_tokens_without_a_tokenizer_tell_nothing(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run", length=1_000)
    (run / "policy").rename(tmp_path / "policy")
    asked: dict[str, Any] = {"stage": "0-policy_gradient", "phase": "train", "step": 1, "row": len(HOSTILE)}
    with viewer(run) as shown:
        found = shown.get("run/run/trajectory", **asked)
        assert not found["has_tokenizer"]
        tokens = found["turns"][0]["generations"][0]["tokens"]
        assert set(tokens["id"]) == {None} and set(tokens["piece"]) == {"▯"} and len(tokens["logprob"]) > 1
    (run / "evaluation.yaml").write_text(json.dumps({"asked": {"target": "a", "checkpoint": str(tmp_path)}}))
    with viewer(run) as shown:
        found = shown.get("run/run/trajectory", **asked)
    assert found["has_tokenizer"] and SECRET not in json.dumps(found)


def passes(text: str) -> None:
    """A test that a page gives: it plays the attempt again and expects its outcome."""
    space: dict[str, Any] = {}
    exec(text, space)
    [test] = [value for name, value in space.items() if name.startswith("test_attempt_is_")]
    test()


def test_an_attempt_of_an_evaluation_is_played_again_in_its_part(tmp_path: Path) -> None:
    suite = tmp_path / "two.yaml"
    suite.write_text(
        "tasks: {split: test, n: 2}\nparts:\n"
        "  small: {environment: {kind: keyhole, rows: 3, columns: 3, loops: 4}}\n"
        "  large: {environment: {kind: keyhole, rows: 4, columns: 4, loops: 4}}\n"
    )
    folder = tmp_path / "oracle"
    assert run("evaluate", "oracle", "--suite", suite, "--out", folder).exit_code == 0
    with viewer(folder) as shown:
        found = shown.get("run/oracle/trajectory", stage="large", phase="eval", step=0, row=1)
    passes(found["test"])
    asked = shlex.split(found["commands"]["play"])[1:]
    actions = [turn["action"] for turn in found["turns"]]
    on = run(*asked, "--turns", "2", "--json", lines=actions[2:])
    assert last_json(on)["actions"] == actions and last_json(on)["success"]
    wrong = run("play", folder, "--from", "larg:eval:0:1")
    assert wrong.exit_code == 2 and "no such part" in wrong.output and "large" in wrong.output
    nowhere = run("play", tmp_path / "oracl", "--from", "large:eval:0:1")
    assert nowhere.exit_code == 2 and "did you mean" in nowhere.output
