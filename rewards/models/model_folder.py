"""Scoring models of token ids: their folder, loading and forward pass."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.models.loading import loaded
from rlhf.checking import CheckContext, Problem
from rlhf.data import Task, Trajectory, Verdict
from rlhf.errors import ModelError, RewardError
from rlhf.settings import STRICT

#: Key of `config.json` by which a reward_model stage says what its model has learnt.
LEARNT = "rlhf_learns"
#: Key of `config.json` with (a, b): what a model of pairs says, x, is served as a x + b.
SCALE = "rlhf_scale"
#: Key of `config.json` by which a model says that it reads nodes: {"mark": the id before a node, "longest": its steps}.
NODES = "rlhf_nodes"
#: Ids, and the places in them at which the model is asked.
Row = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelReward:
    """Base of rewards that are models.

    The folder is that of a `reward_model` stage, `runs/NAME/reward_model/STAGE`, or of any sequence classifier with one
    label whose tokenizer is the policy's: what it reads are the ids that were sampled, never text. All attempts at a
    task are scored together. A model that fails, or says something that is no finite number, makes all of them failures
    of the reward, and never a zero; so does an attempt in which the policy said nothing, as there is nothing to read.
    """

    #: Keys of `reward_refresh` that mean nothing to it.
    unrefreshed: ClassVar[tuple[str, ...]] = ("success_threshold", "eta")
    #: What the model has to have learnt.
    learnt: ClassVar[str] = "pairwise"
    #: It reads ids, which a policy on a server does not give.
    reads_tokens: ClassVar[bool] = True
    #: Scores have a scale of their own, and a probability is never 1.
    marks_solved: ClassVar[bool] = False

    path: str
    """Folder of the model, or its name on a hub; `stages[1]` is the model that this stage of the same recipe trains,
    which stages before its end go without."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Rows of one forward pass."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a stage that trains no such model, and a trained model nested in another reward."""
        index, stages = stage_of(self), context.recipe.stages
        if index is None:
            return
        trains = [f"stages[{i}]" for i, s in enumerate(stages) if getattr(s, "objective", None) == self.learnt]
        if f"stages[{index}]" not in trains:
            yield Problem(
                "this stage trains no reward model of that kind",
                where=context.at("path"),
                got=self.path,
                expected=" or ".join(trains) or f"a stage of kind reward_model with objective: {self.learnt}",
                do=f"name {trains[0]}" if trains else "add the stage, or name the folder of a model",
            )
        elif context.parent is not None:
            yield Problem(
                "a model that the run trains cannot be nested in another reward",
                where=context.at("path"),
                got=f"{self.path} within another reward",
                expected="a reward that the recipe names",
                do="move it to the top level of rewards, or train the model in an earlier run",
            )

    def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Score the attempts at a task, in order. Raises RewardError where that cannot be done."""
        return self.judged(trajectories, lambda: load(self.path)[0])

    def judged(self, trajectories: Sequence[Trajectory], model: Callable[[], Any]) -> list[Verdict]:
        """Score attempts by what `model` returns. Raises RewardError where that cannot be done."""
        read = [self.rows(t) for t in trajectories]
        for trajectory, rows in zip(trajectories, read, strict=True):
            if not rows:
                raise RewardError(
                    "the attempt has no sampled tokens to score",
                    where=f"attempt {trajectory.attempt} at {trajectory.task_id}",
                    got="0 sampled tokens",
                    expected="at least 1",
                )
        flat = [row for rows in read for row in rows]
        try:
            values = iter(self.read(model(), flat))
        except Exception as error:  # of torch, transformers and safetensors, which raise one of their own each
            raise RewardError(
                "the reward model failed",
                where=f"reward model {self.path}",
                got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                expected="a number for each attempt",
                hint="lower batch_size where memory is short",
            ) from error
        said = [[next(values) for _ in rows] for rows in read]
        odd = [x for rows in said for row in rows for x in row if not math.isfinite(x)]
        if odd:
            raise RewardError(
                "the reward model returned a value that is not finite",
                where=f"reward model {self.path}",
                got=str(odd[0]),
                expected="finite numbers",
                hint="train it again with a lower optimizer.lr",
            )
        return [self.verdict(t, rows) for t, rows in zip(trajectories, said, strict=True)]

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Score one attempt, as a part of another reward asks; raises what `over_group` raises."""
        return self.over_group(task, [trajectory])[0]

    def rows(self, trajectory: Trajectory) -> list[Row]:
        """Row of an attempt up to its last sampled token, scored there; none without one."""
        said = [generation for generation in trajectory.generations if generation.n_tokens]
        return [(said[-1].full_ids, (said[-1].length - 1,))] if said else []

    def read(self, model: Any, rows: Sequence[Row]) -> list[list[float]]:
        """Scores at each place of each row."""
        return logits(model, rows, self.batch_size)

    def verdict(self, trajectory: Trajectory, said: Sequence[Sequence[float]]) -> Verdict:
        """Make a verdict of what the model says at the places of each row."""
        value = said[-1][-1]
        return Verdict(value, f"{value:+.3f} by {self.name}")

    @property
    def name(self) -> str:
        """For the reader of a verdict."""
        return Path(self.path).name

    def check_policy(self, tokenizer: Any) -> None:
        """Load the model and refuse one that reads other tokens than the policy says, or has learnt something else.

        Raises:
            ModelError: the model cannot be loaded, says more than one number, has another tokenizer, or has learnt what
                another reward asks for.
        """
        if stage_of(self) is not None:
            return
        try:
            model, own = load(self.path)
        except Exception as error:  # as above
            raise ModelError(
                "the reward model cannot be loaded",
                where=f"reward model {self.path}",
                got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                expected="a folder that a reward_model stage wrote, reward_model/ of its run",
                hint="give the folder that holds config.json",
            ) from error
        if model.config.num_labels != 1 or own.get_vocab() != tokenizer.get_vocab():
            labels = f"{model.config.num_labels} labels"
            raise ModelError(
                "the reward model does not fit the policy",
                where=f"reward model {self.path}",
                got="another tokenizer" if model.config.num_labels == 1 else labels,
                expected="one label, and the tokenizer of the policy, whose ids it reads",
                hint="train one with a reward_model stage on this policy",
            )
        learnt = getattr(model.config, LEARNT, "pairwise")
        learnt = {"pairs": "pairwise", "steps": "process"}.get(learnt, learnt)  # as older versions have it
        if learnt != self.learnt:
            kinds = {"pairwise": "reward_model", "outcome": "outcome_model", "process": "process_model"}
            raise ModelError(
                "the reward model was trained with another objective",
                where=f"reward model {self.path}",
                got=f"a stage with objective: {learnt}",
                expected=f"one with objective: {self.learnt}",
                hint=f"score with kind: {kinds.get(learnt, learnt)}",
            )


def stage_of(reward: object) -> int | None:
    """Number of the stage that is still to train a reward's model; None of other rewards."""
    found = re.fullmatch(r"stages\[(\d+)\]", reward.path) if isinstance(reward, ModelReward) else None
    return int(found[1]) if found else None


def nodes_of(path: str) -> tuple[int, int] | None:
    """The mark and the longest node of a folder whose model reads nodes; None for any other, and where none is."""
    try:
        nodes = json.loads((Path(path).expanduser() / "config.json").read_text("utf-8")).get(NODES)
    except (OSError, ValueError):
        return None  # a name on a hub, or what loading it will say
    return (int(nodes["mark"]), int(nodes["longest"])) if nodes else None


def load(path: str) -> tuple[Any, Any]:
    """Model and tokenizer; see `loaded`."""
    return loaded(path, "AutoModelForSequenceClassification")


def logits_at(model: Any, rows: Sequence[Row]) -> Any:
    """A tensor `[ΣS]` of what a model with one label says at each place of each row, in order; one forward pass.

    The output layer is computed in float32, whatever the model's format: bfloat16 has 8 bits, and knows no number
    between 4 and 4.03.
    """
    import torch

    ids, mask = _padded(model, rows)
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    at = [(i, place) for i, (_, ends) in enumerate(rows) for place in ends]
    row, place = torch.tensor(at, device=ids.device).T
    layer = model.score
    bias = None if layer.bias is None else layer.bias.float()
    return torch.nn.functional.linear(hidden[row, place].float(), layer.weight.float(), bias)[:, 0]


def pooled_at(model: Any, rows: Sequence[Sequence[int]]) -> Any:
    """A tensor `[B]` of what a model with one label says at the last token of each row that is not padding.

    Families whose output layer is no `score` look there by themselves, in their own format.
    """
    pad = model.config.pad_token_id
    if not hasattr(model, "score"):
        ids, mask = _padded(model, [(row, ()) for row in rows])
        return model(input_ids=ids, attention_mask=mask).logits[:, 0].float()
    ends = [max((i for i, token in enumerate(row) if token != pad), default=0) for row in rows]
    return logits_at(model, [(row, (end,)) for row, end in zip(rows, ends, strict=True)])


def logits(model: Any, rows: Sequence[Row], batch_size: int) -> list[list[float]]:
    """Scores at each place of each row, without a gradient; `batch_size` rows at once."""
    import torch

    found: list[list[float]] = []
    with torch.inference_mode():
        for i in range(0, len(rows), batch_size):
            some = rows[i : i + batch_size]
            values = iter(logits_at(model, some).tolist())
            found += [[next(values) for _ in ends] for _, ends in some]
    return found


def pooled(model: Any, rows: Sequence[Row], batch_size: int) -> list[list[float]]:
    """Score of each row at its last token that is not padding."""
    import torch

    found: list[list[float]] = []
    with torch.inference_mode():
        for i in range(0, len(rows), batch_size):
            found += [[x] for x in pooled_at(model, [ids for ids, _ in rows[i : i + batch_size]]).tolist()]
    return found


def _padded(model: Any, rows: Sequence[Row]) -> tuple[Any, Any]:
    """Ids and mask, `[B, L]`, padded on the right."""
    import torch

    longest, pad = max(len(ids) for ids, _ in rows), model.config.pad_token_id or 0
    padded = [[*ids, *[pad] * (longest - len(ids))] for ids, _ in rows]
    mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]
    device = next(model.parameters()).device
    return torch.tensor(padded, device=device), torch.tensor(mask, device=device)
