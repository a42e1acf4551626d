"""Between two steps: evaluations, new references, and rewards whose models are renewed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf.errors import TrainingError
from rlhf.rollout.scoring import Weighted
from rlhf.spans import span
from rlhf.training.contrib.judge_refresh import PolicyJudge, model_of, renewed
from rlhf.training.contrib.reward_refresh import Refresher, refreshed
from rlhf.training.hooks.reference_reset import watch
from rlhf.training.reward_model_training import save_in
from rlhf.training.run import Run
from rlhf.training.stage_state import StageComponents

#: Folders of a run with what its stages leave.
_MODELS, _JUDGES = "reward_model", "judges"


async def between(run: Run, parts: StageComponents) -> None:
    """Do what is due after a step, or was when a run was stopped there."""
    await watch(run, parts)
    if parts.refresher is not None and parts.refresher.is_due:
        await run.breathe()
        with span("reward models"):
            _refresh(run, parts.refresher)
    if parts.judge_keeper is not None and parts.judge_keeper.is_due:
        with span("reward models"):
            await _renew(run, parts.judge_keeper)


def serve(run: Run, parts: StageComponents) -> None:
    """Score with the models that the stage renews, from now on."""
    if parts.refresher is not None:
        _replace(run, parts.refresher.name, parts.refresher.live)
    if parts.judge_keeper is not None:
        _replace(run, parts.judge_keeper.name, parts.judge_keeper.live)


def leave(run: Run, parts: StageComponents) -> None:
    """At the end of a stage: write the models that it renewed, and go on scoring with them."""
    label, tokenizer = run.state.label, run.policy.tokenizer
    refresher, keeper = parts.refresher, parts.judge_keeper
    if refresher is not None:
        save_in(run.folder, f"{_MODELS}/{label}", refresher.model, tokenizer)
        _read(run, refresher.name, refresher.reward, _MODELS, label)
        run.progress.say(
            f"the reward model, trained further {refresher.n_refreshes} times: {run.folder / _MODELS / label}"
        )
    if keeper is not None:
        if keeper.judge is not None:
            save_in(run.folder, f"{_JUDGES}/{label}", model_of(run.policy, keeper.judge), tokenizer)
        _read(run, keeper.name, keeper.reward, _JUDGES, label)
        keeper.close()


def serve_left(run: Run, stages: Sequence[Any]) -> None:
    """Score with what the stages have left that are over, as a run does that was never stopped."""
    for index, stage in enumerate(stages[: run.state.stage + run.state.finished]):
        label = f"{index}-policy_gradient"
        if (refresh := getattr(stage, "reward_refresh", None)) is not None:
            _read(run, *refreshed(refresh, run.collector.rewards), _MODELS, label)
        if (renewal := getattr(stage, "judge_refresh", None)) is not None:
            _read(run, *renewed(renewal, run.collector.rewards), _JUDGES, label)


def _read(run: Run, name: str, reward: Any, kind: str, label: str) -> None:
    """Let a reward ask the model that a stage left; its own where the stage left none."""
    folder = run.folder / kind / label
    _replace(run, name, replace(reward, path=str(folder)) if folder.is_dir() else reward)


def _replace(run: Run, name: str, reward: Any) -> None:
    rewards: Mapping[str, Weighted] = run.collector.rewards
    run.collector = replace(run.collector, rewards={**rewards, name: replace(rewards[name], reward=reward)})


def _refresh(run: Run, refresher: Refresher) -> None:
    """Train the reward model further, log it, and say so where it has become worse."""
    if run.estimate is None:
        raise TrainingError("nothing says how sure a share is", where="reward_refresh", expected="Run.estimate")
    run.progress.note(f"training the reward model of {refresher.name} further")
    figures = refresher.refresh(run.estimate)
    run.log(run.state.step, figures, delivered=False)
    low, high = (figures.get(f"refresh/accuracy_{end}") for end in ("before_low", "after_high"))
    if low is not None and high is not None and high < low:
        run.say_once(
            {
                "a reward model became worse": f"caution: the reward model of {refresher.name} became worse by what it "
                f"learnt after step {run.state.step}, from {figures['refresh/accuracy_before']:.1%} to "
                f"{figures['refresh/accuracy_after']:.1%} of held-out pairs; lower reward_refresh.optimizer.lr"
            }
        )


async def _renew(run: Run, keeper: PolicyJudge) -> None:
    """Audit a judge, log it, let it judge if it passes, and say what came of it."""
    figures, asking = await keeper.renew(run)
    run.log(run.state.step, figures, delivered=False)
    accuracy = f"{figures['judge/audit_accuracy']:.1%} (95% interval {figures['judge/audit_accuracy_low']:.1%} to "
    accuracy += f"{figures['judge/audit_accuracy_high']:.1%}) of {figures['judge/n_audited']:.0f} audited pairs"
    if asking is not None:
        _replace(run, keeper.name, asking)
        run.progress.say(f"the judge of {keeper.name} after step {run.state.step} is right on {accuracy}")
        return
    run.progress.say(
        f"caution: the policy of step {keeper.next_step} does not become the judge of {keeper.name}, as it is right on "
        f"{accuracy} and judge_refresh.least is {keeper.settings.least:g}; the judge stays until the stage ends"
    )
