"""What is imported when: layers, no torch in the light packages, a quick command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from importlinter.api import read_configuration
from importlinter.application.use_cases import lint_imports

ROOT = Path(__file__).resolve().parent.parent


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_go_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert read_configuration(config_filename="pyproject.toml")["contracts_options"]
    assert lint_imports(config_filename="pyproject.toml", cache_dir=None), "run `lint-imports` for the broken contract"


#: Modules below these packages; an optional package may be imported inside their functions only.
LIGHT = ["rlhf.data", "environments", "rewards", "agents"]


@pytest.mark.parametrize("package", LIGHT)
def test_light_packages_load_no_torch(package: str) -> None:
    loaded = python(f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(len(names), sorted({{"torch", "transformers", "gymnasium", "textworld_express"}} & set(sys.modules)))
""")
    n_modules, heavy = loaded.split(maxsplit=1)
    assert int(n_modules) >= 1 and heavy.strip() == "[]"


def test_importing_the_package_loads_the_standard_library_at_most() -> None:
    loaded = python("import sys; before = set(sys.modules); import rlhf; print(*(set(sys.modules) - before))").split()
    others = {name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names}
    assert others == {"rlhf"}


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["recipes", "--kinds"]])
def test_the_command_line_answers_without_torch(arguments: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["rlhf", *{arguments!r}]
from rlhf.cli import main
try:
    main()
finally:
    print("heavy:", sorted({{"torch", "transformers", "numpy", "omegaconf"}} & set(sys.modules)))
"""
    assert python(code).strip().endswith("heavy: []")


#: Says on standard output when the code of models begins to load, which takes seconds.
TELLING = """
import sys

class Telling:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            print("<loads transformers>", flush=True)

sys.meta_path.insert(0, Telling())
"""


@pytest.mark.parametrize("arguments", [["random"], ["random", "--suite", "quik"], ["oracle", "a=1", "--suite", "sat"]])
def test_what_cannot_be_evaluated_is_told_without_torch(arguments: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["rlhf", "evaluate", *{arguments!r}]
from rlhf.cli import main
try:
    main()
except SystemExit as left:
    print(left.code, sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    assert python(code).strip() == "2 []"


def test_a_recipe_is_checked_without_the_code_of_models() -> None:
    code = "sys.argv = ['rlhf', 'check', 'recipe', 'quickstart']\nfrom rlhf.cli import main\nmain()"
    told = python(TELLING + code)
    assert "environment (babyai)" in told and "<loads transformers>" not in told


def test_a_recipe_is_shown_before_the_code_of_models_loads() -> None:
    told = python(TELLING + "sys.argv = ['rlhf', 'show', 'quickstart']\nfrom rlhf.cli import main\nmain()")
    shown, _, figures = told.partition("<loads transformers>")
    assert "name: quickstart" in shown and "parameters" in figures
