"""`rlhf.evaluate`: a policy on fixed tasks, from Python."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.api import arguments as checked
from rlhf.api.background import outside_of_loops
from rlhf.api.frames import Frame, frame_of
from rlhf.api.train import TrainResult, overrides_of
from rlhf.api.values import Arguments
from rlhf.commands.evaluate import measured
from rlhf.commands.output import Stopped, errors
from rlhf.errors import RecipeError
from rlhf.finite import finite
from rlhf.given_parts import given
from rlhf.recipe.describe import given as described
from rlhf.recipe.evaluation_request import EvaluationRequest, is_model, is_program
from rlhf.terminal import CleanConsole


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        policy, suite: the evaluated policy and suite.
        success: success rate; None without valid attempts.
        interval: its 95% interval.
        n: attempts counted.
        n_errors: attempts lost to infrastructure errors, which are excluded.
        summary: all metrics, as in `summary.json`.
        out: folder of the evaluation, if it was stored.
    """

    policy: str
    suite: str
    success: float | None
    interval: tuple[float | None, float | None]
    n: int
    n_errors: int
    summary: Mapping[str, Any] = field(repr=False)
    out: Path | None = None

    @property
    def metrics(self) -> Frame:
        """Success, score and each of several rewards with their intervals, of all tasks, each part, type and group.

        `of` is `all`, `parts`, `types` or a column that the results are broken down by.
        """
        kinds = {"all": {"": self.summary}, **{key: self.summary[key] for key in ("parts", "types")}}
        kinds |= self.summary.get("by", {})
        return frame_of(
            [
                {"of": of, "name": name, "metric": metric, **{key: figures[key] for key in _FIGURES}}
                for of, groups in kinds.items()
                for name, one in groups.items()
                for metric, figures in _estimates(one).items()
            ]
        )


def _estimates(figures: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    rewards = figures["rewards"] if len(figures["rewards"]) > 1 else {}
    return {
        **{name: figures[name] for name in ("success", "score")},
        **{f"reward/{name}": one for name, one in rewards.items()},
    }


_FIGURES = ("value", "low", "high", "n")
_CALL = "rlhf.evaluate"


def evaluate(
    policy: str | Path | TrainResult = "",
    *,
    suite: str | Path | Mapping[str, Any] = "",
    rewards: Any = None,
    environment: Any = None,
    agent: Any = None,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    split: str | None = None,
    n: int | None = None,
    attempts: int | None = None,
    strategy: str | Mapping[str, Any] = "",
    endpoint: str = "",
    model: str = "",
    tries: int | None = None,
    command: str = "",
    programs: int | None = None,
    price_in: float | None = None,
    price_out: float | None = None,
    by: str | Sequence[str] = (),
    allow_overlap: bool = False,
    progress: bool = True,
    **overrides: Any,
) -> Evaluation:
    """Evaluate a policy on unseen tasks, with 95% intervals; arguments are those of `rlhf evaluate` but for --verify.

    Args:
        policy: a recipe, run, checkpoint or result of `rlhf.train`; with a suite or environment also a model, `random`
            or `oracle`.
        suite: evaluation suite by name, file or keys; by default the recipe's evaluation, or for an endpoint or a model
            one of `environment`, `rewards`, `agent` and the key `limits`.
        rewards: as in `rlhf.train`; objects passed to a run from Python are passed again.
        environment: the same.
        agent: the same.
        out: output folder; attempts it already holds are reused, also for more `attempts`.
        checkpoint: a checkpoint or model folder; the run's newest checkpoint by default.
        split: task split.
        n: number of tasks of each environment.
        attempts: attempts per task, for pass@k.
        strategy: test-time strategy: a kind, or a mapping with a kind and keys.
        endpoint: address of the OpenAI-compatible server of the model to evaluate.
        model: name of the model on that server.
        tries: maximum tries of a request to that server.
        command: command that starts an external agent, which samples through the gateway.
        programs: long-lived agent processes that play attempts in turn; one process per attempt by default.
        price_in: price of a million prompt tokens.
        price_out: price of a million sampled tokens.
        by: columns of the data to break results down by: `"category"`, or several; see `Evaluation.metrics`.
        allow_overlap: whether to allow tasks that the policy was trained on.
        progress: whether to print progress.
        overrides: recipe overrides.

    Raises:
        Stopped: the user stopped it.
        RlhfError: any other problem; finished attempts are kept in `out`.
    """
    folder = checked.folder(out, _CALL, "out", "evaluations/mine")
    weights = checked.folder(checkpoint, _CALL, "checkpoint", "runs/mine-seed0/checkpoints/0-final-1")
    arguments = Arguments((folder.parent if folder else Path("runs")) / "tasks")
    target, parts = _target(policy), {"rewards": rewards, "environment": environment, "agent": agent}
    is_alone = bool(endpoint) or is_program(target) or is_model(target)  # nothing is trained on the rows of the call
    if not suite and environment is not None and is_alone:
        own = {"limits": overrides.pop("limits", None), **parts}
        suite, parts = {"parts": {"tasks": {key: value for key, value in own.items() if value is not None}}}, {}
    asked = EvaluationRequest(
        target=target,
        overrides=tuple(overrides_of(arguments, {**parts, **overrides}, joins_rewards=True)),
        suite=arguments.suite(suite, as_test=is_alone and split in (None, "test"))
        if isinstance(suite, Mapping)
        else checked.text(suite, _CALL, "suite", "quick"),
        split=None if split is None else checked.text(split, _CALL, "split", "test"),
        n=checked.count(n, _CALL, "n"),
        attempts=checked.count(attempts, _CALL, "attempts"),
        strategy=_strategy(strategy, arguments),
        also_trained=checked.flag(allow_overlap, _CALL, "allow_overlap"),
        endpoint=checked.text(endpoint, _CALL, "endpoint", "http://localhost:8000/v1"),
        model=checked.text(model, _CALL, "model", "Qwen/Qwen3-0.6B"),
        tries=checked.count(tries, _CALL, "tries"),
        command=checked.text(command, _CALL, "command", "venv/bin/python agent.py"),
        programs=checked.count(programs, _CALL, "programs"),
    )
    prices = checked.price(price_in, _CALL, "price_in"), checked.price(price_out, _CALL, "price_out")
    columns = checked.names(by, _CALL, "by", "category")
    console = errors() if checked.flag(progress, _CALL, "progress") else CleanConsole(quiet=True)

    def work() -> dict[str, Any]:
        with given(arguments.parts):
            return measured(asked, weights, folder, *prices, columns, console=console)[1]

    try:
        summary: Any = finite(outside_of_loops(work))
    except (asyncio.CancelledError, KeyboardInterrupt):
        hint = f"the same call with out={str(out)!r} resumes it" if out else "give out=FOLDER to keep finished attempts"
        raise Stopped("stopped", where=_CALL, hint=hint) from None
    return _evaluation(summary, folder)


def _evaluation(summary: dict[str, Any], folder: Path | None) -> Evaluation:
    found = summary["success"]
    return Evaluation(
        policy=summary["policy"],
        suite=summary["suite"],
        success=found["value"],
        interval=(found["low"], found["high"]),
        n=found["n"],
        n_errors=summary["n_errors"],
        summary=summary,
        out=folder,
    )


def _target(policy: Any) -> str:
    """Name of what is evaluated."""
    if isinstance(policy, TrainResult):
        return str(policy.run)
    if not isinstance(policy, str | os.PathLike):
        raise RecipeError(
            "not a policy",
            where=f"{_CALL}(policy)",
            got=described(policy),
            expected="a recipe, run, checkpoint or model by its name or path, or a result of rlhf.train",
            hint="rlhf.evaluate('runs/quickstart-seed0')",
        )
    return str(policy)


def _strategy(strategy: Any, arguments: Arguments) -> str:
    """Strategy as `--strategy` takes it: a kind, or a mapping as text."""
    if isinstance(strategy, str):
        return strategy
    if not isinstance(strategy, Mapping):
        raise RecipeError(
            "not a strategy",
            where=f"{_CALL}(strategy=...)",
            got=described(strategy),
            expected="a kind, or a mapping with a kind and keys",
            hint="write strategy={'kind': 'best_of_n', 'n': 8}, or leave it out",
        )
    return checked.yaml_line(arguments.plain(strategy, "strategy"))
