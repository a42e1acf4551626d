"""The web application of the viewer: read-only, below a key in the address, with nothing from outside.

    GET /KEY/                          the page
    GET /KEY/static/...                its scripts, styles and the chart library
    GET /KEY/api/...                   JSON, redacted
    GET /KEY/api/run/ID/events         server-sent events of a run that grows

Every link of the page is relative, so that it works behind a tunnel, a forwarded port and a proxy with a path.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders

from rlhf.errors import DataError
from rlhf.evaluation.store import StoredStep
from rlhf.viewer import run_views, trajectory
from rlhf.viewer.attempts import Filter, groups
from rlhf.viewer.library import Library, ShownRun
from rlhf.viewer.redaction import Redaction

HERE = Path(__file__).parent
#: Seconds between two looks at a run that somebody watches, and between two signs of life to who watches.
LOOK_S, ALIVE_S = 0.25, 15.0
#: Seconds and attempts after which a search rests, and groups of a page.
SEARCH_S, SEARCH_N, PAGE_N = 1.0, 60, 60
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def create_app(library: Library, key: str, redaction: Redaction | None = None) -> FastAPI:
    """The application that shows the runs of a library below `/KEY/`."""
    pages = _Pages(library, redaction or Redaction())
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    shown = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    for path, handler in pages.routes().items():
        shown.add_api_route(path, handler, methods=["GET"], response_model=None)
    shown.mount("/static", StaticFiles(directory=HERE / "static"))
    app.add_api_route(f"/{key}", lambda: RedirectResponse(f"{key}/"), methods=["GET"], response_model=None)
    app.mount(f"/{key}", shown)

    app.add_middleware(_Headers)
    for one in (app, shown):
        one.add_exception_handler(DataError, pages.refused)
    return app


class _Headers:
    """Adds `HEADERS` to every answer, as it is sent."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on."""

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self.app(scope, receive, with_headers)


@dataclass
class _Wanted:
    """The filter in an address."""

    outcome: str = ""
    task: str = ""
    least: float | None = None
    most: float | None = None
    text: str = ""

    def filter(self) -> Filter:
        """The filter of attempts."""
        outcomes = tuple(one for one in self.outcome.split(",") if one)
        return Filter(outcomes, self.task, "", self.least, self.most, self.text)


class _Pages:
    """Handlers of the viewer's routes."""

    def __init__(self, library: Library, redaction: Redaction) -> None:
        self.library, self.redaction = library, redaction

    def routes(self) -> dict[str, Callable[..., Any]]:
        """Handlers by their paths."""
        return {
            "/": self.page,
            "/api/runs": self.runs,
            "/api/compare": self.compare,
            "/api/run/{run}": self.run,
            "/api/run/{run}/metrics": self.metrics,
            "/api/run/{run}/events": self.events,
            "/api/run/{run}/steps": self.steps,
            "/api/run/{run}/groups": self.groups,
            "/api/run/{run}/search": self.search,
            "/api/run/{run}/trajectory": self.trajectory,
        }

    def page(self) -> Response:
        """The page that everything else is shown in."""
        return Response(_shell(), media_type="text/html; charset=utf-8")

    def runs(self) -> Response:
        """The head of every run."""
        return self._json({"runs": [run_views.head(run, run.poll()) for run in self.library.runs()]})

    def run(self, run: str) -> Response:
        """The head of a run, its cautions and what its metrics mean."""
        found = self._run(run)
        data = found.poll()
        return self._json(
            {
                **run_views.head(found, data),
                "cautions": run_views.cautions(found, data),
                "metrics": run_views.meanings(data),
                "stored": run_views.evaluations(found.attempts),
            }
        )

    def metrics(self, run: str, names: str = "", since: Annotated[int, Query(ge=0)] = 0) -> Response:
        """Curves of the metrics with these names, or of all."""
        found = self._run(run)
        data = found.poll()
        wanted = [name for name in names.split(",") if name]
        return self._json({"epoch": found.log.epoch, **run_views.curves(data, wanted, since)})

    def steps(self, run: str) -> Response:
        """List the steps that have stored attempts."""
        found: dict[tuple[str, str], list[int]] = {}
        for stored in self._run(run).attempts.steps():
            found.setdefault((stored.stage, stored.phase), []).append(stored.step)
        return self._json({"stored": [{"stage": s, "phase": p, "steps": steps} for (s, p), steps in found.items()]})

    def groups(
        self,
        run: str,
        stage: str,
        phase: str,
        step: int,
        wanted: Annotated[_Wanted, Depends()],
        offset: Annotated[int, Query(ge=0)] = 0,
    ) -> Response:
        """A page of the groups of a step."""
        attempts = self._run(run).attempts
        stored, asked = attempts.find(stage, phase, step), wanted.filter()
        places = None if asked == Filter() else set(self._honest(attempts.matching(stored, asked), asked))
        rows = attempts.rows(stored)
        found = groups(rows, places)
        return self._json(
            {
                "groups": found[offset : offset + PAGE_N],
                "n_groups": len(found),
                "n_attempts": len(rows),
                "n_found": len(rows) if places is None else len(places),
                "offset": offset,
                "page": PAGE_N,
            }
        )

    def search(
        self, run: str, wanted: Annotated[_Wanted, Depends()], like: str = "", cursor: Annotated[int, Query(ge=-1)] = -1
    ) -> Response:
        """Attempts of all steps, from the newest on; `like` names one by STAGE:PHASE:STEP:ROW, whose task is meant."""
        attempts, asked = self._run(run).attempts, wanted.filter()
        if like:
            stage, phase, step, row = _place(like)
            asked = Filter(exact=attempts.rows(attempts.find(stage, phase, step))[row]["task_id"])
        found = attempts.search(asked, cursor, SEARCH_S, SEARCH_N)
        honest = self._honest({i: hit["around"] for i, hit in enumerate(found["hits"])}, asked)
        return self._json({**found, "hits": [hit for i, hit in enumerate(found["hits"]) if i in honest]})

    def trajectory(self, run: str, stage: str, phase: str, step: int, row: Annotated[int, Query(ge=0)]) -> Response:
        """One attempt, turn by turn and token by token."""
        found = self._run(run)
        attempts, data = found.attempts, found.poll()
        stored = attempts.find(stage, phase, step)
        cheap = next((one for one in attempts.rows(stored) if one["row"] == row), None)
        record = attempts.record(stored, row)
        siblings = [one for one in attempts.rows(stored) if cheap and one["task_id"] == cheap["task_id"]]
        if record["is_failure"]:
            shown = trajectory.failure(record, self.redaction)
        else:
            tokenizer = found.tokenizers.get(data.settings)
            shown = trajectory.trajectory(record, tokenizer, self.redaction)
            shown["test"] = self.redaction.text(trajectory.as_test(found.folder, record))
        told = trajectory.commands(found.folder, data.settings, record["task_id"], record["attempt"], stored)
        around = {"commands": told, "siblings": siblings, "stage": stage, "phase": phase, "step": step, "row": row}
        return self._json({**self.redaction.values(around), **shown}, is_redacted=True)

    def compare(self, first: str, second: str) -> Response:
        """Two evaluations, RUN:NAME each, task by task."""
        sides = []
        for side in (first, second):
            run, _, name = side.partition(":")
            sides.append((self._run(run).attempts, name))
        return self._json(run_views.paired(sides[0], sides[1]))

    async def events(self, run: str, request: Request, since: str = "") -> StreamingResponse:
        """New lines, new steps and the state of a run as they come; `Last-Event-ID` goes on where a page was."""
        found = self._run(run)
        last = request.headers.get("last-event-id") or since
        stream = self._stream(found, last, request.is_disconnected)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def _stream(self, run: ShownRun, last: str, is_gone: Callable[[], Any]) -> AsyncIterator[str]:
        epoch, n_lines = _event_id(last)
        before: tuple[Any, ...] = ()
        silent, n_files = 0.0, -1
        yield "retry: 1000\n\n"
        while not await is_gone():
            data = await asyncio.to_thread(run.poll)
            state, files = run.state(), await asyncio.to_thread(run.attempts.steps)
            now = (run.log.epoch, len(data.lines), len(files), state)
            if now != before or silent >= ALIVE_S:
                is_new = run.log.epoch != epoch or len(data.lines) < n_lines
                fresh = run_views.curves(data, (), 0 if is_new else n_lines)
                told = {"head": run_views.head(run, data), "fresh": fresh, "is_new": is_new, "n_files": len(files)}
                if n_files >= 0 and len(files) > n_files:
                    told["newest"] = _plain(max(files, key=lambda stored: stored.path.stat().st_mtime_ns))
                text = json.dumps(self.redaction.values(told))
                yield f"id: {run.log.epoch}:{len(data.lines)}\nevent: run\ndata: {text}\n\n"
                epoch, n_lines, n_files, before, silent = run.log.epoch, len(data.lines), len(files), now, 0.0
            silent += LOOK_S
            await asyncio.sleep(LOOK_S)

    def _run(self, wanted: str) -> ShownRun:
        found = self.library.get(wanted)
        if found is None:
            raise HTTPException(404, "no such run")
        return found

    def _honest(self, found: dict[int, str], asked: Filter) -> dict[int, str]:
        """Without what was found in a text that is blacked out: a search would tell it letter by letter."""
        if not asked.text:
            return found
        wanted = asked.text.casefold()
        return {i: around for i, around in found.items() if wanted in self.redaction.text(around).casefold()}

    def _json(self, values: Any, *, is_redacted: bool = False) -> Response:
        shown = values if is_redacted else self.redaction.values(values)
        return Response(json.dumps(shown, allow_nan=False, default=str), media_type="application/json")

    async def refused(self, request: Request, error: DataError) -> Response:
        """Answer an unreadable file with its error."""
        text = json.dumps({"problem": self.redaction.text(str(error))})
        return Response(text, status_code=422, media_type="application/json")


def _event_id(text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    is_id = first.isdecimal() and second.isdecimal()
    return (int(first), int(second)) if is_id else (-1, 0)


def _place(text: str) -> tuple[str, str, int, int]:
    stage, phase, step, row = [*text.split(":"), "", "", ""][:4]
    if not (step.isdecimal() and row.isdecimal()):
        raise DataError("no place of an attempt", where="like", got=text[:80], expected="STAGE:PHASE:STEP:ROW")
    return stage, phase, int(step), int(row)


def _plain(stored: StoredStep) -> dict[str, Any]:
    return {"stage": stored.stage, "phase": stored.phase, "step": stored.step}


def _shell() -> str:
    from jinja2 import Environment, PackageLoader

    return Environment(loader=PackageLoader("rlhf.viewer"), autoescape=True).get_template("view.html").render()
