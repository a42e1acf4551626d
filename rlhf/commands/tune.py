"""`rlhf tune`: values of a recipe's keys, chosen by successive halving on held-out tasks."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rlhf.commands.output import (
    EXIT_INTERRUPTED,
    AsJson,
    Overrides,
    Stopped,
    caution,
    command,
    errors,
    print_json,
    results,
)
from rlhf.errors import RecipeError, RlhfError, TrainingError, whole
from rlhf.evaluation.judging import OF_TRAINING
from rlhf.renamed import without_warnings

if TYPE_CHECKING:
    from rlhf.evaluation.paired import Paired
    from rlhf.recipe import Recipe

#: `key=value` overrides of one choice; none for the recipe as it is.
Choice = tuple[str, ...]
_FILE = "tune.json"
#: Keys that say what is compared, rather than how it is trained.
_MEASURES = re.compile(rf"seed|name|evaluation.*|.*\.steps|environment(?!(\..*)?\.({'|'.join(OF_TRAINING)})$).*")
#: Differing keys that a message names.
_MOST_NAMED = 4


@command
def tune(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a name from `rlhf recipes`.")],
    overrides: Overrides = None,
    tried: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="KEY=A,B,...", help="Values to search over. Repeat for several keys."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Seeds per configuration, and as many new ones for the final comparison.")
    ] = 2,
    reduction_factor: Annotated[int, typer.Option(min=2, help="The best 1/N of each round advance.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs (default: runs/tune-NAME).")] = None,
    as_json: AsJson = False,
) -> None:
    """Search hyperparameters by successive halving (Jamieson & Talwalkar 2016).

    Every combination of --try, and the unchanged recipe, is trained briefly and evaluated on
    evaluation.validation_split; the best advance to longer runs. The winner and the unchanged recipe are then trained
    with new seeds and evaluated on evaluation.split. Each evaluation has evaluation.n_tasks tasks. Run the same command
    again to continue an interrupted search.

    Examples: rlhf tune quickstart --try stages.1.optimizer.lr=2e-4,5e-4,1e-3 --try stages.1.group_size=4,8
    """
    from rlhf.recipe import load

    own = list(overrides or [])
    loaded = load(recipe, own)
    tuning = Tuning(recipe, tuple(own), loaded, out or Path("runs") / f"tune-{loaded.name}", seeds)
    choices = tuning.distinct(choices_of(tried or []))
    plan = rounds(len(choices), tuning.steps, reduction_factor)
    tuning.check(choices, plan[0][1])
    of_rounds = ", then ".join(f"{n} configurations for {steps} steps" for n, steps in plan)
    each = f"{seeds} seed{'s' * (seeds > 1)} each"
    last = f"the best and the recipe as it is for {tuning.steps} steps, {each}, new ones"
    errors().print(f"{of_rounds}, {each}; last {last}", highlight=False)
    left: Sequence[Choice] = choices
    for n, (_, steps) in enumerate(plan):
        left = tuning.best(left, steps, plan[n + 1][0] if n + 1 < len(plan) else 1)
    judged = tuning.judged(left[0]) if left[0] else None
    found = _result(tuning, left[0], judged)
    if as_json:
        print_json(found)
    else:
        _show(found, recipe, own)


def choices_of(tried: Sequence[str]) -> list[Choice]:
    """All combinations of `KEY=A,B,...`; commas within brackets do not separate.

    >>> choices_of(["a=1,2", "b={x: 1, y: 2},z"])[:2]
    [('a=1', 'b={x: 1, y: 2}'), ('a=1', 'b=z')]

    Raises:
        RecipeError: no key, no value, a key twice, or a key that defines the measurement.
    """
    values: dict[str, list[str]] = {}
    for text in tried:
        key, _, given = text.partition("=")
        found = list(_parted(given))
        measures = _MEASURES.fullmatch(key) is not None
        if not key or "" in found or key in values or measures:
            raise RecipeError(
                "invalid --try",
                where=f"--try {text}",
                got="a key that defines the comparison" if measures else "a key twice" if key in values else text,
                expected="KEY=A,B,... of another key, with a value before and after each comma",
                hint="name a key of a stage, such as stages.0.environment for what is trained on alone"
                if measures
                else "--try stages.0.optimizer.lr=1e-4,3e-4",
            )
        values[key] = [f"{key}={one}" for one in found]
    if not values:
        raise RecipeError(
            "no values to choose from",
            where="rlhf tune",
            got="no --try",
            expected="a key with values",
            hint="--try stages.0.optimizer.lr=1e-4,3e-4",
        )
    return list(itertools.product(*values.values()))


def _parted(text: str) -> Iterator[str]:
    """Parts between commas outside of brackets."""
    depth, part = 0, ""
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            yield part.strip()
            part = ""
        else:
            part += letter
    yield part.strip()


def rounds(n: int, steps: int, reduction_factor: int) -> list[tuple[int, int]]:
    """Choices and steps of each round, the last with all steps, each before it with one `reduction_factor`-th.

    >>> rounds(10, 36, 3)
    [(10, 4), (4, 12), (2, 36)]
    """
    sizes = []
    while n > 1:
        sizes.append(n)
        n = -(-n // reduction_factor)
    return [(size, max(1, round(steps / reduction_factor**later))) for later, size in enumerate(reversed(sizes))][::-1]


@dataclass(frozen=True)
class Tuning:
    """Runs of one tuning, in one folder.

    Attributes:
        recipe, overrides: what all choices share, as given.
        loaded: the recipe as it is.
        out: folder of runs, and of what they came to.
        seeds: of each choice.
    """

    recipe: str
    overrides: tuple[str, ...]
    loaded: Recipe
    out: Path
    seeds: int

    @property
    def steps(self) -> int:
        """Steps of the last stage. Raises RecipeError where it has none."""
        from rlhf.training.stages.policy_gradient import PolicyGradient

        stage = self.loaded.stages[-1]
        if isinstance(stage, PolicyGradient):
            return stage.steps
        raise RecipeError(
            "only a policy_gradient stage can be tuned",
            where=f"stages.{len(self.loaded.stages) - 1}",
            got=type(stage).__name__,
            expected="a policy_gradient stage as the last one",
            hint="for other stages: rlhf train with each value, and rlhf compare",
        )

    def distinct(self, choices: Sequence[Choice]) -> list[Choice]:
        """The recipe as it is, and the choices that differ from it and from each other.

        Raises:
            RecipeError: a choice is no recipe, or none differs.
        """
        from rlhf.recipe import load
        from rlhf.recipe.model import values_of

        found: list[tuple[dict[str, Any], Choice]] = []
        for choice in ((), *choices):
            values = values_of(load(self.recipe, [*self.overrides, *choice]))
            same = next((other for known, other in found if known == values), None)
            if same is None:
                found.append((values, choice))
            else:
                errors().print(f"{_words(choice)}: the same as {_words(same)}, and left out", highlight=False)
        if len(found) == 1:
            raise RecipeError(
                "no value to choose",
                where="rlhf tune",
                got=", ".join(map(_words, choices)),
                expected="a value that the recipe does not have",
                hint="--try with other values",
            )
        return [choice for _, choice in found]

    def held_out(self, choice: Choice = ()) -> list[str]:
        """Overrides that measure a choice on the validation split alone."""
        from rlhf.recipe import load
        from rlhf.recipe.model import values_of

        stages = values_of(load(self.recipe, [*self.overrides, *choice]))["stages"]
        watching = [f"stages.{i}.evaluate_every=0" for i, stage in enumerate(stages) if stage.get("evaluate_every")]
        usual = ["evaluation.validation_n_tasks=64"] if watching else []
        patient = [f"stages.{i}.patience=null" for i, stage in enumerate(stages) if stage.get("patience") is not None]
        for i, stage in enumerate(stages):
            reset = stage.get("reference_reset") or {}
            if reset.get("patience") is not None:
                others = reset.get("max_kl") is not None or reset.get("every") is not None
                patient.append(f"stages.{i}.reference_reset{'.patience' * others}=null")
        idle = ["cluster.eval_servers=0"] if self.loaded.cluster.eval_servers else []
        return [f"evaluation.split={self.loaded.evaluation.validation_split}", *usual, *watching, *patient, *idle]

    def check(self, choices: Sequence[Choice], first: int) -> None:
        """Refuse choices that are no recipes, and a folder of another tuning, before anything is trained.

        Args:
            choices: with the recipe as it is.
            first: steps of the first round, which has to be a recipe too.
        """
        from rlhf.build.own_code import changed_code, code_digests
        from rlhf.build.revise import scheduled
        from rlhf.recipe import load
        from rlhf.recipe.model import differing, values_of
        from rlhf.recipe.splits import check_declared_split

        judge = self.loaded.evaluation
        check_declared_split(judge.validation_split, self.loaded.environment, "evaluation.validation_split")
        stretched: dict[str, None] = {}
        for choice in choices:
            words = [*self.overrides, *choice, *self.held_out(choice)]
            whole_run: Any = load(self.recipe, words)
            _refuse_judged_otherwise(choice, self.loaded, whole_run)
            stretched |= {told: None for _, told in scheduled(whole_run.stages[-1])}
            try:
                load(self.recipe, [*words, f"stages.{len(self.loaded.stages) - 1}.steps={first}"])
            except RecipeError as error:
                error.got += f", with {first} of {self.steps} steps in the first round"
                error.hint = f"choose among fewer values, or with a larger --reduction-factor; else {error.hint}"
                raise
        if judge.validation_split == judge.split:
            raise RecipeError(
                "selection and final evaluation need different tasks",
                where="evaluation.validation_split",
                got=judge.split,
                expected=f"another split than evaluation.split: {judge.split}",
                hint=f"evaluation.split={'dev' if judge.split == 'test' else 'test'}",
            )
        asked, recipe = [self.recipe, *self.overrides], json.loads(json.dumps(values_of(self.loaded), default=str))
        there = self._record()
        changed = list(differing(_renewed(there.get("recipe", recipe), self.loaded.base), recipe))
        if there.get("asked", asked) != asked or changed:
            raise RecipeError(
                "another recipe was tuned in this folder",
                where=str(self.out / _FILE),
                got=f"other values of {', '.join(changed[:_MOST_NAMED])}" if changed else " ".join(there["asked"]),
                expected=" ".join(asked) + ", as it is now" * bool(changed),
                hint="--out FOLDER",
            )
        search = {
            "choices": [list(choice) for choice in choices],
            "steps of the first round": first,
            "seeds": self.seeds,
        }
        if (before := there.get("search", search)) != search:
            raise RecipeError(
                "another search was begun in this folder",
                where=str(self.out / _FILE),
                got=", ".join(f"{name} {search[name]}" for name in search if search[name] != before[name])[:200],
                expected=", ".join(f"{name} {before[name]}" for name in search if search[name] != before[name])[:200],
                hint="--out FOLDER: finished rounds cannot be continued with another schedule",
            )
        code = code_digests(recipe)
        for name in changed_code(there.get("code", {}), code):
            caution(
                f"{name} has changed since this search began: runs before and after are not comparable; put the file "
                f"back, or search again with another --out"
            )
        for told in stretched if first < self.steps else ():
            caution(
                f"{told} the steps of each round, {first} in the first and {self.steps} in the last, and is stretched "
                "when a run continues: the best after few steps need not be the best of whole runs"
            )
        self._write({"asked": asked, "recipe": recipe, "code": code, "search": search, "success": {}, **there})

    def best(self, choices: Sequence[Choice], steps: int, n: int) -> list[Choice]:
        """The `n` choices of the highest mean success on held-out tasks after this many steps; ties to earlier ones."""
        means = {choice: self._mean(choice, steps) for choice in choices}
        told = sorted(means, key=lambda choice: -means[choice])
        for choice in told:
            mean = f"{means[choice]:6.1%}" if means[choice] >= 0 else "failed"
            errors().print(f"{steps:>5} steps  {mean}  {_words(choice)}", highlight=False, soft_wrap=True)
        if means[told[0]] < 0:
            raise TrainingError(
                "every configuration failed",
                where=str(self.out),
                got="a failure of each",
                expected="at least one that trains",
                hint="rlhf train with one of them says why",
            )
        return [choice for choice in told if means[choice] >= 0][:n]

    def judged(self, choice: Choice) -> tuple[Paired, list[float]]:
        """Compare a choice with the recipe on `evaluation.split`, with seeds and tasks that chose nothing.

        Returns:
            the comparison of these runs, by task, and the difference of each seed alone.
        """
        from rlhf.evaluation.compare import read_side
        from rlhf.evaluation.paired import compare

        sides: list[dict[str, list[float]]] = []
        means: list[list[float]] = []
        for one in ((), choice):
            values: dict[str, list[float]] = {}
            of_seeds: list[float] = []
            for seed in range(self.seeds, 2 * self.seeds):
                run = self.out / f"judged-{_slug(one)}-seed{seed}"
                if self._trained(run, one, seed, self.steps, ()) is None:
                    expected = "its end, and an attempt of its evaluation without an error"
                    raise TrainingError("a run failed", where=str(run), expected=expected, hint="the same command")
                found = read_side(run).values("success")
                of_seeds.append(statistics.fmean(itertools.chain(*found.values())))
                for task, successes in found.items():
                    values.setdefault(task, []).extend(successes)  # the tasks are those of each seed: a difference each
            sides.append(values)
            means.append(of_seeds)
        return compare(*sides), [after - before for before, after in zip(*means, strict=True)]

    def _mean(self, choice: Choice, steps: int) -> float:
        """Mean success over the seeds; -1 where a run failed."""
        found = []
        held_out = self.held_out(choice)
        for seed in range(self.seeds):
            run = self.out / f"{_slug(choice)}-seed{seed}"
            found.append(self._trained(run, choice, seed, steps, held_out))
        return -1.0 if None in found else statistics.mean(one for one in found if one is not None)

    def _trained(self, run: Path, choice: Choice, seed: int, steps: int, more: Sequence[str]) -> float | None:
        """Success of a run after this many steps, training it further if needed; None if it failed."""
        record, name = self._record(), f"{run.name}@{steps}"
        if name not in record["success"]:
            words = ["--resume", str(run), f"steps={steps}"]
            if not (run / "recipe.yaml").is_file():
                at = f"stages.{len(self.loaded.stages) - 1}.steps={steps}"
                own = (f"seed={seed}", at, "push_to_hub=null")  # none of the runs is the one to publish
                words = [self.recipe, *self.overrides, *choice, *more, *own, "--out", str(run)]
            if not _ends(words, run):
                caution(f"{run} failed, and its configuration is skipped: {_words(choice)}")
                return None
            success = json.loads((run / "result.json").read_text("utf-8"))["after"]["success"]
            if success is None:
                caution(f"every attempt of the evaluation of {run} failed, and its configuration is skipped")
                return None
            record["success"][name] = success
            self._write(record)
        return float(record["success"][name])

    def _record(self) -> dict[str, Any]:
        path = self.out / _FILE
        return dict(json.loads(path.read_text("utf-8"))) if path.is_file() else {}

    def _write(self, record: Mapping[str, Any]) -> None:
        with whole("the record of the tuning", self.out / _FILE) as partial:
            partial.write_text(json.dumps(record, indent=1), "utf-8")


def _renewed(held: dict[str, Any], base: Path) -> dict[str, Any]:
    """Return the recipe on record under the present names of its keys, or as it is where it cannot be built."""
    from rlhf.recipe.model import recipe_of, values_of

    with without_warnings(), suppress(RlhfError):
        held = values_of(recipe_of(held, name="", base=base))
    return dict(json.loads(json.dumps(held, default=str)))


def _ends(words: Sequence[str], run: Path) -> bool:
    """Train in a process of its own; False where that fails. Raises Stopped where it was interrupted."""
    from rlhf.commands.launch import launch
    from rlhf.commands.trial import KILLED

    try:
        code = launch(["train", *words], 1, run, quiet=True)
    except TrainingError as error:  # killed
        error.hint = KILLED
        errors().print(str(error), highlight=False, markup=False)
        return False
    if code == EXIT_INTERRUPTED:
        raise Stopped("stopped", where=str(run), hint="run the same rlhf tune again, which resumes this run too")
    return code == 0


def _refuse_judged_otherwise(choice: Choice, recipe: Recipe, chosen: Recipe) -> None:
    """Raise RecipeError where another verifier or limit decides what a choice has solved than what the recipe has."""
    from rlhf.evaluation.judging import differences, judged_by
    from rlhf.recipe.model import values_of
    from rlhf.rollout.scoring import deciding_reward

    mine, theirs = (judged_by(values_of(one), deciding_reward(one.rewards)) for one in (recipe, chosen))
    for key, (own, other) in differences(mine, theirs).items():
        raise RecipeError(
            "a choice changes how success is defined",
            where=f"--try {_words(choice)}",
            got=f"{key} {other}, in the recipe {own}",
            expected="choices with the same verifier and the same limits of an attempt",
            hint=f"leave it out, or give all choices one value: rlhf tune RECIPE {_words(choice)} --try ...",
        )


def _words(choice: Choice) -> str:
    return " ".join(choice) or "the recipe as it is"


def _slug(choice: Choice) -> str:
    """Part of a folder's name that tells choices apart."""
    from hashlib import blake2b

    return blake2b("\n".join(choice).encode(), digest_size=4).hexdigest() if choice else "as-is"


def _result(tuning: Tuning, choice: Choice, judged: tuple[Paired, list[float]] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"chosen": list(choice), "runs": str(tuning.out)}
    if judged is not None:
        pair, of_seeds = judged
        one = pair.difference
        found |= {"difference": one.value, "interval": [one.low, one.high], "p_value": pair.p_value, "n_tasks": one.n}
        found |= {"by_seed": of_seeds}
    return found


def _show(found: Mapping[str, Any], recipe: str, overrides: Sequence[str]) -> None:
    table = Table.grid(padding=(0, 2))
    if not found["chosen"]:
        table.add_row("chosen", "the recipe as it is")
    else:
        low, high = found["interval"]
        table.add_row("chosen", " ".join(found["chosen"]))
        judged = f"{100 * found['difference']:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"
        table.add_row("more than the recipe", f"{judged}, on {found['n_tasks']} tasks with seeds that chose nothing")
        by_seed = ", ".join(f"{100 * one:+.1f}" for one in found["by_seed"])
        table.add_row("by seed", f"{by_seed}; the interval is of these runs, and knows of no other seeds")
        words = [repr(w) if " " in w or "{" in w else w for w in (*overrides, *found["chosen"])]
        table.add_row("train", " ".join(["rlhf train", recipe, *words]))
    table.add_row("runs", found["runs"])
    results().print(table)
