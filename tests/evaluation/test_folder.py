"""What a folder of evaluations or runs says of one that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.evaluation.folder import nearest_beside, no_run
from tests.commands import run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs below a folder with a long name."""
    folder = tmp_path / "everything-that-was-ever-trained"
    for name in ("maze-seed0", "quickstart-seed1"):
        (folder / name).mkdir(parents=True)
        (folder / name / "recipe.yaml").write_text("")
    return folder


def test_the_nearest_is_chosen_by_its_name_and_given_with_its_path(runs: Path) -> None:
    assert nearest_beside(runs / "quikstart-seed1") == f"did you mean '{runs / 'quickstart-seed1'}'?"
    # What they lie in is the same, and makes no name like another.
    assert nearest_beside(runs / "xyz") == f"there are {runs / 'maze-seed0'}, {runs / 'quickstart-seed1'}"
    assert nearest_beside(runs / "maze-seed0") == "" and nearest_beside(runs / "none" / "x") == ""


def test_strangers_in_a_folder_are_not_proposed(runs: Path) -> None:
    assert nearest_beside(runs / "xyz")
    for name in ("logs", "data", "cache"):
        (runs / name).mkdir()
    assert nearest_beside(runs / "xyz") == ""
    assert nearest_beside(runs / "quikstart-seed1") == f"did you mean '{runs / 'quickstart-seed1'}'?"


def test_a_name_alone_is_looked_for_where_runs_and_evaluations_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, file in (("runs/quickstart-seed0", "recipe.yaml"), ("evaluations/weak", "evaluation.yaml")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / file).write_text("")
    for words in (["evaluate", "quickstart-seed0"], ["compare", "quickstart-seed0", "weak"]):
        refused = run(*words)
        assert refused.exit_code == 2 and "did you mean 'runs/quickstart-seed0'?" in refused.stderr
    assert "did you mean 'evaluations/weak'?" in run("leaderboard", "weak").stderr
    assert "did you mean 'runs/quickstart-seed0'?" in run("trajectories", "quickstart-sed0").stderr
    assert "did you mean 'quickstart'?" in run("evaluate", "quickstrat").stderr, "a recipe is nearer"


def test_where_there_is_no_run_it_says_where_to_look(runs: Path) -> None:
    error = no_run(runs / "maze-seed1", "--resume")
    assert (error.where, error.got) == ("--resume", "no such folder") and "maze-seed0" in error.hint
    above = no_run(runs, "RUN")
    assert above.got == "no recipe.yaml, and 2 runs or evaluations in folders below it"
    assert above.hint == f"name one of those below it: {runs / 'maze-seed0'}, {runs / 'quickstart-seed1'}"
    for command in ("trajectories", "report"):
        refused = run(command, runs)
        assert refused.exit_code == 2 and above.hint in refused.stderr
        assert "expected: a folder that `rlhf train` or `rlhf evaluate --out` made" in refused.stderr


def test_a_folder_in_a_run_means_the_run(runs: Path) -> None:
    inside = runs / "maze-seed0" / "checkpoints"
    inside.mkdir()
    assert no_run(inside, "RUN").hint == f"did you mean '{runs / 'maze-seed0'}'?"


def test_where_no_run_is_in_sight_it_says_how_one_is_made(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    monkeypatch.chdir(nothing)
    assert no_run(nothing, "RUN").hint == "`rlhf train RECIPE` makes one"
    runs.rename(nothing / "runs")
    assert no_run(Path("x"), "RUN").hint == "there are runs/maze-seed0, runs/quickstart-seed1"
