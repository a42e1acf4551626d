"""Suites: which tasks of which environments a policy is judged on, and how.

    name: babyai
    attempts: 4
    agent: {kind: chat}                  # of models that bring none
    limits: {max_turns: 24}
    tasks: {split: test, n: 200}
    parts:
      gotoobj: {environment: {kind: babyai, level: GoToObj}, tasks: {sha256: 0f1e2d3c4b5a6978}}
      pickuploc: {environment: {kind: babyai, level: PickupLoc}}

What stands outside the parts holds for all of them. A suite is as closed and strict as a recipe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, field, replace
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.suite import names as suite_names
from rlhf.errors import RecipeError, RlhfError, closest, meant, nearest
from rlhf.recipe.builder import build, build_environment, build_part, plain_part
from rlhf.recipe.describe import given
from rlhf.recipe.environment_properties import with_defaults
from rlhf.recipe.files import Listed, files_beside, listed_in
from rlhf.recipe.model import Recipe
from rlhf.recipe.rewards import deciding, plain_rewards, rewards_of
from rlhf.recipe.splits import check_declared_split
from rlhf.recipe.strategy_checks import strategy_of
from rlhf.recipe.text import parse, read, to_text
from rlhf.recipe.values import join
from rlhf.renamed import without_warnings
from rlhf.settings import STRICT

if TYPE_CHECKING:
    from agents.base import Agent
    from environments.base import Environment
    from rlhf.data import Task
    from rlhf.rollout.contrib.strategies import Strategy
    from rlhf.rollout.limits import Limits
    from rlhf.rollout.scoring import WeightedReward

_OF_PARTS = ("agent", "rewards", "limits", "tasks")
_KEYS = ("name", "attempts", "seed", "metric", "sampling", "strategy", *_OF_PARTS, "parts")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sampling:
    """Sampling of a policy while it is judged."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens with this much probability; 1 keeps all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k likeliest tokens; 0 keeps all."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Tasks:
    """Selection of tasks of an environment."""

    split: str = "test"
    """A split that the environment knows."""
    n: Annotated[int, Field(ge=1)] | None = None
    """The first so many; null is all of them."""
    ids: tuple[str, ...] = ()
    """Only these, of the split; empty is every one."""
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""
    """First 16 digits of the hash of the list, as `rlhf evaluate` prints it; empty holds the list to nothing."""

    def of(self, environment: Environment) -> list[Task]:
        """Return the tasks.

        Raises:
            EnvError: the environment cannot list them.
            RecipeError: the list is another one than the suite was made with, or lacks one of `ids`.
        """
        from rlhf.rollout.tasks import tasks_of

        found = list(tasks_of(environment, self.split, None if self.ids else self.n))
        if self.ids:
            by_id = {task.id: task for task in found}
            absent = [name for name in self.ids if name not in by_id]
            if absent:
                raise RecipeError(
                    "the split has no such task",
                    where="tasks.ids",
                    got=absent[0],
                    expected=f"ids of the split {self.split!r}, such as {found[0].id}",
                    hint=nearest(absent[0], by_id) or "remove it",
                )
            found = [by_id[name] for name in self.ids][: self.n]
        if self.sha256 and (got := hash_of(found)) != self.sha256:
            raise RecipeError(
                "the tasks differ from those that the suite was made with",
                where="tasks.sha256",
                got=f"{got}, of {len(found)} tasks, the first {found[0].id}",
                expected=self.sha256,
                hint="install the version of the package that the suite was made with, or write a suite of your own",
            )
        return found


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Whole:
    """Keys of a suite that belong to no part."""

    attempts: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 20_000
    metric: Literal["success", "score"] = "success"
    sampling: Sampling = Field(default_factory=Sampling)


@plain_dataclass(frozen=True, kw_only=True)
class Part:
    """The tasks of one environment.

    Attributes:
        name: letters, digits, dot, dash and underscore; it names files.
        environment: of the tasks.
        agent: for policies that bring none.
        rewards: what the score is made of.
        limits: of an episode.
        tasks: which.
    """

    name: str
    environment: Environment
    agent: Agent
    rewards: Mapping[str, WeightedReward]
    limits: Limits
    tasks: Tasks


@plain_dataclass(frozen=True, kw_only=True)
class Suite:
    """Suite of environments that a policy is judged on.

    Attributes:
        name: of its file, where it does not say.
        parts: at least one.
        attempts: at each task.
        seed: with task, attempt and turn it gives the seed of each generation.
        metric: what a leaderboard ranks by.
        sampling: how they sample.
        strategy: chooses each attempt among candidates; None makes one attempt and takes it.
    """

    name: str
    parts: tuple[Part, ...]
    attempts: int = 1
    seed: int = 20_000
    metric: str = "success"
    sampling: Sampling = field(default_factory=Sampling)
    strategy: Strategy | None = None

    def tasks(self) -> dict[str, list[Task]]:
        """Part -> its tasks. Raises RecipeError where a task is listed twice, which would then be counted twice."""
        found = {part.name: part.tasks.of(part.environment) for part in self.parts}
        owner: dict[str, str] = {}
        for name, tasks in found.items():
            for task in tasks:
                other = owner.get(task.id)
                if other == name:
                    raise RecipeError(
                        "a task is listed twice, and would be counted twice",
                        where=f"parts.{name}.tasks",
                        got=task.id,
                        expected="each task once",
                        hint="remove it from tasks.ids, or give each task of the environment an id of its own",
                    )
                if other is not None:
                    raise RecipeError(
                        "two parts share a task",
                        where=f"parts.{name}",
                        got=task.id,
                        expected=f"tasks that are not in parts.{other}",
                        hint="give the parts other levels, games or splits",
                    )
                owner[task.id] = name
        return found

    def taken_by(self, recipe: Recipe) -> Suite:
        """Suite adapted to a policy trained with `recipe`, whose agent it uses.

        The agent, the length of a reply and the context are the policy's; the tasks, the number of turns and the
        rewards stay the suite's.
        """
        from rlhf.rollout.limits import OF_POLICY

        own = recipe.limits
        mine = {name: getattr(own, name) for name in OF_POLICY}
        parts = (replace(p, agent=recipe.agent, limits=replace(p.limits, **mine)) for p in self.parts)
        return replace(self, parts=tuple(parts))


def hash_of(tasks: Sequence[Task]) -> str:
    """Return the first 16 digits of the SHA-256 of everything that is in `tasks`, in their order."""
    import hashlib

    def line(task: Task) -> str:
        values = asdict(task)
        values["info"].pop("named", None)  # says again what prompt and reference are called
        return json.dumps(values, sort_keys=True, default=str)

    lines = map(line, tasks)
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def suite_of(values: Any, *, name: str, base: Path) -> Suite:
    """Build a suite from plain values, strictly.

    Raises:
        RecipeError: an unknown key, a wrong type or range, no parts.
        MissingPackageError: a part needs a package that is not installed.
    """
    _refuse_unknown(values, _KEYS, "", "a suite")
    parts = values.get("parts")
    if not isinstance(parts, Mapping) or not parts:
        raise RecipeError(
            "a suite needs parts",
            where="parts",
            got=given(parts),
            expected="a mapping: name: {environment: {kind: ...}}",
            hint="suites/ has some to start from",
        )
    own = {key: values[key] for key in ("attempts", "seed", "metric", "sampling") if key in values}
    whole = build(_Whole, own, "", base=base)
    common = {key: values[key] for key in _OF_PARTS if key in values}
    return Suite(
        name=str(values.get("name", name)),
        parts=tuple(_part(str(key), part, common, base) for key, part in parts.items()),
        attempts=whole.attempts,
        seed=whole.seed,
        metric=whole.metric,
        sampling=whole.sampling,
        strategy=strategy_of(values.get("strategy"), base),
    )


def values_of_suite(suite: Suite) -> dict[str, Any]:
    """Return the plain values of `suite`, defaults written out; `suite_of` makes an equal suite of them."""
    return {
        "name": suite.name,
        "attempts": suite.attempts,
        "seed": suite.seed,
        "metric": suite.metric,
        "sampling": plain_part(None, suite.sampling),
        **({"strategy": plain_part("strategy", suite.strategy)} if suite.strategy else {}),
        "parts": {
            part.name: {
                "environment": plain_part("environment", part.environment),
                "agent": plain_part("agent", part.agent),
                "rewards": plain_rewards(part.rewards),
                "limits": plain_part(None, part.limits),
                "tasks": plain_part(None, part.tasks),
            }
            for part in suite.parts
        },
    }


def renewed(held: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return parts of a plan on record under the present names of their keys, as far as they can still be built.

    Args:
        held: `suite`, and parts of a recipe by their sections.
        base: folder of the plan.
    """
    found: dict[str, Any] = {}
    with without_warnings():
        for key, value in held.items():
            with suppress(RlhfError):
                if key == "suite":
                    found[key] = values_of_suite(suite_of(value, name="", base=base))
                else:
                    found[key] = plain_part(key, build_part(key, value, key, base=base))
    plain: dict[str, Any] = parse(to_text(found), "plan")
    return plain


def suite_of_recipe(recipe: Recipe) -> Suite:
    """Return the suite that a recipe's own `evaluation` amounts to: one part, `tasks`.

    Raises:
        RecipeError: the recipe has no rewards to judge attempts by.
    """
    asked = recipe.evaluation
    if not recipe.trained_rewards:
        raise RecipeError(
            "this recipe has no rewards, so nothing says how good an attempt is",
            where="rewards",
            got="no rewards",
            expected="a reward, such as {kind: outcome}, what the environment says",
            hint="name a suite with --suite, or add rewards: {outcome: {kind: outcome}}",
        )
    part = Part(
        name="tasks",
        environment=recipe.environment,
        agent=recipe.agent,
        rewards=recipe.trained_rewards,
        limits=recipe.limits,
        tasks=Tasks(split=asked.split, n=asked.n_tasks),
    )
    sampling = Sampling(temperature=asked.temperature)
    return Suite(name=recipe.name, parts=(part,), attempts=asked.attempts, seed=asked.seed, sampling=sampling)


def list_suites() -> list[Listed]:
    """All suites by name."""
    return listed_in("suites")


def load_suite(path_or_name: str | Mapping[str, Any]) -> Suite:
    """Load a suite: a YAML file, a name of `list_suites`, or its keys.

    Raises:
        RecipeError: there is none, or it cannot be used as written.
        MissingPackageError: a part needs a package that is not installed.
    """
    if isinstance(path_or_name, Mapping):
        return suite_of(path_or_name, name="tasks", base=Path.cwd())
    path = Path(path_or_name).expanduser()
    listed = {one.name: one.path for one in list_suites()}
    if not path.is_file():
        if path_or_name not in listed:
            raise RecipeError(
                "no such suite",
                where=f"--suite {path_or_name}",
                got=path_or_name,
                expected=", ".join(listed) or "a YAML file",
                hint=_nearest_suite(path_or_name, listed)
                or "give the path of a suite, or write one: suites/ has examples",
            )
        path = listed[path_or_name]
    return suite_of(read(path, ()), name=path.stem, base=path.resolve().parent)


def _nearest_suite(name: str, listed: Iterable[str]) -> str:
    """Suggestion of the nearest suite, of answers too; '' where none is near."""
    path = Path(name).expanduser()
    beside = files_beside(path) if path.suffix or path.parent != Path() else {}
    if (file := closest(path.stem, beside)) is not None:
        return meant(beside[file])
    found, of_answers = closest(name, [*listed, *suite_names()]), suite_names()
    if found in of_answers:
        return f"`rlhf check reward TARGET --suite {found}` judges a verifier; that suite has answers and no tasks"
    return meant(found) if found else ""


def _part(name: str, values: Any, common: Mapping[str, Any], base: Path) -> Part:
    from rlhf.rollout.limits import Limits

    path = join("parts", name)
    if not re.fullmatch(r"[\w.-]+", name):
        raise RecipeError(
            "this is not a valid name of a part",
            where="parts",
            got=given(name),
            expected="letters, digits, dot, dash and underscore",
            hint="the name becomes that of files",
        )
    _refuse_unknown(values, ("environment", *_OF_PARTS), path, "a part of a suite")
    if "environment" not in values:
        raise RecipeError(
            "a part needs an environment",
            where=join(path, "environment"),
            got="nothing",
            expected="environment: {kind: ...}",
            hint="`rlhf recipes --kinds` lists environments",
        )
    found = {**common, **values}
    # Limits and tasks change what they name and keep the rest, as nested keys do in a recipe.
    for key in ("limits", "tasks"):
        found[key] = {**_mapping(common.get(key, {}), key), **_mapping(values.get(key, {}), join(path, key))}
    environment = build_environment(found["environment"], join(path, "environment"), base=base)
    tasks = build(Tasks, found["tasks"], join(path, "tasks"), base=base)
    is_common = "split" in common.get("tasks", {}) and "split" not in values.get("tasks", {})
    check_declared_split(tasks.split, environment, "tasks.split" if is_common else join(path, "tasks.split"))
    agent, limits = (with_defaults(key, environment, found.get(key, {})) for key in ("agent", "limits"))
    return Part(
        name=name,
        environment=environment,
        agent=build_part("agent", agent, join(path, "agent"), base=base),
        rewards=deciding(_rewards(found.get("rewards", {"success": {"kind": "outcome"}}), base), environment),
        limits=build(Limits, limits, join(path, "limits"), base=base),
        tasks=tasks,
    )


def _rewards(values: Any, base: Path) -> dict[str, WeightedReward]:
    rewards = rewards_of(values, base)
    for name, weighted in rewards.items():
        if weighted.monitor is not None:
            raise RecipeError(
                "monitor applies to training, and an evaluation trains nothing",
                where=f"rewards.{name}.monitor",
                got="monitor",
                expected="a weight, or none",
                hint="remove the key; `rlhf score FOLDER --reward TARGET` scores an evaluation with other rewards",
            )
    return rewards


def _mapping(values: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise RecipeError("wrong type", where=path, got=given(values), expected="a mapping", hint="write {key: value}")
    return values


def _refuse_unknown(values: Any, known: Sequence[str], path: str, what: str) -> None:
    for key in _mapping(values, path or "suite"):
        if key not in known:
            raise RecipeError(
                f"{what} has no key '{key}'",
                where=join(path, str(key)),
                got=given(values[key]),
                expected=", ".join(known),
                hint=nearest(str(key), known) or "remove the key",
            )
