"""TRL's trainers on our rows and model: the only file that imports that library.

Its trainers take text, tokenise it and cut it; here they are given rows of ids and masks, which go to the model as they
are. They also change the model that they are given: its forward, its dropout, its configuration. `borrowed` gives it
back as it was.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from rlhf.errors import ModelError, TrainingError, boundary
from rlhf.extras import import_optional
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.sharded import device_of

if TYPE_CHECKING:
    from rlhf.training.context import RunContext
    from rlhf.training.stages.pair_settings import PairStage
    from rlhf.training.stages.preference import Preference
    from rlhf.training.stages.reward_model import RewardModel

#: Called after each update with its number, from 1, and what TRL says of it; True ends the training there.
OnUpdate = Callable[[int, Mapping[str, float]], bool | None]


def load_trl(where: str = "stages") -> Any:
    """Return the library. Raises MissingPackageError where it is not installed."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # where DeepSpeed is there, it would say that it looked for one
    trl = import_optional("trl", "trl", "the stage needs a package that is not installed", where)
    logging.getLogger("trl").setLevel(logging.ERROR)
    return trl


@contextmanager
def borrowed(model: Any) -> Iterator[None]:
    """Context that restores configuration, dropout and forward of `model` after a TRL trainer, not its weights.

    A quantised base with adapters inside is marked as such: transformers' trainer takes it for one without them else.
    """
    has_adapters = getattr(model, "_hf_peft_config_loaded", False)
    model._hf_peft_config_loaded = has_adapters or getattr(model, "is_quantized", False)
    dropouts = [(m, m.p) for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    configs = [c for c in (model.config, getattr(model, "generation_config", None)) if c is not None]
    before = [
        (c, name, getattr(c, name)) for c in configs for name in ("pad_token_id", "use_cache") if hasattr(c, name)
    ]
    tags, forward = getattr(model, "model_tags", None), vars(model).get("forward")
    try:
        yield
    finally:
        for module, p in dropouts:
            module.p = p
        for config, name, value in before:
            setattr(config, name, value)
        model.model_tags = tags
        vars(model).pop("forward", None)
        if forward is not None:
            model.forward = forward
        model.gradient_checkpointing_disable()
        model._hf_peft_config_loaded = has_adapters
        model.zero_grad(set_to_none=True)
        model.eval()


def train_dpo(
    model: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]], stage: Preference, on_update: OnUpdate, *, seed: int
) -> None:
    """Train `model`, a causal language model that may have adapters in it, on pairs.

    Args:
        model: updated in place.
        tokenizer: of the model; says what padding is.
        rows: chosen_ids, chosen_mask, rejected_ids, rejected_mask, ref_chosen_logps, ref_rejected_logps each.
        stage: the settings; where its pairs come from is not looked at.
        on_update: called after each update.
        seed: of the order of the rows and of dropout.

    Raises:
        TrainingError: the loss is not finite, or TRL gives up.
    """
    trl = load_trl()
    _refuse_adapter_on_head(model)
    losses = ["sigmoid" if stage.loss == "dpo" else "ipo", *["sft"] * (stage.sft_coef > 0)]
    with tempfile.TemporaryDirectory() as folder, borrowed(model), _failing_as_ours("TRL's DPOTrainer"):
        config = trl.DPOConfig(
            **_arguments(model, folder, stage, seed),
            beta=stage.beta,
            loss_type=losses,
            loss_weights=[1.0, stage.sft_coef][: len(losses)],
            precompute_ref_log_probs=True,
        )
        collator = _PairCollator(tokenizer.pad_token_id)
        _run(_dpo_class(trl), model, tokenizer, rows, stage, on_update, args=config, data_collator=collator)


def train_pairwise(
    model: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]], stage: RewardModel, on_update: OnUpdate, *, seed: int
) -> None:
    """Train `model`, which says one number for a row, on pairs of rows: chosen_ids and rejected_ids each.

    The other arguments and errors are those of `train_dpo`.
    """
    trl = load_trl()
    with tempfile.TemporaryDirectory() as folder, borrowed(model), _failing_as_ours("TRL's RewardTrainer"):
        config = trl.RewardConfig(
            **_arguments(model, folder, stage, seed),
            center_rewards_coefficient=stage.centring or None,
        )
        _run(_over_the_update(trl.RewardTrainer, _n_pairs), model, tokenizer, rows, stage, on_update, args=config)


def train_kto(
    model: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]], stage: Preference, on_update: OnUpdate, *, seed: int
) -> None:
    """Train `model` on replies that are good or bad each: ids, mask, label, ref_logps, and the same with KL_ before.

    Those with KL_ are the replies of other rows after the prompt of this one: what the policy makes of them says how
    far it has gone. The other arguments and errors are those of `train_dpo`; rows are taken in their order.
    """
    trl = load_trl()
    _refuse_adapter_on_head(model)
    with tempfile.TemporaryDirectory() as folder, borrowed(model), _failing_as_ours("TRL's KTOTrainer"):
        config = trl.KTOConfig(
            **_arguments(model, folder, stage, seed),
            beta=stage.beta,
            desirable_weight=stage.desirable_weight,
            precompute_ref_log_probs=True,
            train_sampling_strategy="sequential",
        )
        trainer_class = _over_the_update(_kto_class(trl), _n_rated)
        collator = _RatedCollator(tokenizer.pad_token_id)
        _run(trainer_class, model, tokenizer, rows, stage, on_update, args=config, data_collator=collator)


def _over_the_update(trainer_class: Any, count: Callable[..., int]) -> Any:
    """Return `trainer_class` with means over what `count` counts in an update, of the loss and of what is logged.

    Its own are over those of a forward pass, whose means it then averages: the pairs of an epoch's last, shorter pass
    would count for more. Of 3 pairs, all right, and 1 that is wrong the accuracy is 3/4, and not 1/2.
    """

    class OverTheUpdate(trainer_class):  # type: ignore[misc]
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            found = super().get_batch_samples(*args, **kwargs)
            self.batches_of_update = found[0]
            self.counts: dict[str, list[int]] = {}
            return found

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            share = _share_of(inputs, self.batches_of_update, count)
            found = super().compute_loss(model, inputs, *args, **kwargs) * share
            for name, values in self._metrics["train"].items():
                counts = self.counts.setdefault(name, [])
                counts += [count(inputs, name)] * (len(values) - len(counts))
            return found

        def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
            for name, values in self._metrics["train"].items():
                if len(set(counts := self.counts[name])) > 1:
                    values[:] = [sum(n * x for n, x in zip(counts, values, strict=True)) / sum(counts)]
            super().log(logs, *args, **kwargs)

    return OverTheUpdate


def _share_of(inputs: Any, batches: Sequence[Any], count: Callable[[Any], int]) -> float:
    """Factor that makes the mean of per-batch means a mean over all that `batches` count."""
    return count(inputs) * len(batches) / max(sum(map(count, batches)), 1)


def _n_rated(inputs: Any, name: str = "") -> int:
    """Replies of a pass; those with the label that a metric is of, if any."""
    n, n_good = len(inputs["label"]), int(inputs["label"].sum())
    return {"chosen": n_good, "rejected": n - n_good}.get(name.rpartition("/")[2], n)


def _n_pairs(inputs: Any, name: str = "") -> int:
    return len(inputs["input_ids"]) // 2


def _n_chosen_tokens(inputs: Any) -> int:
    return int(inputs["completion_mask"][: _n_pairs(inputs), 1:].sum())


def _exact(trainer_class: Any) -> Any:
    class ExactTrainer(trainer_class):  # type: ignore[misc]
        """Rows are ids and masks already, and the reference's log-probs are in them."""

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

        def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    return ExactTrainer


def _kto_class(trl: Any) -> Any:
    base: Any = _exact(trl.KTOTrainer)

    class WithMargin(base):  # type: ignore[misc]
        """The margin is one of the update's means, of which a pass may have one alone."""

        def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
            means = {name: fmean(values) for name, values in self._metrics["train"].items() if values}
            if {"rewards/chosen", "rewards/rejected"} <= means.keys():
                self._metrics["train"]["rewards/margins"] = [means["rewards/chosen"] - means["rewards/rejected"]]
            super().log(logs, *args, **kwargs)

    return WithMargin


def _dpo_class(trl: Any) -> Any:
    base: Any = _over_the_update(_exact(trl.DPOTrainer), _n_pairs)

    class WithImitation(base):  # type: ignore[misc]
        """The imitation term is a mean over the chosen tokens of an update, too."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = _share_of(inputs, self.batches_of_update, _n_chosen_tokens)
            pairs = _share_of(inputs, self.batches_of_update, _n_pairs)
            first, *imitation = self.args.loss_weights
            self.loss_weights = [first, *(weight * tokens / pairs for weight in imitation)]
            return super().compute_loss(model, inputs, *args, **kwargs)

    return WithImitation


class _PairCollator:
    """Pads pairs to one length, all chosen ones first."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [row[f"{side}_ids"] for side in ("chosen", "rejected") for row in rows]
        masks = [row[f"{side}_mask"] for side in ("chosen", "rejected") for row in rows]
        batch = padded(ids, self.pad_token_id) | {"completion_mask": _filled(masks, 0)}
        for name in ("ref_chosen_logps", "ref_rejected_logps"):
            batch[name] = torch.tensor([row[name] for row in rows], dtype=torch.float32)
        return batch


class _RatedCollator:
    """Pads rated replies to one length, and the same replies after other prompts."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = {"label": torch.tensor([row["label"] for row in rows])}
        for prefix, known in (("", "ref_logps"), ("KL_", "ref_KL_logps")):
            found = padded([row[f"{prefix}ids"] for row in rows], self.pad_token_id)
            batch |= {f"{prefix}{name}": values for name, values in found.items()}
            batch[f"{prefix}completion_mask"] = _filled([row[f"{prefix}mask"] for row in rows], 0)
            batch[known] = torch.tensor([row[known] for row in rows], dtype=torch.float32)
        return batch


def padded(rows: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Right-padded ids of rows, and their padding mask."""
    ones = [[1] * len(row) for row in rows]
    return {"input_ids": _filled(rows, pad_token_id), "attention_mask": _filled(ones, 0)}


def _filled(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows], dtype=torch.long)


def _dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_list([dict(row) for row in rows])


def _arguments(model: Any, folder: str, stage: PairStage, seed: int) -> dict[str, Any]:
    """Shared arguments of TRL's trainers: our rows, optimiser and schedule, no files, no reports."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": stage.at_once,
        "gradient_accumulation_steps": stage.batch_size // stage.at_once,
        "num_train_epochs": stage.epochs,
        "max_grad_norm": stage.optimizer.max_grad_norm or 0.0,
        "learning_rate": stage.optimizer.lr,
        "max_length": None,
        "disable_dropout": False,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": stage.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if stage.gradient_checkpointing else None,
        "use_cpu": device_of(model).type == "cpu",
        "seed": seed,
        "data_seed": seed,
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }


def _optimizers(model: Any, settings: AdamW, total: int) -> tuple[Any, Any]:
    optimizer = settings.build(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: settings.lr_at(update, total) / settings.lr)
    return optimizer, schedule


def _run(
    trainer_class: Any,
    model: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    stage: PairStage,
    on_update: OnUpdate,
    **settings: Any,
) -> None:
    """Train with a callback per update."""
    from transformers import PrinterCallback, TrainerCallback

    total = stage.n_updates(len(rows))

    class Watcher(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.max_steps != total:
                raise TrainingError(
                    "TRL plans another number of updates than this stage", got=str(state.max_steps), expected=str(total)
                )

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                _check_finite(logs, state.global_step)
                control.should_training_stop |= bool(on_update(state.global_step, logs))

    if settings["args"].n_gpu > 1:
        settings["args"]._n_gpu = 1  # TRL refuses more in one process; the model is on one
    trainer = trainer_class(
        model=model,
        train_dataset=_dataset(rows),
        processing_class=tokenizer,
        optimizers=_optimizers(model, stage.optimizer, total),
        **settings,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Watcher())
    trainer.train()


def _check_finite(logs: Mapping[str, float], update: int) -> None:
    for name in ("loss", "grad_norm"):
        if not math.isfinite(logs.get(name, 0.0)):
            raise TrainingError(
                "an update had a loss or a gradient that is not finite",
                where=f"update {update}",
                got=f"{name} {logs[name]}",
                expected="finite numbers",
                hint="lower optimizer.lr; the last checkpoint is from the start of the stage",
            )


async def with_callbacks(
    run: RunContext,
    learn: Callable[[OnUpdate], None],
    on_update: Callable[[int, Mapping[str, float]], None],
    total: int,
) -> None:
    """Have TRL train in a thread, so that callbacks, which may be async, are called between its updates.

    After the last update they are called once the stage is finished, so that a stop there loses none; a cancellation
    that comes during it is raised by what the task awaits next.

    Args:
        run: whose callbacks are called.
        learn: trains, and calls what it is given after each update.
        on_update: logs an update.
        total: number of updates.

    Raises:
        CancelledError: the user or a callback wants to stop; the training has ended after the update that was made,
            which is not the last one.
        RlhfError: `learn` or a callback failed.
    """
    loop, ends = asyncio.get_running_loop(), list[BaseException]()
    n_made, telling = 0, set[asyncio.Task[Any]]()

    async def told(update: int, logs: Mapping[str, float]) -> None:
        nonlocal n_made
        n_made = update
        if (task := asyncio.current_task()) is not None:
            telling.add(task)
        try:
            on_update(update, logs)
            if update < total and not ends:
                await run.check_stop()
        except BaseException as error:  # which would be another one if TRL's thread raised it
            ends.append(error)
        finally:
            telling.clear()

    def between(update: int, logs: Mapping[str, float]) -> bool:
        asyncio.run_coroutine_threadsafe(told(update, logs), loop).result()
        return bool(ends)

    training = asyncio.ensure_future(asyncio.to_thread(learn, between))
    while not training.done():
        try:
            await asyncio.wait([training])
        except asyncio.CancelledError as error:
            ends.append(error)
            for waiting in telling:  # a callback that waits, in a task of its own
                waiting.cancel()
    if failed := training.exception():
        raise failed
    if ends and not (n_made == total and all(isinstance(end, asyncio.CancelledError) for end in ends)):
        raise ends[0]
    if ends and (task := asyncio.current_task()) is not None:
        task.uncancel()  # so that the cancellation counts once
        task.cancel()


@contextmanager
def _failing_as_ours(where: str) -> Iterator[None]:
    with boundary(TrainingError, where=where, hint="use fewer pairs per micro-batch if memory is short"):
        yield


def _refuse_adapter_on_head(model: Any) -> None:
    """Raise ModelError for an adapter on the output layer, which TRL's fused log-probs would pass by."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise ModelError(
            "an adapter on the output layer would not be trained",
            where="policy.lora.target_modules",
            got="the output layer among the targets",
            expected="layers below it",
            hint="use target_modules: all-linear",
        )
