"""Answers to what the page asks for: plain values, redacted, whether a server sends them or a file holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rlhf.errors import DataError
from rlhf.evaluation.folder import is_evaluation
from rlhf.evaluation.store import StoredStep
from rlhf.viewer import evaluation_views, facts, run_views, trajectory
from rlhf.viewer.attempts import Filter, groups
from rlhf.viewer.library import Library, ShownRun
from rlhf.viewer.redaction import Redaction

#: Seconds and attempts after which a search rests, and groups of a page.
SEARCH_S, SEARCH_N, PAGE_N = 1.0, 60, 60


class NoSuchRunError(DataError):
    """The viewer shows no run of this id."""


class Answers:
    """Everything that the page asks for, by what it is called in an address."""

    def __init__(self, library: Library, redaction: Redaction) -> None:
        self.library, self.redaction = library, redaction

    def runs(self) -> Any:
        """The head of every run."""
        return self._clean({"runs": [run_views.head(run, run.poll()) for run in self.library.runs()]})

    def run(self, run: str) -> Any:
        """The head of a run, its cautions, what its metrics mean, and its first evaluation against its last."""
        found = self.find(run)
        data = found.poll()
        return self._clean(
            {
                **run_views.head(found, data),
                "cautions": [asdict(finding) for finding in found.findings(data)],
                "metrics": run_views.meanings(data),
                "stored": evaluation_views.names(found.attempts),
                "learned": evaluation_views.learned(found, data),
            }
        )

    def metrics(self, run: str, names: str = "", since: int = 0) -> Any:
        """Curves of the metrics with these names, or of all."""
        found = self.find(run)
        data = found.poll()
        wanted = [name for name in names.split(",") if name]
        return self._clean({"epoch": found.log.epoch, **run_views.curves(data, wanted, since)})

    def steps(self, run: str) -> Any:
        """List the steps that have stored attempts."""
        found: dict[tuple[str, str], list[int]] = {}
        for stored in self.find(run).attempts.steps():
            found.setdefault((stored.stage, stored.phase), []).append(stored.step)
        return self._clean({"stored": [{"stage": s, "phase": p, "steps": steps} for (s, p), steps in found.items()]})

    def groups(self, run: str, stage: str, phase: str, step: int, asked: Filter, offset: int = 0) -> Any:
        """A page of the groups of a step."""
        attempts = self.find(run).attempts
        stored = attempts.find(stage, phase, step)
        places = None if asked == Filter() else set(attempts.matching(stored, asked, self.redaction.text))
        rows = attempts.rows(stored)
        found = groups(rows, places)
        return self._clean(
            {
                "groups": found[offset : offset + PAGE_N],
                "n_groups": len(found),
                "n_attempts": len(rows),
                "n_found": len(rows) if places is None else len(places),
                "offset": offset,
                "page": PAGE_N,
            }
        )

    def search(self, run: str, asked: Filter, like: str = "", cursor: int = -1) -> Any:
        """Attempts of all steps, from the newest on; `like` names one by STAGE:PHASE:STEP:ROW, whose task is meant."""
        attempts = self.find(run).attempts
        if like:
            stage, phase, step, row = place_of(like, "like")
            rows = attempts.rows(attempts.find(stage, phase, step))
            if row >= len(rows):
                raise DataError("no such attempt", where="like", got=like[:80], expected=f"row 0 to {len(rows) - 1}")
            asked = Filter(exact=rows[row]["task_id"])
        return self._clean(attempts.search(asked, cursor, SEARCH_S, SEARCH_N, self.redaction.text))

    def trajectory(self, run: str, stage: str, phase: str, step: int, row: int) -> Any:
        """One attempt, turn by turn and token by token."""
        found = self.find(run)
        stored = found.attempts.find(stage, phase, step)
        rows = found.attempts.rows(stored)
        cheap = next((one for one in rows if one["row"] == row), None)
        siblings = [one for one in rows if cheap and one["task_id"] == cheap["task_id"]]
        around = {"siblings": siblings, "stage": stage, "phase": phase, "step": step, "row": row}
        settings = found.poll().settings
        shown = self.attempt(found, settings, stored, found.attempts.record(stored, row), row, str(found.folder))
        return {**self._clean(around), **shown}

    def attempt(
        self,
        run: ShownRun,
        settings: Mapping[str, Any],
        stored: StoredStep,
        record: dict[str, Any],
        row: int,
        folder: str,
    ) -> dict[str, Any]:
        """One stored attempt with the commands that show it and play on.

        Args:
            run: that it is of.
            settings: recipe of the run.
            stored: its file.
            record: its row there.
            row: the place of that.
            folder: what the commands call the run.
        """
        environment = settings.get("environment")
        can_play = is_evaluation(run.folder) or (isinstance(environment, dict) and "kind" in environment)
        told = trajectory.commands(folder, can_play, record["task_id"], record["attempt"], stored, row)
        if record["turns"] is None:  # a failure of which no more is known
            shown = trajectory.failure(record, self.redaction)
        else:
            shown = trajectory.trajectory(record, run.tokenizers.get(settings), self.redaction, folder)
        return {"commands": self._clean(told), **shown}

    def compare(self, first: str, second: str) -> Any:
        """Two evaluations, RUN:NAME each, task by task."""
        sides = []
        for side in (first, second):
            run, _, name = side.partition(":")
            sides.append((self.find(run).attempts, name))
        return self._clean(evaluation_views.paired(sides[0], sides[1]))

    def evaluation(self, run: str, name: str = "") -> Any:
        """One evaluation in figures, the last one without a name."""
        return self._clean(evaluation_views.evaluation(self.find(run), name))

    def leaderboard(self) -> Any:
        """Every evaluated run and evaluation, ranked among those that had the same tasks."""
        return self._clean(evaluation_views.leaderboard(self.library.runs()))

    def judges(self, run: str) -> Any:
        """Accuracy of the reward models and judges of a run."""
        found = self.find(run)
        return self._clean(evaluation_views.judges(found.folder, found.poll()))

    def facts(self, run: str) -> Any:
        """Recipe, versions, times and failures of a run or an evaluation."""
        found = self.find(run)
        return self._clean(facts.facts(found, found.poll()))

    def find(self, wanted: str) -> ShownRun:
        """The run of an id.

        Raises:
            NoSuchRunError: there is none.
        """
        found = self.library.get(wanted)
        if found is None:
            raise NoSuchRunError("no such run", where="the viewer", got=wanted[:80], hint="go back to all runs")
        return found

    def _clean(self, values: Any) -> Any:
        return self.redaction.values(values)


def place_of(text: str, where: str) -> tuple[str, str, int, int]:
    """Stage, phase, step and row of an attempt, from STAGE:PHASE:STEP:ROW.

    Raises:
        DataError: it is not of that form.
    """
    stage, phase, step, row = [*text.split(":"), "", "", ""][:4]
    if not (step.isdecimal() and row.isdecimal()):
        raise DataError("not the place of an attempt", where=where, got=text[:80], expected="STAGE:PHASE:STEP:ROW")
    return stage, phase, int(step), int(row)
