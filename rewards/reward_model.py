"""A learned reward: a model that was trained on pairs says how good an attempt is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.data import Task, Trajectory, Verdict
from rlhf.errors import ModelError, RewardError
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardModelScore:
    """The number that a reward model says of the ids of an attempt, read at the last one.

    The folder is that of a `reward_model` stage, `runs/NAME/reward_model/STAGE`, or of any sequence classifier with one
    label whose tokenizer is the policy's: what it reads are the ids that were sampled, never text. All attempts at a
    task are scored together. A model that fails, or says something that is no finite number, makes all of them failures
    of the reward, and never a zero; so does an attempt in which the policy said nothing, as there is nothing to read.
    """

    path: str
    """Folder of the model, or its name on a hub."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Attempts of one forward pass."""

    def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Score the attempts at a task, in order. Raises RewardError where that cannot be done."""
        rows = [_row(trajectory) for trajectory in trajectories]
        try:
            values = _scores(_load(self.path)[0], rows, self.batch_size)
        except Exception as error:  # of torch, transformers and safetensors, which raise one of their own each
            raise RewardError(
                "the reward model failed",
                where=f"reward model {self.path}",
                got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                expected="a number for each attempt",
                hint="lower batch_size where memory is short",
            ) from error
        odd = [x for x in values if not math.isfinite(x)]
        if odd:
            raise RewardError(
                "the reward model says something that is no finite number",
                where=f"reward model {self.path}",
                got=str(odd[0]),
                expected="finite numbers",
                hint="train it again with a lower optimizer.lr",
            )
        return [Verdict(value, f"{value:+.3f} by {Path(self.path).name}") for value in values]

    def check_policy(self, tokenizer: Any) -> None:
        """Load the model and refuse one that reads other tokens than the policy says.

        Raises:
            ModelError: the model cannot be loaded, says more than one number, or has another tokenizer.
        """
        try:
            model, own = _load(self.path)
        except Exception as error:  # as above
            raise ModelError(
                "the reward model cannot be loaded",
                where=f"reward model {self.path}",
                got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                expected="a folder as a reward_model stage leaves it, in reward_model/ of its run",
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


def _row(trajectory: Trajectory) -> list[int]:
    """Everything that was read and said, up to the last sampled token."""
    said = [generation for generation in trajectory.generations if generation.token_ids]
    if not said:
        raise RewardError(
            "there is nothing to read: the policy said nothing",
            where=f"attempt {trajectory.attempt} at {trajectory.task_id}",
            got="0 sampled tokens",
            expected="at least 1",
        )
    return [*said[-1].prompt.token_ids, *said[-1].token_ids]


@lru_cache(maxsize=4)
def _load(path: str) -> tuple[Any, Any]:
    """Model and tokenizer; loaded once in a process."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = Path(path).expanduser()
    source = str(folder) if folder.is_dir() else path
    if not folder.is_dir() and path.startswith((".", "/", "~")):
        raise FileNotFoundError(f"there is no folder {path}")
    model: Any = AutoModelForSequenceClassification.from_pretrained(source)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(device).eval(), AutoTokenizer.from_pretrained(source)


def _scores(model: Any, rows: Sequence[Sequence[int]], batch_size: int) -> list[float]:
    import torch

    found: list[float] = []
    with torch.inference_mode():
        for i in range(0, len(rows), batch_size):
            some = rows[i : i + batch_size]
            longest, pad = max(map(len, some)), model.config.pad_token_id or 0
            ids = [[*row, *[pad] * (longest - len(row))] for row in some]
            mask = [[1] * len(row) + [0] * (longest - len(row)) for row in some]
            batch = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
            output = model(**{name: values.to(model.device) for name, values in batch.items()})
            found += output.logits[:, 0].float().tolist()
    return found
