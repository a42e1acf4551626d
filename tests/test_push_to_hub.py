"""`push_to_hub`: the trained policy arrives at a stand-in for a hub; what cannot arrive is refused at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import rlhf
from rlhf.errors import ModelError, RecipeError
from rlhf.recipe import load_values
from rlhf.recipe.model import values_of

VALUES: dict[str, Any] = {
    "policy": {"kind": "from_scratch", "hidden_size": 16, "n_layers": 1, "n_heads": 2, "max_context": 256},
    "environment": {"kind": "countdown"},
    "rewards": {"o": {"kind": "outcome"}},
    "limits": {"max_tokens": 2},
    "evaluation": {"n_tasks": 1},
    "stages": [{"kind": "supervised", "n_demonstrations": 2, "epochs": 1}],
}


class Hub(ThreadingHTTPServer):
    """What the client of the hub asks for, and no more; keeps what it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.committed: list[dict[str, Any]] = []
        self.status = 200
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(self.path)
        if self.path.endswith("/repos/create"):
            assert b'"private"' in body  # as a flag, or as visibility
            self._answer({"url": f"http://{self.headers['Host']}/me/small"})
        elif "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            self._answer({"files": [{**f, "shouldIgnore": False, "oid": None} for f in files]})
        elif "/commit/" in self.path:
            self.server.committed = [json.loads(line) for line in body.splitlines()]
            self._answer({"commitUrl": f"http://{self.headers['Host']}/me/small/commit/1", "commitOid": "1"})

    def do_GET(self) -> None:
        if self.path != "/api/agent-harnesses":  # which the client asks for once a day, whatever it is used for
            self.server.asked.append(self.path)
        self._answer({"id": "me/small", "siblings": [], "sha": "0"})

    def _answer(self, values: Any) -> None:
        body = json.dumps(values).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants as constants

    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for place in (constants, __import__("huggingface_hub.hf_api").hf_api):
        monkeypatch.setattr(place, "ENDPOINT", address, raising=False)
    monkeypatch.setattr(constants, "HF_ENDPOINT", address, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield server
    server.shutdown()
    server.server_close()


def test_the_trained_policy_arrives(hub: Hub, tmp_path: Path) -> None:
    found = rlhf.train(VALUES, push_to_hub="me/small", out=tmp_path / "run", progress=False)
    assert hub.asked[0].endswith("/repos/create")  # before anything was trained
    names = {line["value"]["path"] for line in hub.committed if line["key"] == "file"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert found.hub.endswith("/me/small")


def test_a_run_whose_push_fails_is_kept(hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(step: Any) -> None:
        hub.status = 403

    found = rlhf.train(VALUES, push_to_hub="me/small", out=tmp_path / "run", callbacks=[fail])
    said = " ".join(capfd.readouterr().err.split())
    assert found.hub == "" and found.report is not None and found.report.is_file()
    assert "was not pushed to me/small" in said and "hf upload me/small model" in said


def test_what_cannot_arrive_is_refused_at_once(hub: Hub, tmp_path: Path) -> None:
    hub.status = 401
    with pytest.raises(ModelError, match="nothing could be pushed to the hub") as caught:
        rlhf.train(VALUES, push_to_hub="me/small", out=tmp_path / "run", progress=False)
    assert caught.value.where == "push_to_hub" and "hf auth login" in caught.value.hint
    assert not (tmp_path / "run").exists()


def test_offline_is_refused_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="OfflineModeIsEnabled"):
        rlhf.train(VALUES, push_to_hub="me/small", out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_an_error_without_a_text_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*args: Any, **keys: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", fails)
    with pytest.raises(ModelError, match="me/small: TimeoutError"):
        rlhf.train(VALUES, push_to_hub="me/small", out=tmp_path / "run", progress=False)


def test_it_is_a_key_of_a_recipe() -> None:
    assert "push_to_hub" not in values_of(load_values(VALUES, name="r"))
    named = load_values({**VALUES, "push_to_hub": "me/small"}, name="r")
    assert values_of(named)["push_to_hub"] == {"repo": "me/small", "private": True}
    assert load_values(values_of(named), name="r") == named
    with pytest.raises(RecipeError, match="push_to_hub"):
        load_values({**VALUES, "push_to_hub": "small"}, name="r")
