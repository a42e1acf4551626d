"""Checks of a part against the parts around it: its context, and the problems that it reports.

A class that can stand in a recipe may have a method `check`, beside its fields, which is called once for each place
where the part stands, after all parts are built and before anything loads:

    def check(self, context: CheckContext) -> Iterator[Problem]:
        if self.capacity < context.stage.group_size:
            yield Problem("the buffer does not hold a group", where=context.at("capacity"), ...)

and a method `cautions` that yields sentences about what is legal and probably not meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rlhf.capabilities import Capability, CapabilityView
from rlhf.errors import ModelError, RecipeError, nearest

#: Seconds that a server or a hub has to take a connection.
CONNECT_S = 10.0
#: What goes with parts that need the policy's weights whole.
KEEPS_WHOLE = "a trainer that keeps weights whole: torch, or deepspeed with zero_stage: 0, 1 or 2"


@dataclass(frozen=True, slots=True)
class Problem:
    """A setting that cannot work with those around it.

    Attributes:
        what: in one clause.
        where: YAML path of the key to change.
        got: what it says.
        expected: what would work.
        do: how to get there.
    """

    what: str
    where: str
    got: str
    expected: str
    do: str

    @property
    def error(self) -> RecipeError:
        """The error that refuses the recipe."""
        return RecipeError(self.what, where=self.where, got=self.got, expected=self.expected, hint=self.do)


@dataclass(frozen=True, slots=True)
class IgnoredKeys:
    """Keys of a class that have no effect while another of its keys has a given value.

    Attributes:
        by: the other key.
        value: of it.
        keys: those without effect; each has a default.
    """

    by: str
    value: object
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RecipeView:
    """The parts of a recipe, and what follows from them.

    Attributes:
        policy, environment, agent, rewards, engine, asynchrony, cluster, limits, evaluation, stages: as in the recipe.
        trained_rewards: the rewards that make the score.
        properties: what the environment declares.
        roles: in which the agent calls the policy; empty where that is not known.
        learning: YAML path and settings of each policy-gradient stage.
        penalties: names of the rewards that count in the score and only ever take away.
        is_silent: whether an agent that chats, or one within the agent, is not let think.
        without_tools: gives YAML path and settings of each environment that takes no calls of tools.
        sharded: YAML path of each stage whose trainer spreads the weights over the processes -> key and value of the
            trainer that say so.
        shares_policy: whether the engine samples with the trainer's own weights.
        kind_of: section and part -> its kind.
        is_listed: section and part -> whether the catalogue has that kind.
    """

    policy: Any
    environment: Any
    agent: Any
    rewards: Mapping[str, Any]
    trained_rewards: Mapping[str, Any]
    engine: Any
    asynchrony: Any
    cluster: Any
    limits: Any
    evaluation: Any
    stages: tuple[Any, ...]
    properties: Any
    roles: tuple[str, ...]
    learning: tuple[tuple[str, Any], ...]
    penalties: tuple[str, ...]
    is_silent: bool
    without_tools: Callable[[], list[tuple[str, Any]]]
    sharded: Mapping[str, str]
    shares_policy: bool
    kind_of: Callable[[str, object], str]
    is_listed: Callable[[str, object], bool]

    @property
    def sharded_by(self) -> str:
        """Key and value of the first trainer that spreads the weights; empty without one."""
        return next(iter(self.sharded.values()), "")

    @property
    def longest(self) -> int:
        """Steps of the longest policy-gradient stage; 0 without any."""
        return max((stage.steps for _, stage in self.learning), default=0)

    @property
    def has_weight(self) -> bool:
        """True if any reward has a weight."""
        return any(weighted.weight for weighted in self.rewards.values())


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """The place of a part, and the recipe around it.

    Attributes:
        path: YAML path of the part.
        recipe: all parts.
        parent: the part that has this one as a key; None for those that the recipe or a stage itself names.
        stage: the stage it belongs to; None outside of stages.
        stage_path: YAML path of that.
        reward: name of the reward it belongs to; empty outside of rewards.
        is_trained: whether the policy is there already, and is only to be evaluated. Its agent may be another than that
            of its training, so that parts of the training may go without what they need of it.
    """

    path: str
    recipe: RecipeView
    parent: Any = None
    stage: Any = None
    stage_path: str = ""
    reward: str = ""
    is_trained: bool = False

    def at(self, key: str) -> str:
        """YAML path of a key of the part."""
        return f"{self.path}.{key}"

    @property
    def learns(self) -> bool:
        """True if the part belongs to a policy-gradient stage."""
        return any(stage is self.stage for _, stage in self.recipe.learning)

    def kind_of(self, section: str, part: object) -> str:
        """The kind that a recipe writes for `part`."""
        return self.recipe.kind_of(section, part)


class Checks(Protocol):
    """Part that checks itself.

    Three more methods may stand beside `check`: `cautions(context)` yields a sentence for what is legal and probably
    not meant, `check_processes(context, n)` a problem where the part cannot work in `n` > 1 processes, and
    `check_seats(context)` one where it needs a game with several seats.
    """

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Yield what cannot work in this place, the most telling first."""


#: Units in which an estimator gives advantages: scores less the mean of their group, or scores less another baseline.
Scale = Literal["group_mean", "baseline"]


class _Scaled(CapabilityView):
    scale = Capability[Scale | None](None)


def scale_of(estimator: object) -> Scale | None:
    """Units of an estimator's advantages, by its attribute `scale`; None for any others."""
    return _Scaled(estimator).scale


def refusal(call: Callable[..., object], *args: object) -> Iterator[Problem]:
    """Yield what a function raises as RecipeError, as a problem."""
    try:
        call(*args)
    except RecipeError as error:
        yield Problem(error.what, error.where, error.got, error.expected, error.hint)


def in_one_process(what: str, context: CheckContext, n: int) -> Problem:
    """The problem of a key by which `what` is done in one process, where there are `n`."""
    return Problem(
        f"{what} in one process",
        where=context.path,
        got=f"{n} processes",
        expected="one process",
        do="start one process, or remove the key",
    )


def no_effect(where: str, value: object, why: str, do: str = "remove the key") -> Problem:
    """The problem of a key that changes nothing, because of `why`."""
    return Problem("this key has no effect", where, str(value), f"nothing, because {why}", do)


def unused(
    part: Any, keys: tuple[str, ...], path: str, why: str, do: str = "remove the key", default: Any = None
) -> Iterator[Problem]:
    """Yield a problem for each of `keys` that is set and has no effect.

    Args:
        part: a dataclass whose keys all have defaults.
        keys: of it.
        path: YAML path of it.
        why: they have none.
        do: how to get rid of them.
        default: a part of that class with every default, where some keys have none.
    """
    default = type(part)() if default is None else default
    for key in keys:
        value = getattr(part, key)
        if value != getattr(default, key):
            yield no_effect(f"{path}.{key}", value, why, do)


def no_split(split: str, offered: Sequence[str], where: str) -> Iterator[Problem]:
    """Yield a problem, at key or option `where`, for a split that the environment lacks."""
    of_file = f", or environment.{split}: FILE" if split in ("train", "dev", "test") else ""
    if split not in offered:
        yield Problem(
            "the environment has no such split",
            where=where,
            got=split,
            expected=", ".join(offered),
            do=nearest(split, offered)
            or "name one of these; or make it: of a data set by environment.split_ratios, such as "
            f"{{train: 0.8, dev: 0.1, test: 0.1}}{of_file}; of the questions of `mcp` by a key `split` in each row; of "
            "an environment of your own by its `properties.splits` and `tasks`",
        )


def is_local_model(named: str) -> bool:
    """True if `named` is a folder: it exists, or cannot be a hub name (letters, digits, `-_.`, at most one `/`)."""
    return (
        Path(named).expanduser().exists()
        or named.startswith(".")
        or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", named, re.ASCII) is None
    )


def no_model(named: str, where: str, do: str) -> Iterator[Problem]:
    """Yield a problem where `named` is a folder without a model; hub names are not looked up.

    Args:
        named: folder or name of the model.
        where: YAML path of the key that names it.
        do: how to fix it.
    """
    folder = Path(named).expanduser()
    if is_local_model(named) and not (folder / "config.json").is_file():
        yield Problem(
            "there is no model in this folder",
            where,
            f"{named}, {'without config.json' if folder.is_dir() else 'no such folder'}",
            "a folder with config.json, tokenizer.json and *.safetensors, or a hub name",
            _policy_within(folder) or _near_folder(named) or do,
        )


def refuse_unreachable(named: str, where: str) -> None:
    """Raise ModelError where a hub model is neither cached nor reachable.

    Looked up is its config.json, in the cache and then on the hub, which is asked once.

    Args:
        named: the model; a folder is not looked at.
        where: YAML path of the key that names it.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    if is_local_model(named):
        return
    with suppress(Exception):
        hf_hub_download(named, "config.json", local_files_only=True)
        return
    try:
        get_hf_file_metadata(hf_hub_url(named, "config.json"), timeout=CONNECT_S)
    except Exception as error:  # of the hub's client: of the network, of rights, of names
        raise ModelError(
            "this model is neither a folder here nor on a reachable hub",
            where=where,
            got=f"{named}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}",
            expected="a folder, a model in the local cache, or one on a reachable hub",
            hint=_near_folder(named) or "check name, network and HF_TOKEN, or give the folder of a local model",
        ) from error


def _near_folder(named: str) -> str:
    """Question whether a folder of a similar name, or the shipped `base`, was meant; '' without one."""
    beside = {
        str(path.parent) for root in (Path(named).expanduser().parent, Path()) for path in root.glob("*/config.json")
    }
    return nearest(named, [*sorted(beside), "base"])


def _policy_within(folder: Path) -> str:
    """Hint for the folder of a run or a checkpoint in the place of a model: where its policy is; '' for others."""
    checkpoints = [path.parent for path in (folder / "checkpoints").glob("*/state.json")]
    newest = max(checkpoints, key=lambda one: (one / "state.json").stat().st_mtime, default=folder)
    policy = newest if newest.name == "policy" else newest / "policy"
    if (policy / "config.json").is_file():
        return f"{'a run' if checkpoints else 'a checkpoint'} keeps its policy in a folder of its own: {policy}"
    is_adapter = (policy / "adapter_config.json").is_file()
    return (
        f"its policy is an adapter: `rlhf export {policy.parent} --out FOLDER` makes a model of it"
        if is_adapter
        else ""
    )
