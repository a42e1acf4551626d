"""Training of a reward model on pairs, and its held-out accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rewards.models.model_folder import pooled
from rlhf.training.context import RunContext
from rlhf.training.contrib.calibration import bins_of, sureness, tell_held_out
from rlhf.training.contrib.reward_model_pointwise import train_pointwise
from rlhf.training.reward_model_training import adapted, save_in, scoring_model, split_by_task
from rlhf.training.stages.preference_training import pairs_for, seed_of
from rlhf.training.stages.reward_model import RewardModel
from rlhf.training.stages.trl_trainers import train_pairwise, with_callbacks

#: Of what TRL logs, what is kept, by our names.
_LOGGED = {
    "loss": "reward_model/loss",
    "accuracy": "reward_model/train_accuracy",
    "margin": "reward_model/margin",
    "mean_reward": "reward_model/score_mean",
    "grad_norm": "optimizer/grad_norm",
}


async def train_reward_model(run: RunContext, stage: RewardModel) -> None:
    """Train a reward model on most of the pairs, measure it on the others. An interrupted stage starts again."""
    if stage.objective != "pairwise":
        await train_pointwise(run, stage)
        return
    run.save()
    paired = await pairs_for(run, stage.pairs, stage.split, stage.rollout)
    seen, unseen = split_by_task(paired.pairs, stage.held_out, f"{run.seed}/{run.state.stage}/held_out")
    total = stage.n_updates(len(seen))
    await run.release_engine_memory()
    run.progress.stage("reward model", total, 0)

    def on_update(update: int, logs: Mapping[str, float]) -> None:
        values = {ours: float(logs[theirs]) for theirs, ours in _LOGGED.items() if theirs in logs}
        values["optimizer/lr"] = stage.optimizer.lr_at(update - 1, total)
        run.log(update, {**values, **(paired.figures if update == 1 else {})}, delivered=False)
        run.progress.advance(f"loss {values['reward_model/loss']:.3f}")

    run.reseed(0)
    model, merged = adapted(scoring_model(run.policy), stage.lora)
    rows = [{"chosen_ids": list(p.chosen.token_ids), "rejected_ids": list(p.rejected.token_ids)} for p in seen]
    tokenizer = run.policy.tokenizer
    await with_callbacks(
        run,
        lambda tell: train_pairwise(model, tokenizer, rows, stage, tell, seed=seed_of(run)),
        on_update,
        total,
    )
    model = merged()
    chosen = scores(model, [p.chosen.token_ids for p in unseen], stage.at_once)
    rejected = scores(model, [p.rejected.token_ids for p in unseen], stage.at_once)
    save_in(run.folder, f"reward_model/{run.state.label}", model, run.policy.tokenizer)
    _tell(run, [c - r for c, r in zip(chosen, rejected, strict=True)], [p.task_id for p in unseen], total)
    run.advance(step=total, n_updates=total, finished=True, n_episodes=run.state.n_episodes + paired.n_episodes)


def _tell(run: RunContext, ahead: Sequence[float], task_ids: Sequence[str], step: int) -> None:
    """Log and print accuracy and calibration on held-out pairs.

    `ahead` is by how much the better side of each pair scores higher.
    """
    right = [x > 0 for x in ahead]
    bins = bins_of([sureness(x) for x in ahead], right, task_ids, run.estimate, least=0.5)
    counts = {"of": "pairwise", "n": len(right), "n_tasks": len(set(task_ids))}
    tell_held_out(run, right, task_ids, bins, counts, step)


def scores(model: Any, rows: Sequence[Sequence[int]], at_once: int) -> list[float]:
    """The number that the model says of each row."""
    model.eval()
    return [x for (x,) in pooled(model, [(row, ()) for row in rows], at_once)]
