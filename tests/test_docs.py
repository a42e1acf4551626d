"""The pages say what is: their code runs, their recipes load, their tables are those of the code, their links lead."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

import rlhf
from rlhf.catalog import CATALOG
from rlhf.cli import app
from rlhf.commands.new import texts_of
from rlhf.evaluation.store import read_trajectories
from rlhf.losses.regularized import Regularized
from rlhf.recipe import load
from rlhf.recipe.builder import build_part
from rlhf.recipe.places import KEYS
from rlhf.recipe.text import parse
from rlhf.sinks import read_metrics
from tests.combinations import ELSEWHERE

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
ALGORITHMS = DOCS / "algorithms"
PAGES = [README, *sorted(DOCS.glob("**/*.md"))]
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"# ([\w-]+\.(?:py|yaml))\n")
NEW = re.compile(r"rlhf new (reward|environment|agent) ([a-z]\w*)")
CHECKED = re.compile(r"`?(rlhf check (?:environment|reward|agent|recipe) [^`\n]*)")


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in FENCED.findall(page.read_text(encoding="utf-8")) if found == language]


def files_of(page: Path) -> dict[str, str]:
    """The code blocks of a page whose first line is the name of a file."""
    found = [text for language in ("python", "yaml") for text in blocks(page, language)]
    return {match[1]: text for text in found if (match := NAMED.match(text))}


def written(page: Path, folder: Path) -> Path:
    """The files of a page, and those that its `rlhf new` commands write, in a folder."""
    folder.mkdir(exist_ok=True)
    for part, name in NEW.findall(page.read_text("utf-8")):
        for file, text in texts_of(part, name).items():
            (folder / file).write_text(text)
    for name, text in files_of(page).items():
        (folder / name).write_text(text)
    return folder


def checks() -> list[tuple[Path, str]]:
    """Each `rlhf check ...` that a page shows for a file of its own or for a part that comes along."""
    found = [(page, command.strip()) for page in PAGES for command in CHECKED.findall(page.read_text("utf-8"))]
    return sorted({(page, command) for page, command in found if not re.search(r"[A-Z]{2,}|\|", command)})


@pytest.mark.parametrize(("page", "command"), checks(), ids=lambda value: getattr(value, "stem", value))
def test_a_check_that_a_page_shows_passes(
    page: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written(page, tmp_path / "side_by_side"))
    done = CliRunner().invoke(app, shlex.split(command.partition("#")[0])[1:])
    assert done.exit_code == 0, done.output


def test_every_part_of_the_pages_is_checked() -> None:
    commands = " ".join(command for _, command in checks())
    parts = "my_env.py my_reward.py maze.py wandering.py answers.py deliberate.py maze.yaml prices.py actions.py"
    for name in parts.split():
        assert name in commands


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_names_that_the_code_of_a_page_imports_exist(page: Path) -> None:
    ours = ("rlhf", "environments", "agents", "rewards")
    for node in (node for text in blocks(page, "python") for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in ours:
            exec(ast.unparse(node), {})


def test_a_reward_takes_ten_lines_and_an_environment_thirty() -> None:
    files = files_of(README)
    for name, most in (("my_reward.py", 10), ("my_env.py", 30)):
        lines = NAMED.sub("", files[name], count=1).strip().splitlines()
        assert len([line for line in lines if line.strip()]) <= most


def test_what_keeps_runs_as_often_as_it_is_run(tmp_path: Path) -> None:
    folder = written(DOCS / "stores.md", tmp_path / "kept")
    for _ in range(2):
        done = subprocess.run([sys.executable, "keep.py"], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_questions_and_answers_of_the_page_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "evaluation.md"
    monkeypatch.chdir(written(page, tmp_path / "side_by_side"))
    [suite] = [text for text in blocks(page, "yaml") if "kind: dataset" in text]
    Path("sums.yaml").write_text(suite)
    Path("questions.jsonl").write_text('{"question": "17 + 39?", "answer": "56"}\n{"question": "2?", "answer": "2"}\n')
    Path("said.jsonl").write_text('{"question": "17 + 39?", "said": "It is 56"}\n{"question": "2?", "said": "3"}\n')
    done = CliRunner().invoke(app, ["evaluate", "./replay.py:Replay", "--suite", "./sums.yaml", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout.splitlines()[-1])["success"] == 0.5, done.output


def test_the_parts_of_a_page_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written(DOCS / "plugins.md", tmp_path / "side_by_side"))
    assert CliRunner().invoke(app, ["check", "environment", "./lake.py:Lake"]).exit_code == 0
    small = ["limits.max_turns=3", "limits.max_tokens=4", "evaluation.n_tasks=2", "policy.hidden_size=32"]
    short = ["steps=1", "tasks_per_step=2", "group_size=3", "filters.drop_zero_advantage=false"]
    command = ["train", "maze.yaml", *small, *(f"stages.0.{text}" for text in short), "--out", "run", "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["n_episodes"] == 6
    [line] = [line for line in read_metrics(Path("run/metrics.jsonl")) if "custom/ratio" in line.values]
    assert line.values["custom/ratio"] == pytest.approx(1.0, abs=1e-4)  # one update: the policy has not moved
    for record in read_trajectories(Path("run/trajectories"), phase="train"):
        assert record.advantages is not None
        ranks = {number for row in record.advantages for number in row}
        assert len(ranks) == 1 and ranks <= {-1.0, -0.5, 0.0, 0.5, 1.0}  # of three attempts, with ties
        assert all(len(turn.generations) == 2 for turn in record.trajectory.turns)  # takes stock, then acts


@pytest.mark.parametrize(
    ("page", "name"),
    [(page, name) for page in PAGES for name in files_of(page) if name.endswith(".yaml")],
    ids=lambda value: getattr(value, "stem", value),
)
def test_a_recipe_of_a_page_loads(page: Path, name: str, tmp_path: Path) -> None:
    folder = written(page, tmp_path / "side_by_side")
    values = parse((folder / name).read_text(), name)
    if "kind" in values:  # one stage
        build_part("stage", values, "stages[0]", base=folder)
    else:
        load(folder / name)


def test_overrides_that_the_readme_shows_are_fine() -> None:
    [line] = [line for line in README.read_text("utf-8").splitlines() if line.startswith("    rlhf train quickstart ")]
    recipe = load("quickstart", shlex.split(line)[3:])
    assert recipe.seed == 1 and recipe.stages[1].steps == 60


# --- what is written into the pages ----------------------------------------------------------------------------------


@cache
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe_reference", DOCS / "recipe_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recipe_reference_has_every_key_as_it_is() -> None:
    text = (DOCS / "recipe_reference.md").read_text("utf-8")
    assert reference().reference() == text, "run python docs/recipe_reference.py"
    for key in KEYS:
        assert f"| `{key}` |" in text + (DOCS / "recipes.md").read_text("utf-8")


def test_the_page_of_the_python_api_is_that_of_the_docstrings() -> None:
    text = (DOCS / "python_api.md").read_text("utf-8")
    assert reference().python_api() == text, "run python docs/recipe_reference.py"
    offered = [name for name in rlhf.__all__ if not name.startswith("__")]
    assert sorted(re.findall(r"^## (\w+)$", text, re.MULTILINE)) == sorted(offered)
    for name in ("train", "evaluate", "compare", "load"):
        part = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for argument in inspect.signature(getattr(rlhf, name)).parameters:
            assert f"| `{argument}` |" in part


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (None, "no docstring"),
        ("Does.\n\nArgs:\n    one: first.", "differ in two"),
        ("Does.\n\nArgs:\n    one: first.\n    two: second.\n    three: third.", "differ in three"),
    ],
)
def test_an_argument_that_a_docstring_leaves_out_is_refused(
    monkeypatch: pytest.MonkeyPatch, told: str | None, says: str
) -> None:
    def load(one: int, two: int = 2) -> None:
        return None

    load.__doc__ = told
    monkeypatch.setattr(rlhf, "load", load, raising=False)
    with pytest.raises(SystemExit, match=says):
        reference().python_api()


def test_the_readme_has_the_quickstart_as_it_is() -> None:
    text, recipe = README.read_text("utf-8"), (ROOT / "recipes" / "quickstart.yaml").read_text("utf-8")
    assert recipe.rstrip() + "\n" in blocks(README, "yaml"), "run python docs/recipe_reference.py"
    assert reference().readme_with(text, recipe) == text


def test_the_readme_shows_the_last_line_of_a_run() -> None:
    _, shown, _ = README.read_text("utf-8").split("<!-- quickstart-result -->")
    values = json.loads(shown.strip().removeprefix("```json").removesuffix("```"))
    wanted = {"success_before", "success_after", "interval_after", "train_s", "n_episodes", "report"}
    assert wanted <= set(values) and values["name"] == "quickstart"


def test_the_batch_arithmetic_of_the_page_is_that_of_its_recipe(tmp_path: Path) -> None:
    from rlhf.estimate.arithmetic import arithmetic

    # The example of the table: a recipe of the page, with two minibatches.
    recipe = load(written(DOCS / "recipes.md", tmp_path / "page") / "gotoobj.yaml", ["stages.1.minibatches=2"])
    supervised, improved = arithmetic(recipe)["stages"]
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \|$", (DOCS / "recipes.md").read_text("utf-8"), re.MULTILINE)
    shown = [int(row.rpartition("=")[2].replace(",", "")) for row in rows if re.search(r"\d$", row.strip())][:8]
    names = ("episodes_per_step", "updates_per_step", "episodes_per_update", "n_episodes", "max_turns_per_step")
    more = ("max_sampled_tokens_per_step", "max_samples_per_step")
    assert shown == [*(improved[name] for name in names + more), supervised["n_updates"]]


# --- algorithms -------------------------------------------------------------------------------------------------------

#: The parts of a page, in order; the idea stands above the first.
PARTS = ("Formula", "Source", "Differences", "Keys", "Not for", "Recipe", "Measured")
#: Pages that several entries of the catalogue share, or that describe a key without kinds.
SHARED = ("corrections", "filters", "kl", "reductions", "selections")
ONE_EACH = [(section, kind) for section in ("advantage", "loss") for kind in CATALOG[section]]


def parts_of(name: str) -> dict[str, str]:
    """The text below each heading of an algorithm's page; that of the title is the idea."""
    page = re.sub(r"\A---\n.*?\n---\n", "", (ALGORITHMS / f"{name}.md").read_text("utf-8"), flags=re.DOTALL)
    title, *rest = re.split(r"^## (.+)\n", page, flags=re.MULTILINE)
    return {"": title} | dict(zip(rest[::2], rest[1::2], strict=True))


@pytest.mark.parametrize("name", [*(kind for _, kind in ONE_EACH), *SHARED])
def test_the_page_of_an_algorithm_has_all_its_parts(name: str) -> None:
    parts = parts_of(name)
    assert tuple(parts) == ("", *PARTS)
    assert re.match(r"# \S.*\n\n[A-Z]", parts[""]) and parts[""].rstrip().endswith((".", "?"))
    assert re.search(r"^    \S", parts["Formula"], re.MULTILINE) and re.search(r"\d", parts["Formula"])
    assert re.search(r"\(https?://\S+\)", parts["Source"]) and re.search(r"`(rlhf|rewards)/\S+\.py`", parts["Source"])
    assert all(parts[part].strip() for part in PARTS)
    assert re.search(r"```yaml\n# [\w-]+\.yaml\n", parts["Recipe"])


@pytest.mark.parametrize(("section", "kind"), ONE_EACH)
def test_the_page_of_an_algorithm_has_its_keys_and_uses_it(section: str, kind: str) -> None:
    module, _, name = CATALOG[section][kind].target.partition(":")
    keys = reference().keys_of(getattr(importlib.import_module(module), name))
    shared = set(reference().keys_of(Regularized)) if section == "loss" else set()
    wanted = {
        f"`{key.name}`, which must be given"
        if key.make_default is None
        else f"`{key.name}: {reference()._default(key)}`"
        for key in keys.values()
        if key.name not in shared
    }
    parts = parts_of(kind)
    assert wanted == set(re.findall(r"`\w+: [^`]+`|`\w+`, which must be given", parts["Keys"].replace("\n", " ")))
    assert re.search(rf"{section}: {{{{?kind: {kind}\b", parts["Recipe"])
    assert CATALOG[section][kind].target.partition(":")[0].replace(".", "/") + ".py" in parts["Source"]


@pytest.mark.parametrize("kind", CATALOG["correction"])
def test_the_page_of_corrections_has_each(kind: str) -> None:
    assert f"| `{kind}`" in parts_of("corrections")["Formula"] and f"- `{kind}`:" in parts_of("corrections")["Keys"]


@pytest.mark.parametrize(
    ("section", "kind"),
    [(section, kind) for section in ("sampler", "selection", "rollout") for kind in CATALOG[section]],
)
def test_the_table_of_algorithms_leads_to_samplers_selections_and_groupings(section: str, kind: str) -> None:
    rows = [row for row in (ALGORITHMS / "index.md").read_text("utf-8").splitlines() if row.startswith("|")]
    linked = {link for row in rows if f"`{kind}`" in row for link in re.findall(r"\]\(([\w./]+)", row)}
    told = re.compile(rf"`{kind}`|{section}: {{kind: {kind}}}")
    assert any(told.search((ALGORITHMS / link).read_text("utf-8")) for link in linked)


def test_the_guide_has_the_rows_of_pages_that_describe_their_place() -> None:
    text = (ALGORITHMS / "index.md").read_text("utf-8")
    assert reference().guide_with(text) == text, "run python docs/recipe_reference.py"


def test_the_guides_name_every_estimator_and_every_loss() -> None:
    text = (ALGORITHMS / "index.md").read_text("utf-8")
    _, credit, loss, papers, *_ = re.split(r"^## (?:Which credit|Which loss|From paper).*\n", text, flags=re.MULTILINE)
    for section, kind in ONE_EACH:
        assert f"({kind}.md)" in (credit if section == "advantage" else loss), kind
        assert f"({kind}.md)" in papers, kind


def test_every_algorithm_is_measured_and_its_page_has_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    algorithms = importlib.import_module("algorithms")
    measured = {page for arm in algorithms.arms() for page in arm.pages}
    # What compares by seats, reviews or stories is measured where a run has them.
    assert measured | {*ELSEWHERE} == {kind for _, kind in ONE_EACH} | {"kl", "reductions", "filters"}
    for name in (*measured, "measured"):
        before, begin, rest = (ALGORITHMS / f"{name}.md").read_text("utf-8").partition(algorithms.MARKS[0])
        assert before and begin and rest.count(algorithms.MARKS[1]) == 1
    for arm in algorithms.arms():
        stage = {**algorithms.POLICY_GRADIENT, **arm.stage}
        if arm.label == "kdrl":
            stage["loss"] = {**stage["loss"], "teacher": "."}
        build_part("stage", json.loads(json.dumps(stage)), "stages[0]", base=ROOT)


# --- links -----------------------------------------------------------------------------------------------------------


def test_the_links_of_the_readme_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README.read_text("utf-8")):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_files_that_the_pages_name_exist() -> None:
    named = re.compile(r"`((?:rlhf|environments|agents|rewards|benchmarks|recipes)/[\w/.]+\.\w+)`")
    for page in PAGES:
        for name in named.findall(page.read_text("utf-8")):
            assert (ROOT / name).is_file(), f"{page.name}: {name}"


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed")
    # Not --quiet: mkdocs does not count what it does not print, and --strict has nothing to object to then.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_of_the_proof_is_that_of_its_rows(tmp_path: Path) -> None:
    page = tmp_path / "proof.md"
    page.write_text((DOCS / "proof.md").read_text())
    words = [ROOT / "benchmarks" / "proof.py", "--page", page, "--out", tmp_path]
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT, capture_output=True)
    assert page.read_text() == (DOCS / "proof.md").read_text(), "python benchmarks/proof.py --page docs/proof.md"
