"""The suites that come along: fixed by hash, and one for every environment of the catalogue."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from typer.testing import CliRunner

import rlhf
from environments.base import can_demonstrate, properties_of
from rlhf.catalog import CATALOG
from rlhf.cli import app
from rlhf.errors import RecipeError
from rlhf.recipe import load
from rlhf.recipe.suites import Suite, list_suites, load_suite
from rlhf.registry import kind_of
from rlhf.training.policy.tokenizer import train_tokenizer
from rlhf.training.stages.demonstrations import play
from tests.commands import run
from tests.test_catalog import SERVERS
from tests.training import runs

ROOT = Path(__file__).resolve().parent.parent
NAMES = sorted(path.stem for path in (ROOT / "suites").glob("*.yaml"))


@pytest.fixture(scope="module")
def suites() -> dict[str, Suite]:
    return {name: load_suite(name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_its_tasks_are_those_it_was_made_with(name: str, suites: dict[str, Suite]) -> None:
    suite = suites[name]
    assert all(part.tasks.sha256 and part.tasks.split == "test" for part in suite.parts)
    found = suite.tasks()  # raises for another hash, and for a task in two parts
    assert all(len(found[part.name]) == part.tasks.n for part in suite.parts)


def test_a_task_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("tasks: {ids: [ID, ID]}\nparts: {small: {environment: {kind: keyhole}}}\n")
    own = load_suite(str(tmp_path / "own.yaml"))
    [part] = own.parts
    first = part.environment.tasks("test")[0].id
    twice = replace(own, parts=(replace(part, tasks=replace(part.tasks, ids=(first, first))),))
    with pytest.raises(RecipeError, match="a task is listed twice") as refused:
        twice.tasks()
    assert (refused.value.where, refused.value.got) == ("parts.small.tasks", first)


@pytest.mark.parametrize(
    "override",
    [
        "environment.n_turns=3",
        "rewards.words.weight=2",
        "limits.max_turns=3",
        "limits.max_retries=0",
        "limits={max_turns: 3, max_tokens: 8}",
        "evaluation.temperature=0",
    ],
)
def test_what_a_suite_says_itself_is_not_overridden(override: str, tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, [{"kind": "policy_gradient", "steps": 1}])
    refused = run("evaluate", recipe, "--suite", "quick", override)
    assert refused.exit_code == 2 and "a suite has its own tasks, rewards and limits" in refused.stderr
    own = run("evaluate", recipe, "--suite", "quick", "limits={max_tokens: 3}", "agent.system=Be brief.", "seed=1")
    assert "error policy.kind: there are no weights" in own.stderr


def test_parts_of_a_program_are_given_beside_a_suite_too(tmp_path: Path) -> None:
    def local(answer: str, reference: str) -> float:
        return float(answer == reference)

    given = {"right": {"kind": local, "weight": 0.5}}
    recipe = runs.write(tmp_path, [{"kind": "policy_gradient", "steps": 1}])
    with pytest.raises(RecipeError, match="there are no weights"):
        rlhf.evaluate(recipe, suite="quick", rewards=given, progress=False)


#: Kinds that need others, files of one's own, or a browser.
WITHOUT_SUITE = {*SERVERS, "mixed", "dataset", "next_segment", "verdicts", "self_made", "conversations", "miniwob"}


@pytest.mark.parametrize("kind", sorted({*CATALOG["environment"]} - WITHOUT_SUITE))
def test_every_environment_of_the_catalogue_has_a_suite(kind: str, suites: dict[str, Suite]) -> None:
    parts = [part.environment for suite in suites.values() for part in suite.parts]
    parts += [one.environment for one in parts if kind_of("environment", one) == "worker_processes"]  # type: ignore[attr-defined]
    assert any(kind_of("environment", part) == kind for part in parts)


@pytest.mark.parametrize("name", NAMES)
def test_an_episode_ends_where_its_environment_ends_it(name: str, suites: dict[str, Suite]) -> None:
    """A limit on turns below the environment's own would cut what an oracle needs."""
    for part in suites[name].parts:
        steps = part.environment.max_steps  # type: ignore[attr-defined]
        assert steps is not None and steps <= part.limits.max_turns


def test_the_page_of_benchmarks_describes_every_suite() -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in page] == []


def test_the_suite_that_the_page_shows_is_one(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    shown, *_ = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "mine.yaml").write_text(shown)
    suite = load_suite(str(tmp_path / "mine.yaml"))
    assert {name: len(tasks) for name, tasks in suite.tasks().items()} == {"small": 100, "large": 50}
    assert (suite.name, suite.attempts, [p.limits.max_turns for p in suite.parts]) == ("houses", 4, [16, 24])


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """`benchmarks/suites.py`, which makes the tables of the page."""
    spec = importlib.util.spec_from_file_location("suites_benchmark", ROOT / "benchmarks" / "suites.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "benchmarks"))
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_can_be_trained_for_it(
    name: str, suites: dict[str, Suite], tables: ModuleType, tmp_path: Path
) -> None:
    suite = suites[name]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tables.recipe_of(suite)))
    environments = [part.environment for part in suite.parts]
    trainable = all(can_demonstrate(one) and "train" in properties_of(one).splits for one in environments)
    with nullcontext() if trainable else pytest.raises(RecipeError, match=r"cannot demonstrate|no such split"):
        recipe = load(str(path))
        assert {stage.split for stage in recipe.stages} == {"train"}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "name", ["collaborate", "countdown", "knights_and_knaves", "search_qa", "shop", "text_to_sql", "tools", "wordle"]
)
def test_a_reply_of_the_small_model_holds_what_it_is_shown(
    name: str, suites: dict[str, Suite], tables: ModuleType, tmp_path: Path
) -> None:
    """In tokens of a tokenizer made as its run makes one; the token that ends a reply is one more."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tables.recipe_of(suites[name])))
    recipe = load(str(path))
    tasks = list(islice(recipe.environment.tasks("train"), 60))
    shown = asyncio.run(play(recipe.environment, tasks, random_share=0, unsolved_share=0, limits=recipe.limits, seed=0))
    words = [text for one in shown for text in one.texts]
    tokenizer = train_tokenizer(words, vocab_size=tables.SMALL["vocab_size"], max_context=tables.SMALL["max_context"])
    said = [turn.action.text for one in shown for turn in one.trajectory.turns]
    assert len(said) >= 60 and max(len(tokenizer(text)["input_ids"]) for text in said) < recipe.limits.max_tokens


# 8,000 turns: 1,000 episodes of 8, 400 of 20; no more than 1,000 of 1 (8,000) and no fewer than 200 of 100 (80).
@pytest.mark.parametrize(
    ("turns", "n", "steps"), [(1, 1000, 5), (8, 1000, 5), (16, 500, 5), (20, 400, 2), (100, 200, 2)]
)
def test_a_small_model_sees_few_long_episodes_and_many_short_ones(
    turns: int, n: int, steps: int, tables: ModuleType
) -> None:
    supervised, gradient = tables.stages_of(turns, 0.1)
    assert (supervised["n_demonstrations"], gradient["steps"]) == (n, steps)


@pytest.mark.parametrize(("name", "share"), [("keyhole", 0.1), ("search_qa", 0.0), ("sat", 0.3)])
def test_mistakes_are_demonstrated_where_actions_are_chosen_or_tried_again(
    name: str, share: float, suites: dict[str, Suite], tables: ModuleType
) -> None:
    assert tables.recipe_of(suites[name])["stages"][0]["random_share"] == share


def test_rows_of_the_page_stay_where_nothing_newer_is_there(tables: ModuleType, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "suite_baselines.md").read_text(encoding="utf-8")
    shown = page.partition(tables.BEGIN)[2].partition(tables.END)[0]
    assert {"random", "oracle"} <= set(tables.written(page)["keyhole (400 tasks)"])
    assert tables.tables(NAMES, tmp_path, page) == shown.lstrip("\n")
    assert tables.tables(NAMES, tmp_path) == "\n"


def test_they_are_listed() -> None:
    shown = CliRunner().invoke(app, ["recipes", "--suites"])
    assert shown.exit_code == 0 and all(one.name in shown.stdout and one.doc for one in list_suites())
