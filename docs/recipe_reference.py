"""Write into the pages what is declared elsewhere: recipe keys, the Python API, a recipe, places of algorithms.

    python docs/recipe_reference.py

`docs/recipe_reference.md` comes from the classes that declare the keys, the recipe of `README.md` from its file, and
rows of `docs/algorithms/index.md` from the pages that describe their place (`docs/algorithm_pages.py`). A test compares
the pages with what this writes. `python_api.md` is made of docstrings (`docs/python_reference.py`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agents.stores.contrib.typed import Core, Episodic, Procedural, Semantic
from rlhf.asynchrony.cluster import Cluster
from rlhf.asynchrony.settings import Asynchrony
from rlhf.batching.filters import Filters
from rlhf.catalog import CATALOG
from rlhf.evaluation.evaluate import Evaluation
from rlhf.losses.importance_correction import Criterion
from rlhf.losses.reduction import Reduction
from rlhf.recipe.builder import plain
from rlhf.recipe.describe import expected
from rlhf.recipe.keys import Key, is_settings, keys_of, section_in
from rlhf.recipe.text import to_text
from rlhf.registry import kind_of
from rlhf.rollout.limits import Limits
from rlhf.rollout.reward_monitor import RewardMonitor
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.contrib.demonstrations_in_groups import GroupDemonstrations
from rlhf.training.contrib.expert_iteration import Attempts
from rlhf.training.contrib.imitate_failed_tasks import ImitateFailed
from rlhf.training.contrib.judge_refresh_settings import JudgeRefresh
from rlhf.training.contrib.logged_attempts import OfflineData
from rlhf.training.contrib.node_merging import Merging
from rlhf.training.contrib.opponent_settings import Opponents
from rlhf.training.contrib.reference_reset import ReferenceReset
from rlhf.training.contrib.reward_refresh_settings import RewardRefresh
from rlhf.training.contrib.self_certainty import SelfCertainty
from rlhf.training.contrib.token_stats import TokenStatsSettings
from rlhf.training.hooks.replay import Replay
from rlhf.training.policy.model import Lora
from rlhf.training.stages.chat_settings import Chats
from rlhf.training.stages.pairs import Pairs

ROOT = Path(__file__).resolve().parent.parent
README, QUICKSTART = ROOT / "README.md", ROOT / "recipes" / "quickstart.yaml"
PAGE = ROOT / "docs" / "recipe_reference.md"
PYTHON = ROOT / "docs" / "python_api.md"
GUIDE = ROOT / "docs" / "algorithms" / "index.md"
TITLE = """# Recipe reference

Every key of a recipe, by section and kind; keys at the top level are in [Recipes](recipes.md#top-level-keys).
`python docs/recipe_reference.py` writes this page from the classes that declare the keys.
"""

_AS_YAML = {"None": "null", "True": "true", "False": "false"}

#: Sections without a kind, under the path that they have in a recipe.
PLAIN_SECTIONS: tuple[tuple[str, Any], ...] = (
    ("asynchrony", Asynchrony),
    ("cluster", Cluster),
    ("limits", Limits),
    ("evaluation", Evaluation),
    ("rewards.NAME.monitor", RewardMonitor),
    ("stages[i].optimizer", AdamW),
    ("stages[i].correction.criteria[j]", Criterion),
    ("stages[i].reduction", Reduction),
    ("stages[i].filters", Filters),
    ("stages[i].data", Chats),
    ("stages[i].rejection_sampling", Attempts),
    ("stages[i].pairs", Pairs),
    ("stages[i].group_demonstrations", GroupDemonstrations),
    ("stages[i].imitate_failed", ImitateFailed),
    ("stages[i].offline_data", OfflineData),
    ("stages[i].self_certainty", SelfCertainty),
    ("stages[i].token_stats", TokenStatsSettings),
    ("stages[i].replay", Replay),
    ("stages[i].reference_reset", ReferenceReset),
    ("stages[i].reward_refresh", RewardRefresh),
    ("stages[i].judge_refresh", JudgeRefresh),
    ("stages[i].opponents", Opponents),
    ("stages[i].merge", Merging),
    ("policy.lora", Lora),
    ("agent.store.core", Core),
    ("agent.store.episodic", Episodic),
    ("agent.store.semantic", Semantic),
    ("agent.store.procedural", Procedural),
)

#: Sections with kinds, under their path.
PATHS = {
    "policy": "policy",
    "environment": "environment",
    "agent": "agent",
    "memory": "agent.memory",
    "store": "agent.store",
    "extractor": "agent.store.extractor",
    "reward": "rewards.NAME",
    "engine": "engine",
    "stage": "stages[i]",
    "advantage": "stages[i].advantage",
    "critic": "stages[i].critic",
    "loss": "stages[i].loss",
    "correction": "stages[i].correction",
    "trainer": "stages[i].trainer",
    "rollout": "stages[i].rollout",
    "sampler": "stages[i].sampler",
    "selection": "stages[i].selection",
    "tracker": "trackers[i]",
    "sandbox": "rewards.NAME.sandbox",
}


def reference() -> str:
    """Return the page of all sections as Markdown."""
    parts = [TITLE]
    for section, path in PATHS.items():
        parts.append(f"## {path}\n")
        for kind, entry in CATALOG[section].items():
            module, _, name = entry.target.partition(":")
            parts.append(_table(f"{path}: {{kind: {kind}}}", getattr(importlib.import_module(module), name)))
    parts += ["## Sections without a kind\n", *(_table(path, cls) for path, cls in PLAIN_SECTIONS)]
    return "\n".join(parts).rstrip() + "\n"


def readme_with(text: str, recipe: str) -> str:
    """Return the README `text` with `recipe` in the code block that names the quickstart."""
    return re.sub(
        r"```yaml\n(?:(?!```).)*?^name: quickstart\n.*?```",
        lambda _: f"```yaml\n{recipe.rstrip()}\n```",
        text,
        count=1,
        flags=re.DOTALL | re.MULTILINE,
    )


def _table(title: str, cls: Any) -> str:
    lines = [f"### `{title}`", "", _first_sentence(inspect.getdoc(cls) or ""), ""]
    keys = keys_of(cls)
    if keys:
        lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(_cell(text) for text in _row(cls, key))} |" for key in keys.values()]
    else:
        lines.append("No keys.")
    return "\n".join([*lines, ""])


def _row(cls: Any, key: Key) -> Iterator[str]:
    yield f"`{key.name}`"
    yield expected(key.annotation)
    yield "must be given" if key.make_default is None else f"`{_default(key)}`"
    meaning = _meaning(cls, key.name)
    if not meaning:
        raise SystemExit(f"{cls.__name__}.{key.name} has no docstring that says what it means")
    yield meaning


def _meaning(cls: Any, name: str) -> str:
    """Return the docstring below the field, in the class or in the base that declares it."""
    fields = [getattr(base, "__pydantic_fields__", {}).get(name) for base in cls.__mro__]
    text = next((" ".join(f.description.split()) for f in fields if f is not None and f.description), "")
    return re.sub(r"\b(None|True|False)\b", lambda match: _AS_YAML[match[0]], text)


def _default(key: Key) -> str:
    made = key.make_default() if key.make_default else None
    return _short(made, section_in(key.annotation)) if is_settings(type(made)) else _yaml(plain(key.annotation, made))


def _short(part: Any, section: str | None) -> str:
    """Write a default object as a recipe would: its kind, and what differs from the defaults of its class."""
    differing = {
        name: plain(key.annotation, getattr(part, name))
        for name, key in keys_of(type(part)).items()
        if key.make_default is None or key.make_default() != getattr(part, name)
    }
    return _yaml(({"kind": kind_of(section, part)} if section else {}) | differing)


def _yaml(value: Any) -> str:
    text = to_text({"x": [value]}).strip().removeprefix("x:").strip()
    if "\n" in text:  # a table's cell is one line
        return json.dumps(value, ensure_ascii=False)
    return text.removeprefix("[").removesuffix("]") if text.startswith("[") else text.removeprefix("- ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def guide_with(text: str) -> str:
    """Return the guide to algorithms `text` with the rows of pages that describe their place."""
    found: str = _beside("algorithm_pages").guide_with(text)
    return found


def python_api() -> str:
    """Return the page of the Python API."""
    found: str = _beside("python_reference").page()
    return found


def _beside(name: str) -> Any:
    """Module of a file in this folder."""
    sys.path.insert(0, str(Path(__file__).parent))
    module = importlib.import_module(name)
    sys.path.pop(0)
    return module


if __name__ == "__main__":
    GUIDE.write_text(guide_with(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
    PYTHON.write_text(python_api(), encoding="utf-8")
    PAGE.write_text(reference(), encoding="utf-8")
    README.write_text(readme_with(README.read_text("utf-8"), QUICKSTART.read_text("utf-8")), encoding="utf-8")
