"""The catalogue: every entry keeps its contract, and every way of naming a part works or says why not."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.catalog import CATALOG, PACKAGES_OF_EXTRA, Entry
from rlhf.errors import RecipeError, RlhfError
from rlhf.recipe.builder import build_part, plain_part
from rlhf.recipe.keys import keys_of
from rlhf.registry import kind_of, resolve
from rlhf.sections import DEFAULT_KIND, REQUIRED_MEMBERS
from tests import recipe_parts

ROOT = Path(__file__).resolve().parent.parent
ENTRIES = [
    pytest.param(section, kind, entry, id=f"{section}-{kind}")
    for section, table in CATALOG.items()
    for kind, entry in table.items()
]
#: Keys that an entry cannot do without.
#: Rewards that ask a model, which tests of all rewards cannot: they have tests of their own.
MODELS = (
    *("reward_model", "outcome_model", "process_model", "judge", "grade", "principles"),
    *("proxy_answer", "subgoals", "feedback"),
)
NEEDED = {
    ("policy", "pretrained"): {"path": "somewhere"},
    ("environment", "textworld_express"): {"game": "coin"},
    ("environment", "dataset"): {"path": "tests/environments/questions.jsonl"},
    ("environment", "worker_processes"): {"environment": {"kind": "keyhole"}},
    ("environment", "mixed"): {
        "parts": {name: {"environment": {"kind": "keyhole", "rows": rows}} for name, rows in (("a", 2), ("b", 3))}
    },
    ("reward", "of_part"): {"part": "a", "reward": {"kind": "outcome"}},
    ("environment", "mcp"): {"questions": "questions.jsonl", "command": ["server"]},
    ("environment", "openenv"): {"url": "http://127.0.0.1:1"},
    ("environment", "external"): {"environment": {"kind": "keyhole"}, "command": ["agent"]},
    ("environment", "graded"): {"levels": [{"kind": "textworld_express", "game": "coin"}] * 2},
    ("reward", "budgeted"): {"budgets": [8]},
    ("rollout", "budgets"): {"budgets": [8]},
    ("environment", "verdicts"): {"path": "tests/environments/compared.jsonl"},
    ("environment", "next_segment"): {"path": "LICENSE"},
    ("environment", "self_made"): {"path": "tests/environments/questions.jsonl"},
    ("environment", "conversations"): {"path": "tests/environments/conversations.jsonl"},
    ("reward", "reward_model"): {"path": "somewhere"},
    ("reward", "outcome_model"): {"path": "somewhere"},
    ("reward", "judge"): {"url": "http://127.0.0.1:8000", "model": "judge"},
    ("reward", "subgoals"): {"url": "http://127.0.0.1:8000", "model": "judge"},
    ("reward", "feedback"): {"url": "http://127.0.0.1:8000", "model": "judge"},
    ("reward", "proxy_answer"): {"url": "http://127.0.0.1:8000", "model": "judge"},
    ("reward", "grade"): {"url": "http://127.0.0.1:8000", "model": "judge"},
    ("reward", "principles"): {"path": "somewhere", "principles": ["it is short"]},
    ("reward", "process_model"): {"path": "somewhere"},
    ("reward", "overlong"): {"max_tokens": 100, "buffer": 20},
    ("reward", "subtask"): {"subtask": "file"},
    ("reward", "budget"): {"limit": 100},
    ("reward", "pattern"): {"pattern": "yes|no"},
    ("reward", "json_schema"): {"schema": {"type": "object"}},
    ("reward", "combine"): {"parts": {"solved": {"reward": {"kind": "outcome"}}}},
    ("reward", "ranked"): {"factors": [{"reward": {"kind": "outcome"}}, {"reward": {"kind": "turn_cost"}}]},
    ("extractor", "pattern"): {"patterns": [r"(?P<subject>\w+) (?P<relation>is) (?P<object>\w+)"]},
    ("advantage", "hrpo"): {"reward": "steps"},
    ("loss", "kdrl"): {"teacher": "somewhere"},
    ("engine", "guided"): {"tuned": "somewhere", "base": "somewhere"},
    ("advantage", "hicra"): {"grams": [[5, 3]], "plan_start_ids": [7]},
}


#: Environments that are a stranger's server; `test_mcp_tools.py`, `test_openenv.py` and `tests/gateway` start some.
SERVERS = ("mcp", "openenv", "external")


@pytest.mark.parametrize(("section", "kind", "entry"), ENTRIES)
def test_an_entry_names_a_frozen_documented_settings_class(section: str, kind: str, entry: Entry) -> None:
    cls = resolve(section, kind, base=ROOT)
    assert f"{cls.__module__}:{cls.__qualname__}" == entry.target
    assert cls.__doc__ and entry.doc and not entry.doc.endswith(".") and len(entry.doc) < 60
    assert cls.__dataclass_params__.frozen
    assert all(hasattr(cls, member) for member in REQUIRED_MEMBERS.get(section, ()))


@pytest.mark.parametrize(("section", "kind", "entry"), ENTRIES)
def test_an_entry_is_built_from_its_defaults_and_written_back(section: str, kind: str, entry: Entry) -> None:
    part = build_part(section, {"kind": kind, **NEEDED.get((section, kind), {})}, section, base=ROOT)
    values = plain_part(section, part)
    assert values["kind"] == kind == kind_of(section, part)
    assert set(values) == {"kind", *keys_of(type(part))}
    assert build_part(section, values, section, base=ROOT) == part


def test_extras_are_those_of_the_package() -> None:
    offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {entry.extra for table in CATALOG.values() for entry in table.values() if entry.extra}
    assert named == set(PACKAGES_OF_EXTRA) and named <= set(offered)
    assert all(kind in CATALOG[section] for section, kind in DEFAULT_KIND.items())


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    recipe_parts.write(tmp_path)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "angry.py").write_text("raise KeyError('no luck')\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "gym.py").write_text("import gymnasium\n\n\nclass Grid(gymnasium.Env):\n    pass\n")
    package = tmp_path / "strange_package_of_tests"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("from .rules import rule\n")
    (package / "rules.py").write_text("def rule(task, trajectory):\n    return 1.0\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
        del sys.modules[name]  # its folder is gone with the test


@pytest.mark.parametrize(
    ("section", "kind", "says"),
    [
        ("advantage", "gigppo", ["no advantage is called 'gigppo'", "grpo, dr_grpo", "did you mean 'gigpo'?"]),
        ("loss", "ppo", ["did you mean 'ppo_clip'?"]),
        ("environment", "zork", ["textworld_express, babyai", "`rlhf recipes --kinds`"]),
        ("reward", "./nowhere.py:R", ["no such file", "nowhere.py"]),
        ("reward", "./parts.py:solvd", ["defines no 'solvd'", "did you mean 'solved'?"]),
        ("reward", "./empty.py:R", ["defines no 'R'", "name a class or function"]),
        ("reward", "./broken.py:R", ["broken.py", "SyntaxError"]),
        ("reward", "./angry.py:R", ["angry.py", "KeyError: 'no luck'"]),
        ("reward", "./parts.py:not_a_class", ["is a int", "a class or a function"]),
        ("agent", "./parts.py:solved", ["this is no agent", "a class"]),
        ("agent", "./parts.py:Echo", ["Echo lacks act", "docs/plugins.md"]),
        ("environment", "./gym.py:Grid", ["Grid lacks tasks, start", "docs/plugins.md#a-gymnasium-class"]),
        ("reward", "no_such_package_of_tests.a:R", ["no module is called 'no_such_package_of_tests'"]),
        ("reward", "strange_package_of_tests.other:R", ["no module is called 'strange_package_of_tests.other'"]),
    ],
)  # fmt: skip
def test_a_kind_that_leads_nowhere_says_so(base: Path, section: str, kind: str, says: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve(section, kind, base=base, where="here.kind")
    error = caught.value
    assert "here.kind" in error.where and all((error.what, error.got, error.hint))
    assert all(text in str(error) for text in says), str(error)


def test_a_file_that_failed_can_be_mended_and_tried_again(base: Path) -> None:
    with pytest.raises(RlhfError):
        resolve("reward", "./broken.py:f", base=base)
    (base / "broken.py").write_text("def f(task, trajectory):\n    return 2.0\n")
    assert resolve("reward", "./broken.py:f", base=base)(None, None) == 2.0


def test_a_package_beside_the_recipe_is_found(base: Path) -> None:
    rule = resolve("reward", "strange_package_of_tests.inner:rule", base=base)
    assert rule(None, None) == 1.0
    assert kind_of("reward", rule) == "strange_package_of_tests.rules:rule"


def test_a_module_beside_the_recipe_is_written_as_its_file_which_is_found_from_anywhere(base: Path) -> None:
    (base / "lone_rules_of_tests.py").write_text("def rule(task, trajectory):\n    return 1.0\n")
    (base / "lone_rewards_of_tests.py").write_text(
        "from lone_rules_of_tests import rule\n\ndef paid(task, trajectory):\n    return rule(task, trajectory)\n"
    )
    try:
        paid = resolve("reward", "lone_rewards_of_tests:paid", base=base)
        written = kind_of("reward", paid)
    finally:
        for name in ("lone_rules_of_tests", "lone_rewards_of_tests"):
            sys.modules.pop(name, None)  # its folder is gone with the test
    assert paid(None, None) == 1.0 and written == f"{base.resolve()}/lone_rewards_of_tests.py:paid"
    code = f"""
from pathlib import Path
from rlhf.registry import resolve
print(resolve("reward", {written!r}, base=Path("/"))(None, None))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "1.0\n"
    code = """
from pathlib import Path
from rlhf.registry import kind_of, resolve
print(kind_of("reward", resolve("reward", "lone_rewards_of_tests:paid", base=Path())))
"""  # as under a launcher, where the folder is on the path from the beginning
    done = subprocess.run([sys.executable, "-c", code], cwd=base, capture_output=True, text=True, check=True)
    assert done.stdout == f"{written}\n"


def test_files_do_not_share_a_module_that_lies_beside_both(tmp_path: Path) -> None:
    for name, worth in (("first", 1.0), ("second", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "common_rules_of_tests.py").write_text(f"WORTH = {worth}\n")
        (tmp_path / name / "mine.py").write_text(
            "def paid(task, trajectory):\n    from common_rules_of_tests import WORTH\n\n    return WORTH\n"
        )
    try:
        assert resolve("reward", "./mine.py:paid", base=tmp_path / "first")(None, None) == 1.0
        with pytest.raises(RecipeError, match="two modules are called 'common_rules_of_tests'") as refused:
            resolve("reward", "./mine.py:paid", base=tmp_path / "second")
    finally:
        sys.modules.pop("common_rules_of_tests", None)
    assert refused.value.expected == str(tmp_path / "second" / "common_rules_of_tests.py")
    assert resolve("reward", "./mine.py:paid", base=tmp_path / "first")(None, None) == 1.0


@pytest.mark.parametrize("inner", ["shared_rules_of_tests.py", "shared_rules_of_tests/__init__.py"])
def test_a_module_that_nobody_has_imported_yet_takes_a_name_too(inner: str, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (file := tmp_path / name / inner).parent.mkdir(parents=True)
        file.write_text(f"WORTH = '{name}'\n")
        (tmp_path / name / "mine.py").write_text(
            "import shared_rules_of_tests\ndef paid(task, trajectory): return 1.0\n"
            if name == "second"
            else "def paid(task, trajectory): return 1.0\n"
        )
    resolve("reward", "./mine.py:paid", base=tmp_path / "first")
    with pytest.raises(RecipeError, match="two modules are called 'shared_rules_of_tests'") as refused:
        resolve("reward", "./mine.py:paid", base=tmp_path / "second")
    assert refused.value.expected == str(tmp_path / "second" / inner)
    assert "shared_rules_of_tests" not in sys.modules


def test_a_module_beside_a_file_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked_rules_of_tests.py").write_text("WORTH = 3.0\n")
    (tmp_path / "linked" / "linked_rules_of_tests.py").symlink_to(tmp_path / "linked_rules_of_tests.py")
    (tmp_path / "linked" / "mine.py").write_text(
        "from linked_rules_of_tests import WORTH\ndef paid(task, trajectory): return WORTH\n"
    )
    try:
        assert resolve("reward", "./mine.py:paid", base=tmp_path / "linked")(None, None) == 3.0
    finally:
        sys.modules.pop("linked_rules_of_tests", None)


def test_a_file_is_looked_for_beside_the_recipe_first(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine.py").write_text("def f(task, trajectory):\n    return 3.0\n")
    (here / "parts.py").write_text("def solved(task, trajectory):\n    return 3.0\n")
    monkeypatch.chdir(here)
    assert resolve("reward", "./mine.py:f", base=base)(None, None) == 3.0
    assert resolve("reward", "./parts.py:solved", base=base).__module__ != "parts"
    assert resolve("reward", "./parts.py:Long", base=base).__doc__ is not None  # only the one beside the recipe has it


def test_one_file_is_one_module_and_its_objects_can_be_pickled(base: Path) -> None:
    first, second = (resolve("environment", kind, base=base) for kind in ("./parts.py:Echo", f"{base}/parts.py:Echo"))
    assert first is second
    assert pickle.loads(pickle.dumps(first(n_tasks=2))) == first(n_tasks=2)
    assert kind_of("environment", first()) == f"{base.resolve()}/parts.py:Echo"


@pytest.mark.parametrize(
    ("kind", "package", "extra"), [("textworld_express", "textworld_express", "twx"), ("babyai", "minigrid", "babyai")]
)
def test_a_missing_extra_is_named(kind: str, package: str, extra: str) -> None:
    # None in sys.modules is how Python itself marks a module that must not be imported.
    code = f"""
import sys
sys.modules[{package!r}] = None
from pathlib import Path
from rlhf.registry import resolve
from rlhf.errors import MissingPackageError
try:
    resolve("environment", {kind!r}, base=Path())
except MissingPackageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"pip install 'rlhf-agents[{extra}]'" in done.stdout and f"no module named {package}" in done.stdout


def test_a_reward_is_written_under_the_name_it_was_found_by(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        "import functools\n"
        "def judge(answer, reference):\n    return 1.0\n"
        "def strictly(f):\n    @functools.wraps(f)\n    def g(answer, reference):\n        return 0.0\n    return g\n"
        "strict = strictly(judge)\nright = lambda answer, reference: 0.5\n"
    )
    for name, value in (("judge", 1.0), ("strict", 0.0), ("right", 0.5)):
        written = kind_of("reward", resolve("reward", f"./made.py:{name}", base=tmp_path))
        assert written == f"{tmp_path.resolve()}/made.py:{name}"
        assert resolve("reward", written, base=ROOT)("4", "4") == value


def test_a_module_that_ends_the_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\ndef judge(answer, reference):\n    return 1.0\nsys.exit(0)\n")
    with pytest.raises(RecipeError, match="exits the program") as caught:
        resolve("reward", "./script.py:judge", base=tmp_path)
    assert "__main__" in caught.value.hint
