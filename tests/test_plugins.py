"""Kinds of installed packages: found by name, in conflict, broken; with packages that pip has installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.credit.estimator import AdvantageEstimator
from rlhf.errors import MissingPackageError, RecipeError
from rlhf.recipe import dump, load_values
from rlhf.registry import resolve
from tests.commands import run

PACKAGES = {
    "corridors": (
        """
        [project.entry-points."rlhf.environments"]
        corridor = "corridors:Corridor"
        [project.entry-points."rlhf.rewards"]
        brief = "corridors:brief"
        [project.entry-points."rlhf.estimators"]
        centred = "corridors:Centred"
        [project.entry-points."rlhf.losses"]
        ppo_clip = "corridors:Hidden"
        lost = "corridors:Lost"
        """,
        """
from dataclasses import dataclass
from environments.base import Properties, StepResult
from rlhf.credit.grpo import GRPO
from rlhf.data import Task

@dataclass(frozen=True)
class Corridor:
    length: int = 3
    properties = Properties(deterministic=True, replayable=True, inline=True)
    def tasks(self, split): return [Task(id=f"corridor/{split}/{i}") for i in range(4)]
    def start(self, task): return Episode()

class Episode:
    opening = StepResult("A corridor.")
    async def step(self, action): return StepResult("", terminated=True, success=action == "go")
    async def close(self): ...

def brief(task, trajectory): return -0.1 * len(trajectory.turns)

class Centred(GRPO): ...
""",
    ),
    "rivals": ('[project.entry-points."rlhf.environments"]\ncorridor = "rivals:Other"\n', "class Other: ...\n"),
    "broken": (
        """
        [project.entry-points."rlhf.agents"]
        cracked = "broken:Agent"
        [project.entry-points."rlhf.rewards"]
        absent = "broken_absent:score"
        """,
        'raise RuntimeError("compiled for another machine")\n',
    ),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each package: the first by `pip install --target`, the others as that leaves them."""
    found = {name: tmp_path_factory.mktemp(name) for name in PACKAGES}
    for name, (points, code) in PACKAGES.items():
        points = "\n".join(line.strip() for line in points.splitlines())
        if name == "corridors":
            _install(name, points, code, tmp_path_factory.mktemp("source"), found[name])
            continue
        (found[name] / f"{name}.py").write_text(code)
        record = found[name] / f"{name}-1.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = points.replace('[project.entry-points."', "[").replace('"]', "]").replace('"', "")
        (record / "entry_points.txt").write_text(lines)
    return found


def _install(name: str, points: str, code: str, source: Path, target: Path) -> None:
    head = f'[project]\nname = "{name}"\nversion = "1.0"\n[tool.setuptools]\npy-modules = ["{name}"]\n'
    build = '[build-system]\nrequires = []\nbuild-backend = "setuptools.build_meta"\n'
    (source / "pyproject.toml").write_text(build + head + points)
    (source / f"{name}.py").write_text(code)
    how = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *how, "--target", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    assert list(target.glob("*.dist-info/entry_points.txt"))


def use(monkeypatch: pytest.MonkeyPatch, installed: dict[str, Path], *names: str) -> None:
    for name in names:
        monkeypatch.syspath_prepend(str(installed[name]))


def test_a_recipe_names_parts_of_an_installed_package(
    installed: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, installed, "corridors", "broken")  # the broken one is no matter
    values = {
        "policy": {"kind": "from_scratch"},
        "environment": {"kind": "corridor", "length": 5},
        "rewards": {"b": {"kind": "brief"}, "o": {"kind": "outcome"}},
        "stages": [{"kind": "policy_gradient", "advantage": {"kind": "centred"}}],
    }
    recipe = load_values(values, name="walk")
    assert recipe.environment.length == 5 and isinstance(recipe.stages[0].advantage, AdvantageEstimator)  # type: ignore[attr-defined, union-attr]
    assert "corridors:Corridor" in dump(recipe)  # which loads wherever the package is
    with pytest.raises(RecipeError, match="no key 'lenght'"):
        load_values({**values, "environment": {"kind": "corridor", "lenght": 5}}, name="walk")


def test_a_name_of_two_packages_is_an_error_that_names_both(
    installed: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, installed, "corridors", "rivals")
    with pytest.raises(RecipeError, match="several packages define this kind") as caught:
        resolve("environment", "corridor", base=Path())
    assert (
        "corridors:Corridor of corridors" in caught.value.expected and "rivals:Other of rivals" in caught.value.expected
    )
    assert resolve("reward", "brief", base=Path())


def test_a_package_that_fails_is_named(installed: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, installed, "corridors", "broken")
    with pytest.raises(RecipeError) as caught:
        resolve("agent", "cracked", base=Path())
    assert "package broken" in caught.value.where and "compiled for another machine" in caught.value.got
    with pytest.raises(MissingPackageError, match="package broken"):
        resolve("reward", "absent", base=Path())
    with pytest.raises(RecipeError, match="the package corridors declares 'lost', and does not have it"):
        resolve("loss", "lost", base=Path())


def test_own_names_go_first_and_near_names_are_told(
    installed: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, installed, "corridors")
    assert resolve("loss", "ppo_clip", base=Path()).__module__ == "rlhf.losses.ppo_clip"
    with pytest.raises(RecipeError, match="did you mean 'corridor'"):
        resolve("environment", "corridr", base=Path())
    listed = run("recipes", "--kinds", "--json").output
    assert "corridors:Corridor, of the package corridors" in listed and "hidden by the kind of this name" in listed
