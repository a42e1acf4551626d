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
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from anyio import to_thread
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders

from rlhf.errors import DataError
from rlhf.evaluation.store import StoredStep
from rlhf.viewer import page, run_views
from rlhf.viewer.answers import Answers, NoSuchRunError
from rlhf.viewer.attempts import Filter
from rlhf.viewer.library import Library, ShownRun
from rlhf.viewer.redaction import Redaction

#: Seconds between two looks at a run that somebody watches, and between two signs of life to who watches.
LOOK_S, ALIVE_S = 0.25, 15.0
#: Requests that are answered at the same time.
THREADS = 4
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def create_app(
    library: Library, key: str, redaction: Redaction | None = None, is_ending: Callable[[], bool] = lambda: False
) -> FastAPI:
    """The application that shows the runs of a library below `/KEY/`; live streams end once `is_ending`."""
    routes = _Routes(Answers(library, redaction or Redaction()), is_ending)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=_few_threads)
    shown = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    for path, handler in routes.by_path().items():
        shown.add_api_route(path, handler, methods=["GET"], response_model=None)
    shown.mount("/static", StaticFiles(directory=page.STATIC))
    app.add_api_route(f"/{key}", lambda: RedirectResponse(f"{key}/"), methods=["GET"], response_model=None)
    app.mount(f"/{key}", shown)

    app.add_middleware(_Headers)
    for one in (app, shown):
        one.add_exception_handler(DataError, routes.refused)
    return app


@asynccontextmanager
async def _few_threads(app: FastAPI) -> AsyncIterator[None]:
    """Answer few requests at once: each thread keeps some of the memory in which it has read a file."""
    to_thread.current_default_thread_limiter().total_tokens = THREADS
    yield


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


class _Routes:
    """Handlers of the viewer's routes: what an address says, given to `Answers`."""

    def __init__(self, answers: Answers, is_ending: Callable[[], bool]) -> None:
        self.answers, self.is_ending = answers, is_ending

    def by_path(self) -> dict[str, Callable[..., Any]]:
        """Handlers by their paths."""
        told = self.answers
        return {
            "/": lambda: Response(page.shell(), media_type="text/html; charset=utf-8"),
            "/api/runs": lambda: _json(told.runs()),
            "/api/leaderboard": lambda: _json(told.leaderboard()),
            "/api/compare": self.compare,
            "/api/run/{run}": self.run,
            "/api/run/{run}/metrics": self.metrics,
            "/api/run/{run}/events": self.events,
            "/api/run/{run}/steps": self.steps,
            "/api/run/{run}/groups": self.groups,
            "/api/run/{run}/search": self.search,
            "/api/run/{run}/trajectory": self.trajectory,
            "/api/run/{run}/evaluation": self.evaluation,
            "/api/run/{run}/judges": self.judges,
            "/api/run/{run}/facts": self.facts,
        }

    def run(self, run: str) -> Response:
        """The head of a run."""
        return _json(self.answers.run(run))

    def metrics(self, run: str, names: str = "", since: Annotated[int, Query(ge=0)] = 0) -> Response:
        """Curves."""
        return _json(self.answers.metrics(run, names, since))

    def steps(self, run: str) -> Response:
        """Steps that have stored attempts."""
        return _json(self.answers.steps(run))

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
        return _json(self.answers.groups(run, stage, phase, step, wanted.filter(), offset))

    def search(
        self, run: str, wanted: Annotated[_Wanted, Depends()], like: str = "", cursor: Annotated[int, Query(ge=-1)] = -1
    ) -> Response:
        """Attempts of all steps."""
        return _json(self.answers.search(run, wanted.filter(), like, cursor))

    def trajectory(self, run: str, stage: str, phase: str, step: int, row: Annotated[int, Query(ge=0)]) -> Response:
        """One attempt."""
        return _json(self.answers.trajectory(run, stage, phase, step, row))

    def compare(self, first: str, second: str) -> Response:
        """Two evaluations task by task."""
        return _json(self.answers.compare(first, second))

    def evaluation(self, run: str, name: str = "") -> Response:
        """One evaluation in figures."""
        return _json(self.answers.evaluation(run, name))

    def judges(self, run: str) -> Response:
        """Calibration of reward models and judges."""
        return _json(self.answers.judges(run))

    def facts(self, run: str) -> Response:
        """Recipe, versions, times and failures."""
        return _json(self.answers.facts(run))

    async def events(self, run: str, request: Request, since: str = "") -> StreamingResponse:
        """New lines, new steps and the state of a run as they come; `Last-Event-ID` resumes a page."""
        found = self.answers.find(run)
        last = request.headers.get("last-event-id") or since
        stream = self._stream(found, last, request.is_disconnected)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def _stream(self, run: ShownRun, last: str, is_gone: Callable[[], Any]) -> AsyncIterator[str]:
        epoch, n_lines = _event_id(last)
        before: tuple[Any, ...] = ()
        silent, n_files = 0.0, -1
        yield "retry: 1000\n\n"
        while not self.is_ending() and not await is_gone():
            data = await asyncio.to_thread(run.poll)
            state, files = run.state(), await asyncio.to_thread(run.attempts.steps)
            now = (run.log.epoch, len(data.lines), len(files), state)
            if now != before or silent >= ALIVE_S:
                is_new = run.log.epoch != epoch or len(data.lines) < n_lines
                fresh = run_views.curves(data, (), 0 if is_new else n_lines)
                told = {"head": run_views.head(run, data), "fresh": fresh, "is_new": is_new, "n_files": len(files)}
                if n_files >= 0 and len(files) > n_files:
                    told["newest"] = _plain(max(files, key=lambda stored: stored.path.stat().st_mtime_ns))
                text = json.dumps(self.answers.redaction.values(told))
                yield f"id: {run.log.epoch}:{len(data.lines)}\nevent: run\ndata: {text}\n\n"
                epoch, n_lines, n_files, before, silent = run.log.epoch, len(data.lines), len(files), now, 0.0
            silent += LOOK_S
            await asyncio.sleep(LOOK_S)

    async def refused(self, request: Request, error: DataError) -> Response:
        """Answer an unreadable file, or a run that is not there, with its error."""
        text = json.dumps({"problem": self.answers.redaction.text(str(error))})
        status = 404 if isinstance(error, NoSuchRunError) else 422
        return Response(text, status_code=status, media_type="application/json")


def _json(values: Any) -> Response:
    return Response(json.dumps(values, allow_nan=False, default=str), media_type="application/json")


def _event_id(text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    is_id = first.isdecimal() and second.isdecimal()
    return (int(first), int(second)) if is_id else (-1, 0)


def _plain(stored: StoredStep) -> dict[str, Any]:
    return {"stage": stored.stage, "phase": stored.phase, "step": stored.step}
