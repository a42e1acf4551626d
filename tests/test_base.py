"""The base model: its corpus, its name in a recipe, and the table of what suites learn from it."""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from rlhf.errors import ModelError, RecipeError
from rlhf.recipe import load
from rlhf.recipe.model import recipe_of
from rlhf.recipe.suites import load_suite
from rlhf.training.policy import model_files
from rlhf.training.policy.model import Pretrained

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loads a script of `benchmarks/` or `benchmarks/base/` by name."""
    for folder in (ROOT / "benchmarks", ROOT / "benchmarks" / "base"):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(ROOT)
    yield importlib.import_module


# --- corpus ----------------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_corpus_is_the_same_again_and_has_no_mistake_to_imitate(scripts: Any, tmp_path: Path) -> None:
    corpus = scripts("corpus")
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        corpus.make("keyhole", tmp_path / name, 40_000)
        found.append({path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir())})
    assert found[0] == found[1] and list(found[0]) == ["keyhole-compass.jsonl", "keyhole-large.jsonl"]
    rows = [row for name in found[0] for row in rows_of(tmp_path / "one" / name)]
    said = [m for row in rows for m in row["messages"] if m["role"] == "assistant"]
    assert {m.get("weight", 1) for m in said} == {0, 1}
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    assert {row["messages"][0]["role"] for row in rows} == {"system", "user"}


def test_levels_that_show_how_well_the_base_carries_over_are_not_in_the_corpus(scripts: Any) -> None:
    levels = {part.environment.level for part in scripts("corpus").parts_of("babyai")}
    assert not levels & {"OpenDoor", "GoToRedBall", "UnlockLocal", "PutNextLocal"} and "GoToObj" in levels


def test_a_finished_part_is_not_played_again(scripts: Any, tmp_path: Path) -> None:
    for part in ("compass", "large"):
        (tmp_path / f"keyhole-{part}.jsonl").write_text("as it was")
    scripts("corpus").make("keyhole", tmp_path, 10_000)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"as it was"}


# --- recall drills ---------------------------------------------------------------------------------------------------


def test_every_answer_of_a_recall_drill_stands_in_its_question(scripts: Any) -> None:
    recall = scripts("recall")
    words = recall.vocabulary(ROOT / "base" / "tokenizer.json")
    assert len(words) > 500 and len(set(words)) == len(words)
    found = recall.drills(300, 0, words)
    assert found == recall.drills(300, 0, words) and found != recall.drills(300, 1, words)
    answers = 0
    for line in found:
        messages = json.loads(line)["messages"]
        for asked, answer in zip(messages[::2], messages[1::2], strict=True):
            assert (asked["role"], answer["role"]) == ("user", "assistant")
            assert answer["content"] == "not here" or set(answer["content"].split()) <= set(
                re.findall(r"[\w]+", asked["content"])
            )
            answers += answer["content"] != "not here"
    assert answers > 1000


def test_lists_are_said_again_and_come_round(scripts: Any) -> None:
    recall, words = scripts("recall"), ["a", "b", "c"]
    for seed in range(20):
        asked, answer = recall.cycle(random.Random(seed), words * 3)
        one = asked.split(": ")[1].split()
        assert answer.split() == one * (36 // len(one))
        asked, answer = recall.repeat(random.Random(seed), words * 5)
        assert asked.endswith(f": {answer}")


def test_what_is_to_be_found_stands_once_in_the_list_and_shares_both_attributes(scripts: Any) -> None:
    recall = scripts("recall")
    words, shares = recall.vocabulary(ROOT / "base" / "tokenizer.json"), 0
    for seed in range(200):
        asked, answer = recall.find(random.Random(seed), words)
        wanted = re.findall(r"(?:Find|Where is) the (\w+) (\w+)[.?]", asked)
        seen = re.findall(r"a (\w+) (\w+) (\d[\w ]*)[;.]", asked)
        assert [(one, kind, way) for one, kind, way in seen if (one, kind) in wanted] == [(*wanted[0], answer)]
        shares += all(sum(thing[i] == wanted[0][i] for thing in seen) > 1 for i in (0, 1))
    assert shares > 60  # neither attribute tells alone


# --- initial weights -------------------------------------------------------------------------------------------------


def test_initial_weights_copy_what_stood_after_an_earlier_occurrence(scripts: Any) -> None:
    model = scripts("start").build().eval()
    torch.manual_seed(1)
    once = torch.randint(300, 3000, (4, 150))
    twice = torch.cat([once, once], dim=1)
    with torch.no_grad():
        said = model(twice).logits[:, 150:-1].argmax(-1)
        plain = Qwen3ForCausalLM(model.config).eval()(twice).logits[:, 150:-1].argmax(-1)
    right = [(found == twice[:, 151:]).float().mean().item() for found in (said, plain)]
    assert right[0] > 0.7 and right[1] < 0.05


# --- name ------------------------------------------------------------------------------------------------------------


def test_a_recipe_may_call_it_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Pretrained(path="base").path == str(model_files.BASE_FOLDER)
    assert Pretrained(path="./base").path == "./base"
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    assert Pretrained(path="base").path == str(tmp_path / "base"), "a model of one's own comes first"


def test_where_it_is_absent_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_files, "BASE_FOLDER", tmp_path / "shipped" / "base")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        Pretrained(path="base").build(0)
    assert "rlhf train base/pretrain" in caught.value.hint and "wheel" in caught.value.hint


def test_what_comes_along_is_small_and_says_what_it_is() -> None:
    files = [path for path in (ROOT / "base").iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 16e6
    card, weights = (ROOT / "base" / "README.md").read_text("utf-8"), ROOT / "base" / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest()[:16] in card, "the card is of other weights"
    assert (model_files.BASE_FOLDER / "model.safetensors").samefile(weights)


@pytest.mark.parametrize(
    ("read", "right"),
    [
        ("Your task is to do exactly what Simon says.\n\nSimon says, 'smell banana'.", "smell banana"),
        ("Tower. Ways: north, west. The key is west.", "go west"),
    ],
)
def test_it_copies_what_it_reads_untrained(read: str, right: str) -> None:
    policy = Pretrained(path="base").build(0)
    asked = [{"role": "user", "content": read}]
    prompt = policy.tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    [said] = policy.model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)
    assert policy.tokenizer.decode(said[prompt.shape[1] :], skip_special_tokens=True) == right


def test_its_recipe_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    [stage] = load("base/pretrain").stages
    assert stage.checkpoint_every and stage.data.path.name == "corpus.jsonl"


def test_a_number_is_read_digit_by_digit_where_that_is_asked_for() -> None:
    from rlhf.training.policy.tokenizer import train_tokenizer

    texts = ["12 12 12 and 12 again"] * 20
    together, apart = (train_tokenizer(texts, vocab_size=300, max_context=64, split_digits=s) for s in (False, True))
    assert len(together.encode("12")) == 1 and len(apart.encode("12")) == 2
    assert apart.decode(apart.encode("12 and 12")) == "12 and 12"


# --- table -----------------------------------------------------------------------------------------------------------


def row(proof: Any, arm: str, seed: int = 0, success: float = 0.0, width: float = 0.05, each: int | None = 20) -> Any:
    values = {"low": success - width, "high": success + width, "score": success, "parts": {}, "seconds": 1.0}
    return proof.Row(
        suite="keyhole", arm=arm, seed=seed, each=each, n=40, success=success, commit="c", base="", at="", **values
    )


def test_what_is_measured_is_not_measured_again_but_with_more_tasks_or_another_base(
    scripts: Any, tmp_path: Path
) -> None:
    proof = scripts("proof")
    asked = Namespace(suites=["keyhole"], arms=["random", "rl"], seeds=[0, 1], n=20)
    rows = [row(proof, "random"), row(proof, "rl", 1)]
    proof.write(tmp_path / "rows.json", rows)
    assert proof.read(tmp_path / "rows.json") == rows
    assert list(proof.left(asked, rows)) == [("keyhole", "rl", 0)]
    other = [*rows[:1], replace(rows[1], base="of another")]
    assert list(proof.left(asked, other)) == [("keyhole", "rl", 0), ("keyhole", "rl", 1)]
    asked.n = None
    assert list(proof.left(asked, rows)) == [("keyhole", "random", 0), ("keyhole", "rl", 0), ("keyhole", "rl", 1)]


@pytest.mark.parametrize(
    ("successes", "said"),
    [
        ((0.6, 0.7, 0.8), "yes, 3 of 3 seeds"),
        ((0.6, 0.7, 0.35), "no, 2 of 3 seeds"),
        ((0.9, 0.9), "no, 2 of 2 seeds"),
    ],
)
def test_learnt_is_above_chance_and_above_the_base_with_intervals_apart(
    scripts: Any, successes: tuple[float, ...], said: str
) -> None:
    proof = scripts("proof")
    rows = [row(proof, "random", success=0.1), row(proof, "untrained", success=0.3)]
    rows += [row(proof, "rl", seed, one) for seed, one in enumerate(successes)]
    assert f"| {said} |" in proof.table(rows)
    assert "not measured" in proof.table(rows[:2]) and "yes" not in proof.table(rows[:2])


def test_a_suite_is_shown_by_one_edition_of_the_base(scripts: Any) -> None:
    proof = scripts("proof")
    rows = [row(proof, "random"), replace(row(proof, "untrained"), base="old"), replace(row(proof, "rl"), base="old")]
    assert {one.suite for one in proof.of_newest_base(rows, "new")} == {"keyhole †"}
    rows.append(replace(row(proof, "untrained", success=0.5), base="new"))
    found = proof.of_newest_base(rows, "new")
    assert [(one.suite, one.arm, one.base) for one in found] == [
        ("keyhole", "random", ""),
        ("keyhole", "untrained", "new"),
    ]


@pytest.mark.parametrize("name", ["keyhole", "countdown", "tools"])
@pytest.mark.parametrize("arm", ["untrained", "imitated", "rl"])
def test_every_arm_is_a_recipe(scripts: Any, name: str, arm: str) -> None:
    proof = scripts("proof")
    values = proof.recipe_of(load_suite(name), arm, 3)
    try:
        found = recipe_of(values, name="proof", base=ROOT)
    except RecipeError as error:
        pytest.fail(str(error))
    assert found.seed == 3 and found.policy.path.endswith("base")
