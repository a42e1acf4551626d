"""Supervised training on data: the forms of chats, what is learnt of them, and what is refused."""

from __future__ import annotations

import asyncio
import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer

from rlhf.batching.samples import Sample
from rlhf.build.supervised_data import rows_of, texts_of
from rlhf.build.train import train
from rlhf.errors import CheckpointError, RecipeError, RlhfError
from rlhf.evaluation.store import read_trajectories
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.recipe import load
from rlhf.rollout.renderer import Renderer
from rlhf.training.policy.tokenizer import train_tokenizer
from rlhf.training.stages.chat_files import read_chats
from rlhf.training.stages.chat_rows import chat_samples, prompt_of, split_rows
from rlhf.training.stages.chat_settings import Chats
from tests.training import runs
from tests.training.test_attempts import START

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
QWEN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}{% endif %}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    words = ["red green blue what is it say one two three hello there"]
    return Renderer(train_tokenizer(words, vocab_size=400, max_context=64))


def written(folder: Path, *rows: Any, name: str = "chats.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def learnt(renderer: Renderer, settings: Chats, max_context: int = 512) -> list[tuple[str, str]]:
    """Of each row all of its text, and the text that is learnt, control tokens included."""
    samples, _ = chat_samples(read_chats(settings, "data"), renderer, max_context, settings, "data")
    decode = renderer.tokenizer.decode
    return [(str(decode(s.token_ids)), str(decode(s.token_ids[s.mask]))) for s in samples]


def pair(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


FORMS: dict[str, tuple[Any, str, str]] = {
    "messages": ({"messages": pair("a", "b", "c", "d")}, "<|user|>a<|assistant|>b<|end|><|user|>c<|assistant|>d", "b"),
    "messages of a table": ({"messages": json.dumps(pair("a", "b"))}, "<|user|>a<|assistant|>b", "b"),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
        "<|system|>s<|user|>a<|assistant|>b",
        "b",
    ),
    "prompt and completion": ({"prompt": "a", "completion": "b"}, "<|user|>a<|assistant|>b", "b"),
    "messages of a prompt": (
        {"prompt": pair("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]},
        "<|user|>a<|assistant|>b<|end|><|user|>c<|assistant|>d",
        "d",
    ),
    "alpaca": ({"instruction": "a", "input": "b", "output": "c"}, "<|user|>a\n\nb<|assistant|>c", "c"),
    "thoughts": (
        {"messages": [*pair("a"), {"role": "assistant", "content": "b", "reasoning_content": "r"}]},
        "<|user|>a<|assistant|><think>\nr\n</think>\n\nb",
        "<think>\nr\n</think>\n\nb",
    ),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, *pair("", "b")[1:]]},
              "<|user|>a<|assistant|>b", "b"),
    "an answer that nobody reads": ({"messages": pair("a", "b", "c")}, "<|user|>a<|assistant|>b", "b"),
    "a chat that begins with a greeting": (
        {"messages": [{"role": "assistant", "content": "hello"}, *pair("a", "b")]},
        "<|assistant|>hello<|end|><|user|>a<|assistant|>b",
        "b",
    ),
    "a message without weight": (
        {"messages": [*pair("a"), {"role": "assistant", "content": "b", "weight": 0}, *pair("c", "d")]},
        "<|user|>a<|assistant|>b<|end|><|user|>c<|assistant|>d",
        "d",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_of_each_form_the_assistant_is_learnt(name: str, renderer: Renderer, tmp_path: Path) -> None:
    row, text, reply = FORMS[name]
    [(whole, own)] = learnt(renderer, Chats(path=written(tmp_path, row)))
    assert whole == f"{text}<|end|>"
    assert own == ("b<|end|>d<|end|>" if name == "messages" else f"{reply}<|end|>")


def test_plain_text_is_learnt_whole_and_ended_once(renderer: Renderer, tmp_path: Path) -> None:
    found = learnt(renderer, Chats(path=written(tmp_path, {"text": "red green"}, {"text": "blue<|end|>"})))
    first = renderer.tokenizer.decode(renderer.tokenizer.encode("red green")[:1])
    assert found[0] == ("red green<|end|>", "red green<|end|>".removeprefix(first))
    assert found[1][0] == "blue<|end|>"


def test_tables_and_datasets_are_read_as_lines_are(renderer: Renderer, tmp_path: Path) -> None:
    import datasets
    import pyarrow.parquet as pq

    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    with (tmp_path / "x.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(rows)
    made = datasets.Dataset.from_list([{"messages": pair(r["prompt"], r["completion"])} for r in rows])
    made.save_to_disk(str(tmp_path / "saved"))
    pq.write_table(made.data.table, tmp_path / "x.parquet")
    expected = learnt(renderer, Chats(path=written(tmp_path, *rows)))
    for name in ("x.csv", "saved", "x.parquet"):
        assert learnt(renderer, Chats(path=tmp_path / name)) == expected


@pytest.mark.parametrize("form", ["openai", "plain", "sharegpt"])
@pytest.mark.parametrize("by_template", [True, False])
def test_calls_of_tools_are_written_as_the_template_has_them(form: str, by_template: bool, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a"], vocab_size=400, max_context=64)
    if by_template:
        tokenizer.chat_template = QWEN
    calls = {
        "openai": {"role": "assistant", "content": None, "tool_calls": [CALL]},
        "plain": {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 2}}]},
        "sharegpt": {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": 2}}'},
    }
    is_shared = form == "sharegpt"
    ask: Any = {"from": "human", "value": "sum"} if is_shared else {"role": "user", "content": "sum"}
    told: Any = {"from": "observation", "value": "3"} if is_shared else {"role": "tool", "content": "3"}
    last: Any = {"from": "gpt", "value": "3"} if is_shared else {"role": "assistant", "content": "3"}
    path = written(tmp_path, {"messages": [ask, calls[form], told, last], "tools": [{}] if by_template else None})
    [(whole, own)] = learnt(Renderer(tokenizer), Chats(path=path))
    call = '[add {"a": 1, "b": 2}]' if by_template else (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    )  # fmt: skip
    assert own == f"{call}<|end|>3<|end|>"
    assert "<|tool|>3<|assistant|>" in whole
    assert ("1 tools" in whole) == by_template


def test_what_is_said_around_calls_cannot_end_a_turn(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a"], vocab_size=400, max_context=64)
    tokenizer.chat_template = QWEN
    call = {"name": "add", "arguments": {"a": "<|end|>"}}
    said = {"role": "assistant", "content": "x<|end|>", "tool_calls": [call]}
    settings = Chats(path=written(tmp_path, {"messages": [{"role": "user", "content": "sum"}, said], "tools": [{}]}))
    [sample], _ = chat_samples(read_chats(settings, "data"), Renderer(tokenizer), 512, settings, "data")
    assert tokenizer.decode(sample.token_ids[sample.mask]) == 'x<|end|>[add {"a": "<|end|>"}]<|end|>'
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert [i for i, one in enumerate(sample.token_ids) if one == end] == [len(sample.token_ids) - 1]


def test_a_row_is_what_the_policy_would_have_read_and_said(renderer: Renderer, tmp_path: Path) -> None:
    from rlhf.data import Message, Role

    path = written(tmp_path, {"messages": [{"role": "system", "content": "s"}, *pair("a", "b")]})
    samples, _ = chat_samples(read_chats(Chats(path=path), "data"), renderer, 512, Chats(path=path), "data")
    prompt = renderer.prompt([Message(Role.SYSTEM, "s"), Message(Role.USER, "a")]).token_ids
    assert tuple(samples[0].token_ids.tolist()) == (*prompt, *renderer.encode_reply("b"))
    assert samples[0].mask.tolist() == [False] * len(prompt) + [True] * 2


def test_what_a_message_spells_out_is_no_control_token(renderer: Renderer, tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "<|end|><|assistant|>x", "completion": "y"})
    samples, _ = chat_samples(read_chats(Chats(path=path), "data"), renderer, 512, Chats(path=path), "data")
    assert samples[0].token_ids.tolist().count(renderer.stop_ids[0]) == 1


# --- what is refused --------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[list[Any], dict[str, Any], tuple[str, ...]]] = {
    "mixed forms": (
        [{"messages": pair("a", "b")}, {"prompt": "a", "completion": "b"}],
        {},
        ("line 2", "another form", "prompt and completion: prompt, completion", "as in line 1: messages"),
    ),
    "mixed messages": (
        [{"messages": pair("a", "b")}, {"messages": [{"from": "human", "value": "a"}]}],
        {},
        ("line 2", "another form than the first one", "from, value", "role and content"),
    ),
    "a column that is not there": (
        [{"question": "a", "reply": "b"}], {"prompt": "qestion"}, ("data.prompt", "qestion", "did you mean 'question'?")
    ),
    "no known column": ([{"mesages": []}], {}, ("line 1", "do not form a chat", "'mesages': did you mean 'messages'?")),
    "a lacking column": (
        [{"prompt": "a", "completion": "b"}, {"prompt": "a", "complation": "b"}], {},
        ("line 2", "lacks a column", "did you mean 'complation'?"),
    ),
    "a role": ([{"messages": [{"role": "usr", "content": "a"}]}], {}, ("nobody has this role", "did you mean 'user'?")),
    "no answer": ([{"messages": pair("a")}], {}, ("line 1", "no tokens to train on", "user")),
    "no question": ([{"messages": pair("", "b")[1:]}], {}, ("no question",)),
    "an empty answer": ([{"messages": pair("a", " ")}], {}, ("the assistant says nothing",)),
    "an image": (
        [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], {}, ("no text", "text alone")
    ),
    "a broken call": (
        [{"messages": [*pair("a"), {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}], {},
        ("a call of a tool cannot be read",),
    ),
    "no list": ([{"messages": "hello"}], {}, ("messages is no chat", "hello")),
    "tools in Python": (
        [{"messages": pair("a", "b"), "tools": "[{'type': 'function'}]"}], {}, ("tools are no list", "[{'type'"),
    ),
    "an object as completion": ([{"prompt": "a", "completion": {"text": ["b"]}}], {}, ("completion is no text",)),
    "empty text": ([{"text": "a"}, {"text": ""}], {}, ("line 2",)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_cannot_be_used_is_named(name: str, tmp_path: Path) -> None:
    rows, keys, told = BAD[name]
    with pytest.raises(RecipeError) as caught:
        list(read_chats(Chats(path=written(tmp_path, *rows), **keys), "stages[0].data"))
    assert all(text in str(caught.value) for text in told), caught.value


def test_cells_of_a_table_hold_messages_as_json_and_older_calls_are_learnt(tmp_path: Path) -> None:
    [question, answer] = pair("a", "b")
    rows = [
        {"prompt": json.dumps([question]), "completion": json.dumps([answer])},
        {"prompt": [question], "completion": json.dumps(answer)},
        {"prompt": [question], "completion": answer},
    ]
    for row in rows:
        [found] = read_chats(Chats(path=written(tmp_path, row)), "data")
        assert [m.content for m in found.messages] == ["a", "b"] and found.messages[-1].is_learnt
    texts = ('{"x": 1}', '{"from": "Paris", "to": "Rome"}', '[{"role": "admin"}]', json.dumps([question]), "[" * 10**5)
    for text in texts:
        [plain] = read_chats(Chats(path=written(tmp_path, {"prompt": "[1, 2]", "completion": text})), "data")
        assert [m.content for m in plain.messages] == ["[1, 2]", text]  # JSON that is no reply is a text
    empty = {"role": "assistant", "content": "b", "function_call": {"name": None, "arguments": None}}
    [none] = read_chats(Chats(path=written(tmp_path, {"messages": [question, empty], "tools": "None"})), "data")
    assert none.messages[-1].calls == () and none.tools == ()
    listed = {"messages": [question, answer], "functions": [{"name": "f", "parameters": {}}]}
    [older] = read_chats(Chats(path=written(tmp_path, listed)), "data")
    assert older.tools == ({"name": "f", "parameters": {}},)
    call = {"role": "assistant", "content": "Look:", "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    [older] = read_chats(Chats(path=written(tmp_path, {"messages": [question, call]})), "data")
    assert [(c.name, c.arguments) for c in older.messages[-1].calls] == [("f", {"x": 1})]
    for arguments, read in (('{"x": null}', {"x": None}), ({"x": 1, "y": None}, {"x": 1})):  # of JSON, and of a table
        call["function_call"] = {"name": "f", "arguments": arguments}
        [one] = read_chats(Chats(path=written(tmp_path, {"messages": [question, call]})), "data")
        assert one.messages[-1].calls[0].arguments == read
    greeting = {"role": "assistant", "content": "Hello."}
    [greeted] = read_chats(Chats(path=written(tmp_path, {"messages": [greeting, question, answer]})), "data")
    assert [m.is_learnt for m in greeted.messages] == [False, False, True]
    unlearnt = {"messages": [greeting, question, {**answer, "weight": 0}]}
    with pytest.raises(RecipeError, match="this row has no tokens to train on"):
        list(read_chats(Chats(path=written(tmp_path, unlearnt)), "data"))


def test_lines_that_are_no_json_and_empty_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(RecipeError, match=r"a\.jsonl:2"):
        list(read_chats(Chats(path=tmp_path / "a.jsonl"), "data"))
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(RecipeError, match="no rows"):
        list(read_chats(Chats(path=tmp_path / "b.jsonl"), "data"))
    with pytest.raises(RecipeError, match=r"did you mean 'b\.jsonl'"):
        list(read_chats(Chats(path=tmp_path / "c.jsonl"), "data"))


def test_rows_longer_than_the_context_are_counted_or_dropped(renderer: Renderer, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": text} for text in ("b", "x y z " * 9, "x y z " * 20)]
    path = written(tmp_path, *rows)
    with pytest.raises(RecipeError, match=r"line 2") as caught:
        learnt(renderer, Chats(path=path), max_context=16)
    assert "2 of 3 rows" in str(caught.value)
    assert "line 3" in str(caught.value)
    assert "too_long: drop" in str(caught.value)
    assert len(learnt(renderer, Chats(path=path, too_long="drop"), max_context=16)) == 1


def test_a_template_that_refuses_a_chat_is_told_with_the_line(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a"], vocab_size=400, max_context=64)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + QWEN
    )
    path = written(tmp_path, {"messages": pair("a", "b")}, {"messages": pair("a", "b"), "system": "s"})
    with pytest.raises(RecipeError, match=r"line 2") as caught:
        learnt(Renderer(tokenizer), Chats(path=path))
    assert "no system here" in str(caught.value)


# --- whole runs -------------------------------------------------------------------------------------------------------


def recipe(folder: Path, data: dict[str, Any], *stages: Any, **changes: Any) -> Path:
    changes = {"evaluation": {"n_tasks": 8}} | changes
    stage = {"kind": "supervised", "data": data, "epochs": 2, "batch_size": 8, "optimizer": {"lr": 2.0e-3}}
    return runs.write(folder, [{**stage, **changes.pop("stage", {})}, *stages], **changes)


def chats(n: int = 24) -> list[Any]:
    return [{"messages": pair(f"Say {w}.", w)} for w in ("red", "green", "blue", "white") * (n // 4)]


def test_a_run_learns_from_a_file_and_measures_rows_held_out(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"path": "chats.jsonl", "held_out": 0.25}, stage={"epochs": 12})
    words = ("red", "green", "blue", "white")
    written(tmp_path, *({"messages": pair(f"Say {words[i % 4]}, number {i}.", words[i % 4])} for i in range(24)))
    done = runs.run(path, tmp_path / "run")
    losses = runs.curve(done.folder, "supervised/held_out_loss")
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 2
    assert runs.curve(done.folder, "supervised/n_demonstrations")[0] == 18
    assert "6 rows that were not learnt" in done.said and "optimizer.warmup_steps" not in done.said
    again = runs.run(path, tmp_path / "again")
    assert runs.weights(runs.newest(again.folder)) == runs.weights(runs.newest(done.folder))


def test_all_tokens_are_learnt_with_a_weight_of_observations(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"path": "chats.jsonl"}, stage={"observation_weight": 1.0})
    written(tmp_path, *chats())
    done = runs.run(path, tmp_path / "run")
    assert "caution: stages[0] makes 6 updates and its optimizer.warmup_steps is 10" in done.said
    whole = runs.curve(done.folder, "supervised/n_tokens")
    path = recipe(tmp_path / "b", {"path": "chats.jsonl"})
    written(tmp_path / "b", *chats())
    own = runs.curve(runs.run(path, tmp_path / "b" / "run").folder, "supervised/n_tokens")
    assert whole[0] > 2 * own[0]


@pytest.mark.parametrize("least", [None, 0.5])
def test_attempts_of_another_policy_are_imitated(tmp_path: Path, least: float | None) -> None:
    first = recipe(tmp_path, {"path": "chats.jsonl"}, {
        "kind": "supervised", "rejection_sampling": {"rounds": 1, "tasks_per_round": 32, "group_size": 4}, "epochs": 1,
    }, stage={"epochs": 20})  # fmt: skip
    written(tmp_path, *chats(), {"messages": pair("Say red.", "red", "Right.", "red")})
    runs.run(first, tmp_path / "first")
    worth = [
        r for r in read_trajectories(tmp_path / "first" / "trajectories", phase="train")
        if (r.trajectory.solved if least is None else r.score is not None and r.score.total >= least)
    ]  # fmt: skip
    policy = {**runs.BASE["policy"], "hidden_size": 48, "vocab_size": 320}
    second = recipe(tmp_path / "b", {"from_run": str(tmp_path / "first"), "min_score": least}, policy=policy)
    done = runs.run(second, tmp_path / "b" / "run")
    n = runs.curve(done.folder, "supervised/n_demonstrations")[0]
    different = {(r.task_id, tuple(t.action.reply_text for t in r.trajectory.turns)) for r in worth}
    assert n == len(different) > 4


def test_failed_attempts_are_imitated_under_a_message_of_their_own(tmp_path: Path) -> None:
    sampled = {"kind": "policy_gradient", "steps": 1, "tasks_per_step": 8, "group_size": 8}
    first = runs.run(runs.write(tmp_path, [START, sampled], evaluation={"n_tasks": 2}), tmp_path / "first")
    attempts = [r.trajectory for r in read_trajectories(first.folder / "trajectories", phase="train")]
    data = {"from_run": str(first.folder), "unsolved_system": "Get it wrong."}
    path = recipe(tmp_path / "b", data, agent={"kind": "chat", "system": "Get it right."})
    loaded, tokenizer = load(path), AutoTokenizer.from_pretrained(runs.newest(first.folder) / "policy")
    found = texts_of(loaded, 0)
    rows = asyncio.run(rows_of(loaded, 0, found, Renderer(tokenizer), 512))
    told = [tokenizer.decode(sample.token_ids) for group in rows.learnt for sample in group]
    n_solved = sum("Get it right." in text for text in told)
    different = {(t.task_id, t.solved, tuple(turn.action.reply_text for turn in t.turns)) for t in attempts}
    assert n_solved == sum(solved for _, solved, _ in different) > 0
    longest = max(len(sample) for group in rows.learnt for sample in group)
    with pytest.raises(RecipeError, match=r"longer than the policy's context[\s\S]*too_long=drop"):
        asyncio.run(rows_of(loaded, 0, found, Renderer(tokenizer), longest - 1))
    dropping = load(recipe(tmp_path / "c", {**data, "too_long": "drop"}, agent={"kind": "chat", "system": ""}))
    left = asyncio.run(rows_of(dropping, 0, found, Renderer(tokenizer), longest - 1))
    assert left.n_dropped > 0 and len(left.learnt) + left.n_dropped == len(rows.learnt)
    assert sum("Get it wrong." in text for text in told) == len(told) - n_solved == len(different) - n_solved > 0


def test_attempts_are_imitated_in_the_format_of_the_agent_that_learns(tmp_path: Path) -> None:
    sampled = {"kind": "policy_gradient", "steps": 1, "tasks_per_step": 8, "group_size": 8}
    first = runs.run(runs.write(tmp_path, [START, sampled], evaluation={"n_tasks": 2}), tmp_path / "first")
    tokenizer = AutoTokenizer.from_pretrained(runs.newest(first.folder) / "policy")
    data = {"from_run": str(first.folder)}

    def told(**agent: Any) -> list[str]:
        loaded = load(recipe(tmp_path / "b", data, agent=agent or {"kind": "chat", "system": ""}))
        rows = asyncio.run(rows_of(loaded, 0, texts_of(loaded, 0), Renderer(tokenizer), 512))
        return [tokenizer.decode(sample.token_ids) for group in rows.learnt for sample in group]

    assert all("<action>" not in text for text in told())
    assert all("<action>" in text for text in told(kind="chat", format="tagged"))
    with pytest.raises(RecipeError, match="stored attempts do not say which actions were possible"):
        told(kind="chat", show_admissible=True)
    with pytest.raises(RecipeError, match="this agent is asked for others"):
        told(kind="planner")


def test_what_is_wrong_with_a_run_is_told_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recipe(tmp_path, {"from_run": str(tmp_path / "nothing")})
    with pytest.raises(RecipeError, match="holds no attempts"):
        train(load(path), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()
    long = recipe(tmp_path / "b", {"path": "chats.jsonl"})
    written(tmp_path / "b", *chats(), {"prompt": "a"} | {"messages": pair("x " * 300, "b")})
    ended: list[Any] = []
    close = TransformersEngine.close
    monkeypatch.setattr(TransformersEngine, "close", lambda engine: ended.append(engine) or close(engine))
    with pytest.raises(RecipeError, match="longer than the policy's context"):
        train(load(long), tmp_path / "b" / "run")
    assert len(ended) == 1, "an engine may be a process, which would live as long as this one"
    assert not (tmp_path / "b" / "run" / "checkpoints").exists()


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    path = recipe(
        tmp_path,
        {"path": "chats.jsonl"},
        {"kind": "policy_gradient", "steps": 3, "tasks_per_step": 2, "checkpoint_every": 1},
    )
    written(tmp_path, *chats())
    runs.stop(path, tmp_path / "run", "1-policy_gradient-000001")
    written(tmp_path, *chats(28))
    with pytest.raises(CheckpointError, match="the data differs from what this run began with"):
        runs.run(path, tmp_path / "run", resume=True)
    written(tmp_path, *chats())
    assert runs.run(path, tmp_path / "run", resume=True).result["n_episodes"] > 0
    longer = yaml.safe_load(path.read_text())
    longer["stages"][-1]["steps"] = 4
    path.write_text(yaml.safe_dump(longer))
    (tmp_path / "chats.jsonl").rename(tmp_path / "elsewhere.jsonl")
    assert "this run is finished" in runs.run(tmp_path / "run" / "recipe.yaml", tmp_path / "run", resume=True).said
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match="no such file"):
        runs.run(path, tmp_path / "run", resume=True)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("is_text", [False, True])
def test_questions_of_the_result_among_the_chats_are_told(tmp_path: Path, is_text: bool) -> None:
    rows = [{"question": f"Say the number of this line, which is {i}.", "answer": str(i)} for i in range(40)]
    written(tmp_path, *rows, name="q.jsonl")
    chats = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    texts = [
        {"text": "<|end|>"},
        *({"text": " ".join(chat.values())} for chat in chats),
    ]  # the first has nothing to learn
    written(tmp_path, *(texts if is_text else chats))
    path = tmp_path / "recipe.yaml"
    environment = {"kind": "dataset", "path": "q.jsonl"}
    stages = [{"kind": "supervised", "data": {"path": "chats.jsonl"}, "epochs": 1, "batch_size": 1 if is_text else 8}]
    rewards = {"right": {"kind": "numeric"}}
    made = {"policy": runs.BASE["policy"], "environment": environment, "rewards": rewards, "stages": stages}
    path.write_text(yaml.safe_dump({**made, "limits": {"max_tokens": 6}}))
    assert "judged by are in stages[0].data" in runs.run(path, tmp_path / "run").said


@pytest.mark.parametrize(("data", "stage", "told"), [
    ({}, {}, "path of a file, or from_run"),
    ({"path": "a.jsonl", "from_run": "runs/a"}, {}, "path of a file, or from_run"),
    ({"path": "a.jsonl", "messages": "m", "prompt": "p"}, {}, "give either messages"),
    ({"path": "a.jsonl", "text": "t", "prompt": "p"}, {}, "text excludes messages"),
    ({"path": "a.jsonl", "min_score": 1.0}, {}, "data.min_score"),
    ({"from_run": "runs/a", "prompt": "p"}, {}, "data.prompt"),
    ({"path": "a.jsonl", "unsolved_system": "Fail."}, {}, "data.unsolved_system"),
    ({"from_run": "runs/a", "unsolved_system": "Fail.", "min_score": 0.5}, {}, "data.min_score"),
    ({"from_run": "runs/a", "unsolved_system": ""}, {}, "would be given the same prompt"),
    ({"path": "a.jsonl"}, {"n_demonstrations": 7}, "n_demonstrations"),
    ({"path": "a.jsonl"}, {"split": "dev"}, "split"),
    ({"path": "a.jsonl"}, {"rejection_sampling": {}}, "data"),
])  # fmt: skip
def test_keys_without_an_effect_are_refused(data: Any, stage: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(RlhfError) as caught:
        load(recipe(tmp_path, data, stage=stage))
    assert told in str(caught.value)


def test_chats_of_one_prompt_are_held_out_together() -> None:
    def row(*ids: int, learnt: slice) -> Sample:
        mask = np.zeros(len(ids), np.bool_)
        mask[learnt] = True
        return Sample(np.array(ids), mask, np.zeros(len(ids), np.float32), mask.astype(np.float32), 0, 0)

    one, other, next_turn = (
        row(7, 8, 1, learnt=slice(2, 3)),
        row(7, 8, 2, 3, learnt=slice(2, 4)),
        row(7, 8, 1, 9, 1, learnt=slice(2, None, 2)),
    )
    assert prompt_of(one) == prompt_of(other) != prompt_of(next_turn)
    texts = [row(7, 1, learnt=slice(1, None)), row(7, 2, learnt=slice(1, None))]
    assert len({prompt_of(text) for text in texts}) == 2
    assert prompt_of(row(7, learnt=slice(0))) == np.array([7]).tobytes()  # a text that is only the stop token
    rows = [replace(one, sequence=i % 8, token_ids=np.array([i % 8, 8, i])) for i in range(24)]
    made = split_rows(
        [[x] for x in rows], Chats(path=Path("x"), held_out=0.25), "seed", "data", 0, [*map(prompt_of, rows)]
    )
    assert len(made.held_out) == 6 and len({x.sequence for x in made.held_out}) == 2
    assert not {x.sequence for x in made.held_out} & {group[0].sequence for group in made.learnt}


def test_attempts_are_held_out_by_task() -> None:
    zeros, learnt = np.zeros(3, np.float32), np.array([False, True, True])
    rows = [[Sample(np.arange(3), learnt, zeros, learnt.astype(np.float32), i, i)] for i in range(12)]
    tasks = [f"t{i // 4}" for i in range(12)]
    made = split_rows(rows, Chats(from_run=Path("x"), held_out=0.3), "seed", "data", 0, tasks)
    out = {sample.sequence // 4 for sample in made.held_out}
    assert len(made.held_out) == 4 and len(out) == 1
    assert len(made.learnt) == 8 and not out & {group[0].sequence // 4 for group in made.learnt}
    with pytest.raises(RecipeError, match="no tokens to train on") as caught:
        split_rows(rows, Chats(from_run=Path("x"), held_out=0.3), "seed", "data", 0, ["t"] * 12)
    assert "12 rows of 1 prompts" in caught.value.got and "another prompt, or set held_out: 0" in caught.value.hint
