"""Attempts that end by a refused request: at once, with what was refused, and as a cut where the context is full."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from rlhf.data import Outcome, Trajectory
from rlhf.gateway.programs import KEY
from rlhf.rollout.limits import Limits
from tests.gateway.talks import World, post

pytest.importorskip("uvicorn")
#: Far more than any of these programs takes; an attempt that waits for it has not noticed the end of its program.
EPISODE_S = 120.0
LONG = "ab" * 9000
#: Asks as its arguments say: with a temperature, with too long a prompt, ...; some let the error end them.
PROGRAM = """
import json, os, sys, openai, urllib.request
client, how = openai.OpenAI(max_retries=0), sys.argv[1]
def ask(content, **given):
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="m", messages=messages, **given)
def post(path, **body):
    head = {"Authorization": "Bearer " + os.environ["RLHF_KEY"], "Content-Type": "application/json"}
    to = os.environ["RLHF_SESSION"] + path
    urllib.request.urlopen(urllib.request.Request(to, json.dumps(body).encode(), head)).read()
if "first" not in how: ask("Begin.")
try:
    if "hot" in how: ask("Go on.", temperature=0)
    if "picture" in how: ask([{"type": "image_url", "image_url": {"url": "x"}}])
    if "long" in how: ask("ab" * 9000)
except openai.BadRequestError as error:
    if "code" in how: assert error.code == "context_length_exceeded"
    if "fails" in how: post("/fail", message=str(error))
    if "rewards" in how: post("/reward", reward=0.5)
    if "shorter" in how: ask("Again."); post("/reward", reward=2.0)
    if "crash" in how: raise
"""


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "known")


def limits() -> Limits:
    return Limits(max_turns=9, max_tokens=12, start_timeout_s=60, max_retries=0, episode_timeout_s=EPISODE_S)


def play(folder: Path, how: str, **settings: Any) -> Trajectory:
    """The attempt of a program that asks so; it ends long before the limit of an episode."""
    (folder / "agent.py").write_text(PROGRAM)
    given = {"command": (sys.executable, str(folder / "agent.py"), how), "reward_timeout_s": 0.1, **settings}
    begun = time.monotonic()
    (played,) = World(limits(), settings=given).play(lambda mine: None, 1, n_threads=0)
    assert time.monotonic() - begun < EPISODE_S / 2
    return played


@pytest.mark.parametrize(
    ("how", "reward", "says"),
    [
        ("hot crash", "client", ["temperature=0", "override_sampling", "status 1", "BadRequestError"]),
        ("first hot crash", "recipe", ["temperature=0", "override_sampling", "status 1", "BadRequestError"]),
        ("first picture crash", "client", ["messages[0].content", "image_url", "status 1"]),
        ("hot fails", "environment", ["temperature=0", "override_sampling"]),
        ("first hot", "recipe", ["no request", "temperature=0"]),
    ],
)
def test_a_program_that_ends_by_a_refusal_ends_its_attempt_and_the_record_says_why(
    how: str, reward: str, says: list[str], tmp_path: Path
) -> None:
    played = play(tmp_path, how, reward=reward)
    assert played.outcome is Outcome.AGENT_ERROR, played.detail
    assert "400" in played.detail and all(text in played.detail for text in says), played.detail
    assert played.detail.count(says[0]) == 1, played.detail


@pytest.mark.parametrize("reward", ["recipe", "environment"])
def test_a_program_that_sends_no_request_is_an_error_and_no_score(reward: str, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("print('done')")
    given = {"command": (sys.executable, str(tmp_path / "agent.py")), "reward": reward}
    (played,) = World(limits(), settings=given).play(lambda mine: None, 1, n_threads=0)
    assert played.outcome is Outcome.AGENT_ERROR, played.detail
    assert "ended without a request" in played.detail and "OPENAI_BASE_URL" in played.detail, played.detail


def test_a_reward_that_is_missing_after_a_refusal_is_told_with_it(tmp_path: Path) -> None:
    played = play(tmp_path, "hot")
    assert played.outcome is Outcome.REWARD_ERROR and "temperature=0" in played.detail


@pytest.mark.parametrize(
    ("how", "reward"),
    [("long code", "client"), ("long", "recipe"), ("long crash", "environment"), ("long fails", "client")],
)
def test_a_full_context_ends_an_attempt_as_a_token_limit(how: str, reward: str, tmp_path: Path) -> None:
    played = play(tmp_path, how, reward=reward)
    assert played.outcome is Outcome.TOKEN_LIMIT and "no room for a token" in played.detail, played.detail
    assert len(played.generations) == len(played.turns) == 1


def test_a_first_prompt_that_fills_the_context_is_a_token_limit_without_turns(tmp_path: Path) -> None:
    played = play(tmp_path, "first long crash")
    assert played.outcome is Outcome.TOKEN_LIMIT and not played.turns


def test_a_program_may_ask_with_a_shorter_conversation_or_say_what_it_earned(tmp_path: Path) -> None:
    played = play(tmp_path, "long shorter")
    assert played.solved and len(played.generations) == 2
    played = play(tmp_path, "long rewards")
    assert played.outcome is Outcome.FAILED and sum(turn.reward for turn in played.turns) == 0.5


def test_programs_that_make_one_attempt_after_the_other_end_theirs_too(tmp_path: Path) -> None:
    text = PROGRAM.replace("client, how = openai.OpenAI(max_retries=0)", CLAIM)
    (tmp_path / "agent.py").write_text(text)
    for how, outcome in (("hot crash", Outcome.AGENT_ERROR), ("long crash", Outcome.TOKEN_LIMIT)):
        given = {"command": (sys.executable, str(tmp_path / "agent.py"), how), "n_programs": 1}
        (played,) = World(limits(), settings=given).play(lambda mine: None, 1, n_threads=0)
        assert played.outcome is outcome and "400" in played.detail and "status 1" in played.detail, played.detail


#: One attempt, asked of the gateway.
CLAIM = """
head = {"Authorization": "Bearer " + os.environ["RLHF_GATEWAY_KEY"], "Content-Type": "application/json"}
to = os.environ["RLHF_GATEWAY"] + "/sessions"
mine = json.load(urllib.request.urlopen(urllib.request.Request(to, b"{}", head)))
os.environ["RLHF_SESSION"], os.environ["RLHF_KEY"] = mine["url"], mine["key"]
client, how = openai.OpenAI(base_url=mine["base_url"], api_key=mine["key"], max_retries=0)"""


def test_what_was_sampled_beside_a_request_that_found_no_room_is_kept() -> None:
    def work(mine: dict[str, Any]) -> None:
        client = openai.OpenAI(base_url=mine["base_url"], api_key=mine["key"], max_retries=0)

        def ask(content: str) -> None:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])

        answered = threading.Thread(target=ask, args=("Begin.",))
        answered.start()
        while not (world.engine and world.engine.begun):
            time.sleep(0.01)
        with pytest.raises(openai.BadRequestError, match="no room"):
            ask(LONG)
        answered.join()
        post(f"{mine['url']}/fail", mine["key"], {"message": "one of two has no room"})

    world = World(limits(), delay_s=2.0)
    (played,) = world.play(work, 1, n_threads=1)
    assert played.outcome is Outcome.TOKEN_LIMIT and len(played.generations) == 1
    assert "one of two has no room" in played.detail


def test_requests_that_find_no_room_use_up_no_calls() -> None:
    def work(mine: dict[str, Any]) -> None:
        client = openai.OpenAI(base_url=mine["base_url"], api_key=mine["key"], max_retries=0)
        for content in (LONG, LONG, LONG, "Begin."):
            asked: list[Any] = [{"role": "user", "content": content}]
            with pytest.raises(openai.BadRequestError) if content is LONG else nullcontext():
                client.chat.completions.create(model="m", messages=asked)
        post(f"{mine['url']}/finish", mine["key"], {"reward": 1.0})

    (played,) = World(replace(limits(), max_generations_per_turn=2)).play(work, 1, n_threads=1)
    assert played.solved and len(played.generations) == 1, played.detail


@pytest.mark.parametrize(
    ("content", "how", "outcome", "says"),
    [
        ("Begin.", {"temperature": 0}, Outcome.AGENT_ERROR, "temperature=0"),
        (LONG, {}, Outcome.TOKEN_LIMIT, "no room for a token"),
    ],
)
def test_a_program_that_is_silent_after_a_refusal_is_waited_for_as_long_as_for_a_step(
    content: str, how: dict[str, Any], outcome: Outcome, says: str
) -> None:
    def work(mine: dict[str, Any]) -> None:
        client = openai.OpenAI(base_url=mine["base_url"], api_key=mine["key"], max_retries=0)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}], **how)

    (played,) = World(replace(limits(), step_timeout_s=1.0)).play(work, 1, n_threads=1)
    assert played.outcome is outcome and says in played.detail, played.detail
    assert "nothing more within 1 s" in played.detail
