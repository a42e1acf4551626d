"""A viewer that really listens, in a thread, and a run folder with whatever may stand in one."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from rlhf.data import Action, Failure, Finish, Generation, Outcome, Prompt, Score, Trajectory, Turn, Verdict
from rlhf.evaluation.rows import FailureRecord, TrajectoryRecord
from rlhf.evaluation.store import TrajectoryWriter
from rlhf.viewer.app import create_app
from rlhf.viewer.library import Library
from rlhf.viewer.redaction import Redaction
from rlhf.viewer.serve import bound
from tests.evaluation.synthetic import make_tokenizer

SECRET = "sk-proj-Abcdefghij0123456789"
HOSTILE = (
    "<script>document.title = 'hacked'</script>",
    "<img src=x onerror=\"document.title = 'hacked'\">",
    "\u202eright to left\u202c",
    "a\0b\x1b[2J\x07",
    "{{ 7 * 7 }} ${7 * 7} </script>",
)


@dataclass(frozen=True)
class Viewer:
    """A viewer that listens at `url`."""

    url: str
    library: Library

    def open(self, path: str = "", method: str = "GET", **headers: str) -> Any:
        """The answer to one request, which is not read yet."""
        return urllib.request.urlopen(
            urllib.request.Request(self.url + path, method=method, headers=headers), timeout=20
        )

    def get(self, path: str, **query: Any) -> Any:
        """What an address of the API answers."""
        text = urllib.parse.urlencode({name: value for name, value in query.items() if value != ""})
        with self.open(f"api/{path}?{text}") as answer:
            return json.load(answer)

    def status(self, path: str, method: str = "GET") -> int:
        """The code of an answer."""
        try:
            with self.open(path, method) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


@contextmanager
def viewer(*folders: Path, redact: Sequence[str] = ()) -> Iterator[Viewer]:
    """A viewer of these folders, while the context lasts."""
    place, library = bound("127.0.0.1", 0), Library(folders)
    app = create_app(library, place.key, Redaction(redact))
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place.socket]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Viewer(place.url, library)
    finally:
        server.should_exit = True
        thread.join(20)


def hostile_run(folder: Path, *, length: int = 1_000_000, secret: str = SECRET) -> Path:
    """A run with two steps in which every text is hostile, very long or a secret."""
    tokenizer = make_tokenizer()
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("name: '<script>alert(1)</script>'\nseed: 3\nstages: [{steps: 5}]\n")
    (folder / "policy").mkdir()
    tokenizer.save(str(folder / "policy" / "tokenizer.json"))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in (1, 2):
            line = {"step": step, "stage": "0-policy_gradient", "time": time.time(), "rollout/success": 0.5}
            file.write(json.dumps(line | {"rollout/n_episodes": 4.0, "reward/<b>x</b>": 1.0}) + "\n")
    writer = TrajectoryWriter(folder / "trajectories")
    for step in (1, 2):
        records = [
            _record(tokenizer, step, i, text) for i, text in enumerate((*HOSTILE, secret, "long " * (length // 5)))
        ]
        failure = Failure(len(records), Outcome.ENV_ERROR, f"{HOSTILE[0]} {SECRET}", False)
        writer.write(
            "0-policy_gradient",
            step,
            "train",
            [*records, FailureRecord(step, "0-policy_gradient", "train", "t", failure)],
        )
    return folder


def _record(tokenizer: Any, step: int, attempt: int, text: str) -> TrajectoryRecord:
    ids = tokenizer.encode(f"I say {text[:400]} now").ids
    generation = Generation(Prompt(tuple(ids), (0,)), ids, (-0.5,) * len(ids), Finish.STOP, step)
    notes = {"memory": text, text[:50]: "name"}
    turn = Turn(Action(text, (generation,), None, notes, (), f"thought {text}"), f"reply {text}", 1.0)
    trajectory = Trajectory(f"task {text[:60]}", attempt, f"opening {text}", (turn,), Outcome.SOLVED)
    score = Score({"r": Verdict(1.0, f"why {text}", (1.0,))}, (1.0,), 1.0)
    return TrajectoryRecord(
        step, "0-policy_gradient", "train", f"task {text[:60]}", trajectory, score, ((0.25,) * len(ids),)
    )
