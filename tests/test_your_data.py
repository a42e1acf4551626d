"""The page `docs/your_data.md`: what it shows is what runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlhf.build.train import train
from rlhf.recipe import load

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "your_data.md").read_text("utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    for name, text in re.findall(r"```\w+\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(text)
    subprocess.run([sys.executable, "make_largest.py"], cwd=tmp_path, check=True)
    return tmp_path


def test_its_recipe_is_short_and_trains(folder: Path) -> None:
    assert len((folder / "largest.yaml").read_text().splitlines()) <= 12
    small = ["stages.0.n_demonstrations=40", "stages.0.epochs=1", "stages.1.steps=2", "evaluation.n_tasks=20"]
    found = train(load(folder / "largest.yaml", small), folder / "run")
    assert found["n_episodes"] == 2 * 16 * 8


@pytest.mark.extended
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns(folder: Path, seed: int) -> None:
    found = train(load(folder / "largest.yaml", [f"seed={seed}"]), folder / "run")
    assert found["success_after"] > found["success_before"] + 0.05, found


def test_its_other_recipes_load(folder: Path) -> None:
    row = '{"question": "What is 3 + 4?", "answer": "3 + 4 = 7\\n#### 7"}\n'
    (folder / "train.jsonl").write_text(row)
    (folder / "test.jsonl").write_text(row.replace("3", "2").replace("7", "6"))
    assert load(folder / "gsm8k.yaml").environment.tasks("test")[0].reference == "6"
    row = '{"text": "Add.", "test_list": ["assert add(1, 2) == 3"], "test_setup_code": "", "code": "def add(a, b): 1"}'
    (folder / "mbpp.jsonl").write_text(f"{row}\n")
    made = load(folder / "programs.yaml")
    assert len(made.environment.tasks("train")) == 1 and made.rewards["right"].success_threshold == 1
    [tool] = load(folder / "shop.yaml").environment.tasks("train")[0].info["tools"]
    assert tool["function"]["parameters"]["properties"]["name"]["description"] == "of the thing, such as `cup`."
    rewards = yaml.safe_load(re.search(r"```yaml\n(rewards:.*?)```", PAGE, re.DOTALL)[1])  # type: ignore[index]
    (folder / "mine.py").write_text("def judge(answer: str, reference: str) -> float:\n    return 1.0\n")
    whole = yaml.safe_load((folder / "gsm8k.yaml").read_text())
    (folder / "other.yaml").write_text(yaml.safe_dump(whole | rewards))
    made = load(folder / "other.yaml")
    assert {name: weighted.success_threshold for name, weighted in made.rewards.items()} == {
        "right": 0.8,
        "brief": None,
    }


def test_its_keys_are_those_of_the_environment() -> None:
    from environments.tasks.dataset import Dataset

    table = PAGE.partition("## Files and columns")[2].partition("##")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert named <= set(Dataset.__dataclass_fields__)
