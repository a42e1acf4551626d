"""Evaluation of a policy on a suite, from tasks to report."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from environments.base import properties_of
from rlhf import locks
from rlhf.build.contamination import refuse_trained
from rlhf.build.load_policy import at_play
from rlhf.build.memory_store import refuse_other_kind
from rlhf.build.own_code import code_digests
from rlhf.build.preflight import refuse_unreferenced
from rlhf.build.processes import stopped_by_term
from rlhf.build.record import programs_record, versions
from rlhf.build.reference_trial import try_references_of_suite
from rlhf.build.resume import without_empty
from rlhf.data import Task
from rlhf.digests import FILES, Manifest, mark_of, read_listed, write_listed
from rlhf.errors import DataError, RecipeError, disk
from rlhf.evaluation.attempts import Attempt, digest, openings, read_attempts
from rlhf.evaluation.columns import groups_by
from rlhf.evaluation.folder import PLAN, SUMMARY, TRAJECTORIES, VERSIONS, list_earlier, set_aside
from rlhf.evaluation.play import Played, play_part
from rlhf.evaluation.summary import summarize
from rlhf.finite import finite
from rlhf.progress import RichProgress
from rlhf.recipe.builder import plain_part
from rlhf.recipe.evaluation_request import EvaluationRequest
from rlhf.recipe.evaluation_target import EvaluationTarget, contender
from rlhf.recipe.suites import Part, Suite, hash_of, renewed, values_of_suite
from rlhf.recipe.text import parse, to_text
from rlhf.rollout.runner import RolloutRunner
from rlhf.rollout.scoring import deciding_reward
from rlhf.stats import share_interval
from rlhf.terminal import CleanConsole
from rlhf.training.cautions import TRUNCATED_SHARE
from rlhf.viewer.report import write_report

_CAUTION = Text.assemble(("caution", "yellow"), " ")
#: Differing keys that a message names.
_MOST_NAMED = 4
#: Of the versions on record, what may not change while an evaluation is made, and keys of the engine that may.
_COMPARED = ("environment", "engine", "code", "weights")
_MEMORY_KEYS = frozenset({"max_sessions", "max_batch_tokens", "gpu_memory_utilization", "kv_cache_gb", "sleep"})
#: Keys of a plan that may grow: attempts at each task, as asked for and as they are.
_EACH = "suite.attempts"
_ATTEMPTS = frozenset({"asked.attempts", _EACH})
#: Endings of a model's files.
_OF_MODELS = (".safetensors", ".bin", ".pt", ".json", ".model", ".jinja")


def evaluate(
    asked: EvaluationRequest,
    *,
    found: EvaluationTarget | None = None,
    out: Path | None = None,
    price_in: float | None = None,
    price_out: float | None = None,
    by: Sequence[str] = (),
    console: CleanConsole | None = None,
) -> dict[str, Any]:
    """Evaluate a policy, or go on with the evaluation in `out`.

    Args:
        asked: whom, and on what.
        found: what that is, where it has been found out already.
        out: folder of the evaluation; without one nothing is kept.
        price_in: money for a million tokens read.
        price_out: money for a million tokens sampled.
        by: columns of the data, by each of which the figures are broken down.
        console: for progress.

    Returns:
        plain values: the figures of `summary.json`.

    Raises:
        FolderInUse: another process writes in `out`.
        RlhfError: any problem; the attempts made are kept.
    """
    found = found or contender(asked)
    console = console or CleanConsole(stderr=True)
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlhf-evaluation-")))
        if out is not None:
            _hold(out, stack, console)
        tasks = found.suite.tasks()
        groups = groups_by(itertools.chain(*tasks.values()), by)
        say = _sayer(console)
        refuse_trained(asked, found.recipe, found.checkpoint, tasks, say)
        refuse_unreferenced(found.suite, tasks, of_recipe=not asked.suite)
        if asked.suite:  # the rewards of a recipe were tried before it was trained
            asyncio.run(try_references_of_suite(found.suite, say))
        if found.kind == "model":
            refuse_other_kind(found.suite, found.checkpoint, found.name)
        _list_older(folder, console)
        begin(folder, asked, found, tasks, is_kept=out is not None)
        _caution_fewer(found.suite, tasks, console)
        n_each = found.suite.strategy.n if found.suite.strategy else 1
        with RunningProgress(console, found.suite.attempts, n_each) as progress:
            asyncio.run(_play(found, tasks, folder / TRAJECTORIES, progress))
        summary = finish(folder, found, tasks, price_in, price_out, groups)
        if summary["tokens_mean"] is None and (price_in is not None or price_out is not None):
            console.print(_CAUTION + "the server counts no tokens, so nothing is known of the cost", soft_wrap=True)
        for earlier in list_earlier(folder):
            shutil.rmtree(earlier)  # its attempts are among the others
        if out is not None:
            write_report(out)
        _caution_replies(found.suite, summary, console)
        _refuse_without_room(summary, console)
        return summary


def _sayer(console: CleanConsole) -> Callable[[str], None]:
    """Prints lines, of which those that begin with `caution: ` are cautions."""

    def say(text: str) -> None:
        rest = text.removeprefix("caution: ")
        console.print(_CAUTION + rest if rest != text else text, soft_wrap=True, markup=False, highlight=False)

    return say


def _hold(out: Path, stack: ExitStack, console: CleanConsole) -> None:
    """Create and lock the folder of an evaluation; it is removed if it stays empty."""
    was_there = out.is_dir()
    with disk("the evaluation", out):
        out.mkdir(parents=True, exist_ok=True)
    stack.enter_context(without_empty(out, was_there=was_there))
    for note in stack.enter_context(locks.held(out, "rlhf evaluate")).notes:
        console.print(note, soft_wrap=True, markup=False, highlight=False)


class RunningProgress(RichProgress):
    """A bar over the tasks, with success so far and its 95% interval.

    The interval counts tasks, as if all attempts at one went the same way: it is never too narrow, and with one attempt
    at each task it is that of the report.
    """

    def __init__(self, console: CleanConsole, attempts: int, n_each: int = 1) -> None:
        super().__init__(console, every=50)
        self._attempts = attempts
        self._n_each = n_each  # candidates of an attempt: until they are chosen from, success is that of candidates
        self._n_solved = self._n_counted = 0

    def block(self, played: Played) -> None:
        """A block of tasks is over, now or in an earlier call."""
        self._n_solved += played.n_solved
        self._n_counted += played.n_counted
        for _ in range(played.n_tasks):
            self.advance(f"{played.part}  {self._running(self._n_solved, self._n_counted)}")

    def rollout(self, counts: Any) -> None:
        """Progress of the episodes now running."""
        n_counted = self._n_counted + (counts.n_done - counts.n_failed) // self._n_each
        note = self._running(self._n_solved + counts.n_solved // self._n_each, n_counted)
        self.at(self._done + counts.n_done // (self._attempts * self._n_each), note)
        super().rollout(counts)

    def _running(self, n_solved: int, n_counted: int) -> str:
        if not n_counted:
            return ""
        low, high = share_interval(n_solved / self._attempts, n_counted / self._attempts)
        return f"success {n_solved / n_counted:.1%} ({low:.1%} to {high:.1%})"


def _caution_fewer(suite: Suite, tasks: Mapping[str, list[Task]], console: CleanConsole) -> None:
    for part in suite.parts:
        wanted, got = part.tasks.n, len(tasks[part.name])
        if wanted is not None and got < wanted and not part.tasks.ids:
            console.print(
                _CAUTION
                + f"parts.{part.name}.tasks: the split '{part.tasks.split}' has {got} tasks, "
                + f"fewer than the {wanted} asked for",
                soft_wrap=True,
            )


def _caution_replies(suite: Suite, summary: Mapping[str, Any], console: CleanConsole) -> None:
    """Say how many replies were cut, or empty, where they are more than a few."""
    for part in suite.parts:
        found = summary["parts"][part.name]
        of, limit = found["n_replies"], f"limits.max_tokens: {part.limits.max_tokens}"
        told = {
            f"were cut before they ended, by {limit} or the end of the context (limits.max_context); raise the limit "
            "if they need the room": found["n_cut_replies"],
            "are empty, without text or a call of a tool": found["n_empty_replies"],
        }
        for what, n in told.items():
            if n > TRUNCATED_SHARE * of:
                console.print(_CAUTION + f"parts.{part.name}: {n:,} of {of:,} replies {what}", soft_wrap=True)


def _refuse_without_room(summary: Mapping[str, Any], console: CleanConsole) -> None:
    """Say how many attempts ended at a prompt longer than the context; raise RecipeError if all attempts did."""
    n, of = summary["n_prompt_too_long"], summary["n_attempts"] - summary["n_errors"]
    hint = "raise limits.max_context where the policy reads more, or shorten the prompts or agent.system"
    if n and n == of:
        raise RecipeError(
            "every prompt is longer than the context window, so this evaluation measures nothing",
            where=", ".join(f"parts.{name}" for name in summary["parts"]),
            got=f"{n:,} of {of:,} attempts ended at their first prompt",
            expected="prompts shorter than the context window of the policy",
            hint=hint,
        )
    for name, part in summary["parts"].items():
        if part["n_prompt_too_long"]:
            n, of = part["n_prompt_too_long"], part["n_attempts"] - part["n_errors"]
            console.print(
                _CAUTION + f"parts.{name}: {n:,} of {of:,} attempts count as failed because their first prompt is "
                f"longer than the context window of the policy; {hint}",
                soft_wrap=True,
            )


async def _play(
    found: EvaluationTarget, tasks: Mapping[str, list[Task]], folder: Path, progress: RunningProgress
) -> None:
    suite, n = found.suite, sum(map(len, tasks.values()))
    progress.stage("evaluation", n, 0)
    with stopped_by_term():
        async with at_play(found, progress) as runner_of:
            await _parts(suite, tasks, runner_of, folder, progress)


async def _parts(
    suite: Suite,
    tasks: Mapping[str, list[Task]],
    runner_of: Callable[[Part], RolloutRunner],
    folder: Path,
    progress: RunningProgress,
) -> None:
    for part in suite.parts:
        sampling = part.limits.sampling(suite.sampling.temperature)
        await play_part(
            part.name,
            tasks[part.name],
            runner_of(part),
            folder,
            attempts=suite.attempts,
            sampling=replace(sampling, top_p=suite.sampling.top_p, top_k=suite.sampling.top_k),
            strategy=suite.strategy,
            on_block=progress.block,
        )


def begin(
    folder: Path,
    asked: EvaluationRequest,
    found: EvaluationTarget,
    tasks: Mapping[str, list[Task]],
    *,
    is_kept: bool = True,
) -> None:
    """Write the plan of an evaluation, or check that the folder has the same one, perhaps with fewer attempts per task.

    Args:
        folder: of the evaluation.
        asked: by the user.
        found: what that is.
        tasks: of each part.
        is_kept: whether it may be resumed, so that the weights are read for their digests.

    Raises:
        RecipeError: the folder holds something else.
    """
    plan = {
        "asked": asked.plain,
        "tasks": {name: hash_of(listed) for name, listed in tasks.items()},
        "suite": values_of_suite(found.suite),
        **({"policy": plain_part("policy", found.recipe.policy)} if found.recipe else {}),
    }
    path, written = folder / PLAN, parse(to_text(plan), "plan")
    if path.is_file():
        held = parse(read_listed(path), str(path))
        held |= renewed({key: held[key] for key in ("suite", "policy") if key in held}, folder)
        before, now = ({k: v.get(k) for k in plan if k in held} for v in (held, written))
        if (folder / VERSIONS).is_file():
            record = json.loads(read_listed(folder / VERSIONS))
            if found.recipe and "engine" in record:
                record |= renewed({"engine": record["engine"]}, folder)
            before |= _kept(record, record)
            now |= _kept(json.loads(json.dumps(versions_of(found, is_kept=is_kept))), record)
        before, now = flat(before), flat(now)
        differing = sorted(key for key in before.keys() | now.keys() if not _is_same(before.get(key), now.get(key)))
        is_grown = _ATTEMPTS.issuperset(differing) and now.get(_EACH, 0) > before.get(_EACH, 0)
        # What branches off an attempt is numbered after the attempts from the start, so more of these move it.
        if differing and is_grown and not (found.suite.strategy and found.suite.strategy.rollout.n_rounds):
            set_aside(folder)
            write_listed(path, to_text(plan))
        elif differing:
            raise RecipeError(
                "this folder holds another evaluation",
                where=f"--out {folder}",
                got="; ".join(f"{key} {before.get(key)}, now {now.get(key)}" for key in differing[:_MOST_NAMED])
                + (f"; and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""),
                expected="a new folder, or the command that started this one, or the same with more --attempts",
                hint="give another --out",
            )
        return
    if folder.exists() and not locks.is_empty(folder):
        raise RecipeError(
            "the folder of the evaluation is not empty",
            where=f"--out {folder}",
            got="other files",
            expected="a new folder, or that of an evaluation to resume",
            hint="give another --out",
        )
    with disk("the evaluation", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_listed(folder / VERSIONS, json.dumps(versions_of(found, is_kept=is_kept), indent=1) + "\n")
        write_listed(path, to_text(plan))


def _is_same(before: Any, now: Any) -> bool:
    """True if two values of a plan agree; an earlier version wrote files of the working folder without their folder."""
    return bool(before == now or (isinstance(before, str) and now == os.path.abspath(before)))


def _kept(versions: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Of versions, what is in `record` and may not change while an evaluation is made."""
    names = {name: [key for key in record[name] if key not in _MEMORY_KEYS] for name in _COMPARED if name in record}
    return {name: {key: versions[name].get(key) for key in keys} for name, keys in names.items()}


def _list_older(folder: Path, console: CleanConsole) -> None:
    """List the files of an evaluation without digests, with a caution."""
    if (folder / PLAN).is_file() and not Manifest(folder).is_there:
        Manifest(folder).record_all(PLAN, VERSIONS)
        console.print(
            _CAUTION + f"{folder} has no digests of its files: what they hold now is taken for theirs",
            soft_wrap=True,
        )


def versions_of(found: EvaluationTarget, *, is_kept: bool = True) -> dict[str, Any]:
    """Versions of packages, interpreter, hardware, engine and environments, deciding rewards, and digests."""
    part, recipe = found.suite.parts[0], found.recipe
    return {
        **versions(part.environment),
        **{key: value for p in found.suite.parts for key, value in programs_record(p.rewards).items()},
        "environment": {p.name: properties_of(p.environment).package for p in found.suite.parts},
        "deterministic": {p.name: properties_of(p.environment).deterministic for p in found.suite.parts},
        "solved_by": {p.name: deciding_reward(p.rewards) for p in found.suite.parts},
        "engine": plain_part("engine", recipe.engine) if recipe else {"kind": found.kind},
        "code": code_digests(values_of_suite(found.suite)),
        "weights": _weights_digest(found) if is_kept else {},
    }


def _weights_digest(found: EvaluationTarget) -> dict[str, str]:
    """File -> SHA-256 of the model's own files here; of a checkpoint the list of them, which holds their digests."""
    path = plain_part("policy", found.recipe.policy).get("path") if found.recipe else None
    digests = {}
    for role, folder in (("base", Path(path).expanduser() if path else None), ("checkpoint", found.checkpoint)):
        if folder is None:
            continue
        own = sorted(file for file in folder.glob("*") if file.suffix in _OF_MODELS and file.is_file())
        listed = [folder / FILES] if (folder / FILES).is_file() else own
        digests.update({f"{role}/{file.name}": mark_of(file).sha256[:16] for file in listed})
    return digests


def finish(
    folder: Path,
    found: EvaluationTarget,
    tasks: Mapping[str, list[Task]],
    price_in: float | None = None,
    price_out: float | None = None,
    by: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """Make the figures from the stored attempts alone, and write them. They hold no times: they can be compared."""
    attempts = read_attempts(folder / TRAJECTORIES)
    figures = summarize(attempts, price_in=price_in, price_out=price_out, by=by)
    summary = {
        "policy": found.name,
        "suite": found.suite.name,
        "attempts": found.suite.attempts,
        "metric": found.suite.metric,
        **({"strategy": plain_part("strategy", found.suite.strategy)} if found.suite.strategy else {}),
        "data": _data(found.suite, tasks, attempts),
        **(figures if found.has_tokens or _are_counted(found, attempts) else _without_tokens(figures)),
    }
    write_listed(folder / SUMMARY, json.dumps(finite(summary), indent=1) + "\n")
    return summary


def _data(suite: Suite, tasks: Mapping[str, list[Task]], attempts: list[Attempt]) -> dict[str, Any]:
    """Fingerprint of the evaluation's data: hashes of the tasks and of their first observations, where these are fixed.

    Raises:
        DataError: two attempts at one task of a deterministic environment have different openings.
    """
    said = openings(attempts)
    fixed = {part.name for part in suite.parts if properties_of(part.environment).deterministic}
    for task in itertools.chain.from_iterable(tasks[name] for name in fixed):
        if len(said.get(task.id, ())) > 1:
            raise DataError(
                "two attempts at one task have different openings",
                where=task.id,
                got="different openings in two attempts",
                expected="tasks that do not change, as the environment declares deterministic=True",
                hint="run `rlhf check environment`",
            )
    return {
        part.name: {
            "package": properties_of(part.environment).package,
            "split": part.tasks.split,
            "n_tasks": len(tasks[part.name]),
            "tasks": hash_of(tasks[part.name]),
            "openings": digest(f"{t.id} {min(said[t.id])}" for t in tasks[part.name] if t.id in said)
            if part.name in fixed
            else None,
        }
        for part in suite.parts
    }


def _are_counted(found: EvaluationTarget, attempts: list[Attempt]) -> bool:
    """True if the policy's server counted the tokens of every reply."""
    return found.kind == "endpoint" and all(a.is_counted for a in attempts if a.n_turns)


def _without_tokens(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of a policy that samples none."""
    spent = {name: value for name, value in figures["per_solved"].items() if name == "turns"}
    return {**figures, "tokens_mean": None, "per_solved": spent}


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested values under dotted names; what has dots in its name stays readable."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{path}.{key}" if path else str(key)
        found.update(flat(value, name) if isinstance(value, Mapping) and value else {name: value})
    return found
