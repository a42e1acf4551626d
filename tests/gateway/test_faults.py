"""Faults of agents outside, by the real client library: each has an outcome of its own, and none scores by accident."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
import urllib.error
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from agents.tool_calls import ToolCall
from agents.tools import ToolAgent
from environments.games.key_door import Keyhole
from environments.workers.pool import Processes
from rlhf.data import Finish, Outcome, PolicyWeights, Trajectory
from rlhf.errors import AgentError
from rlhf.gateway import server
from rlhf.gateway import session as sessions
from rlhf.gateway.agent import ExternalAgent, external_agent
from rlhf.gateway.environment import External, variables_of
from rlhf.gateway.exchange import send_whole
from rlhf.gateway.program import Program
from rlhf.gateway.programs import KEY, Programs, programs_of
from rlhf.gateway.request import ChatReply, ChatRequest, Refusal
from rlhf.gateway.server import Gateway
from rlhf.gateway.session import Session
from rlhf.gateway.wires import chat, responses
from rlhf.gateway.wires import messages as anthropic_messages
from rlhf.rollout.limits import Limits
from tests.environments.troubled import Troubled
from tests.gateway.talks import World, post

pytest.importorskip("uvicorn")
HELLO: list[Any] = [{"role": "user", "content": "Begin."}]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "known")
    monkeypatch.setattr(sessions, "GRACE_S", 1.5)


def limits(**how: Any) -> Limits:
    return Limits(**{"max_turns": 9, "max_tokens": 12, "start_timeout_s": 30, "max_retries": 0, **how})


def client_of(mine: dict[str, Any], **how: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=mine["base_url"], api_key=mine["key"], **{"max_retries": 0, **how})


def ask(client: openai.OpenAI, **how: Any) -> Any:
    return client.chat.completions.create(**{"model": "m", "messages": HELLO, **how}).choices[0]


def finish(mine: dict[str, Any], **how: Any) -> None:
    post(f"{mine['url']}/finish", mine["key"], {"reward": 1.0, **how})


def one(world: World, work: Any) -> Trajectory:
    """The one attempt of `work`, whose own errors are the test's."""
    errors: list[BaseException] = []

    def watched(mine: dict[str, Any]) -> None:
        try:
            work(mine)
        except BaseException as error:
            errors.append(error)
            raise

    (played,) = world.play(watched, 1, n_threads=1)
    if errors:
        raise errors[0]
    return played


def test_an_attempt_without_a_reward_is_a_failure_and_no_zero() -> None:
    def work(mine: dict[str, Any]) -> None:
        ask(client_of(mine))
        post(f"{mine['url']}/finish", mine["key"])

    played = one(World(limits(), settings={"reward_timeout_s": 0.2}), work)
    assert played.outcome is Outcome.REWARD_ERROR and "without a reward" in played.detail


def test_a_reward_may_come_after_the_end() -> None:
    def work(mine: dict[str, Any]) -> None:
        ask(client_of(mine))
        post(f"{mine['url']}/finish", mine["key"])
        time.sleep(0.3)
        post(f"{mine['url']}/reward", mine["key"], {"parts": {"right": 0.5, "brief": 0.25}})

    played = one(World(limits(), settings={"reward_timeout_s": 20}), work)
    assert played.outcome is Outcome.FAILED and played.turns[-1].reward == 0.75


def test_an_attempt_that_its_program_calls_failed_is_a_failure_of_the_agent() -> None:
    def work(mine: dict[str, Any]) -> None:
        ask(client_of(mine))
        post(f"{mine['url']}/fail", mine["key"], {"message": "the browser crashed"})

    played = one(World(limits()), work)
    assert played.outcome is Outcome.AGENT_ERROR and "the browser crashed" in played.detail


def test_a_world_that_fails_is_no_failure_of_the_agent() -> None:
    def work(mine: dict[str, Any]) -> None:
        ask(client_of(mine))
        with pytest.raises(urllib.error.HTTPError):
            post(f"{mine['url']}/step", mine["key"], {"action": "raise"})

    played = one(World(limits(), settings={"environment": Troubled(), "reward": "environment"}), work)
    assert played.outcome is Outcome.ENV_ERROR and "the lamp fell over" in played.detail


def test_a_world_that_cuts_an_attempt_has_ended_nothing() -> None:
    def work(mine: dict[str, Any]) -> None:
        ask(client_of(mine))
        assert post(f"{mine['url']}/step", mine["key"], {"action": "look"})["done"]
        post(f"{mine['url']}/finish", mine["key"])

    played = one(World(limits(), settings={"environment": Keyhole(max_steps=1), "reward": "environment"}), work)
    assert played.outcome is Outcome.TURN_LIMIT and played.detail == "the environment's own step limit"


@pytest.mark.parametrize(("action", "outcome"), [("win", Outcome.SOLVED), ("look", Outcome.TURN_LIMIT)])
def test_an_agent_that_asks_for_a_last_word_at_the_turn_limit_keeps_its_success(action: str, outcome: Outcome) -> None:
    def work(mine: dict[str, Any]) -> None:
        client = client_of(mine)
        ask(client)
        post(f"{mine['url']}/step", mine["key"], {"action": action})
        with pytest.raises(openai.APIStatusError):
            ask(client)

    played = one(World(limits(max_turns=1), settings={"environment": Troubled(), "reward": "environment"}), work)
    assert played.outcome is outcome and len(played.turns) == 1


def test_no_more_attempts_begin_than_the_world_has_episodes_for() -> None:
    def work(mine: dict[str, Any]) -> None:
        ask(client_of(mine))
        post(f"{mine['url']}/step", mine["key"], {"action": "win"})
        post(f"{mine['url']}/finish", mine["key"])

    worlds = Processes(environment=Troubled(thread_safe=False), n_workers=2)
    settings: dict[str, Any] = {"environment": worlds, "reward": "environment"}
    world = World(limits(), settings=settings)
    try:
        assert [attempt.solved for attempt in world.play(work, 5)] == [True] * 5
    finally:
        worlds.close()
    found = [External(**settings, command=("agent",), n_programs=n).max_episodes for n in (None, 1, 3)]
    assert found == [2, 1, 2] and world.environment.max_episodes == 2
    assert External(environment=worlds, command=("agent",), n_programs=3).max_episodes == 3  # only its tasks are used


def test_an_attempt_that_nobody_takes_ends_as_a_timeout() -> None:
    (played,) = World(limits(start_timeout_s=0.5)).play(lambda mine: None, 1, n_threads=0)
    assert played.outcome is Outcome.TIMEOUT


@pytest.mark.parametrize("n_programs", [None, 1])
def test_a_program_that_hangs_is_told_of_while_it_is_waited_for(
    n_programs: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.gateway.environment.QUIET_S", 4.0 if n_programs else 1.5)
    claim = "import os, urllib.request as u\nu.urlopen(u.Request(os.environ['RLHF_GATEWAY'] + '/sessions', b'{}',"
    claim += "{'Authorization': 'Bearer ' + os.environ['RLHF_GATEWAY_KEY']}))\n"
    program = "import time\nprint('asks api.openai.com', flush=True)\ntime.sleep(60)"
    (tmp_path / "agent.py").write_text((claim if n_programs else "") + program)
    settings = {"command": (sys.executable, str(tmp_path / "agent.py")), "n_programs": n_programs}
    world = World(limits(start_timeout_s=9.0 if n_programs else 4.0), settings=settings)
    with pytest.warns(RuntimeWarning, match=r"no request.*api\.openai\.com.*OPENAI_BASE_URL.*start_timeout_s"):
        world.play(lambda mine: None, 1, n_threads=0)


def test_agents_that_do_not_come_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.gateway.environment.QUIET_S", 0.2)
    with pytest.warns(RuntimeWarning, match=r"no agent has asked.*/sessions.*start_timeout_s"):
        World(limits(start_timeout_s=3.0)).play(lambda mine: None, 1, n_threads=0)


def test_a_session_that_its_client_abandons_ends_and_frees_its_cache() -> None:
    world = World(limits(step_timeout_s=0.5))
    played = one(world, lambda mine: ask(client_of(mine)))
    assert played.outcome is Outcome.TIMEOUT
    assert world.engine.released == world.engine.names and len(world.engine.names) == 1


def test_a_request_whose_client_has_gone_is_given_up() -> None:
    def work(mine: dict[str, Any]) -> None:
        with pytest.raises(openai.APITimeoutError):
            ask(client_of(mine, timeout=0.3))
        world.engine.delay_s = 0.0
        ask(client_of(mine), messages=[{"role": "user", "content": "Again."}])
        finish(mine)

    world = World(limits(), delay_s=4.0)
    played = one(world, work)
    assert played.solved and len(played.generations) == 1 and world.engine.given_up == 1


def test_a_reply_that_no_client_got_is_no_part_of_the_attempt() -> None:
    def work(mine: dict[str, Any]) -> None:
        first = ask(client_of(mine))
        said = {"role": "assistant", "content": first.message.content}
        goes_on = [*HELLO, said, {"role": "user", "content": "Again."}]
        with pytest.raises(openai.APITimeoutError):
            ask(client_of(mine, timeout=0.5), messages=goes_on)
        time.sleep(1.5)  # it is sampled, and nobody asks for it within the grace
        ask(client_of(mine), messages=[*goes_on, {"role": "user", "content": "Go on."}])
        finish(mine)

    world = World(limits(), delay_s=1.0)
    played = one(world, work)
    assert world.engine.begun == 3 and world.engine.given_up == 0
    assert played.solved and len(played.generations) == 2
    assert not any("again" in note for turn in played.turns for note in turn.action.notes.values())


def lose(url: str, key: str, body: Any) -> None:
    """Go away in the middle of a reply."""
    written = json.dumps(body).encode()
    address, _, path = url.partition("://")[2].partition("/")
    host, _, port = address.partition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        head = f"POST /{path} HTTP/1.1\r\nHost: {host}\r\nx-api-key: {key}\r\n"
        client.sendall(f"{head}Content-Length: {len(written)}\r\n\r\n".encode() + written)
        assert client.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asks_again", [False, True])
def test_a_reply_that_is_lost_while_it_is_sent_is_sent_again_or_is_no_part_of_the_attempt(
    asks_again: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asks_again:
        monkeypatch.setattr("rlhf.gateway.session.GRACE_S", 60.0)

    def work(mine: dict[str, Any]) -> None:
        long = {"model": "m" * 2**23, "messages": HELLO}  # replies say the name, so no buffer holds them
        lose(f"{mine['base_url']}/chat/completions", mine["key"], {**long, "stream": stream})
        if asks_again:
            with contextlib.suppress(json.JSONDecodeError):  # events are none
                post(f"{mine['base_url']}/chat/completions", mine["key"], {**long, "stream": stream})
        else:
            ask(client_of(mine), messages=[{"role": "user", "content": "Another."}])
        finish(mine)

    world = World(limits())
    played = one(world, work)
    assert played.solved and len(played.generations) == 1 and world.engine.begun == 2 - asks_again


@pytest.mark.parametrize("pieces", [[b"{'a': 1}"], [b"event\n\n", b"[DONE]\n\n"]])
def test_a_client_that_closes_as_soon_as_it_has_a_reply_has_it(pieces: list[bytes]) -> None:
    async def sent() -> tuple[str, bytes]:
        leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        whole, got, said = b"".join(pieces), bytearray(), list[str]()

        async def reply(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200})
            for i, piece in enumerate(pieces, start=1):
                await send({"type": "http.response.body", "body": piece, "more_body": i < len(pieces)})

        async def client(message: Any) -> None:
            got.extend(message.get("body", b""))
            if bytes(got) == whole and not leaving.done():
                leaving.set_result(None)

        arrived, lost = lambda: said.append("arrived"), lambda: said.append("lost")
        await send_whole(lambda: reply, leaving, arrived, lost, {}, None, client)
        return " ".join(said), bytes(got)

    assert asyncio.run(sent()) == ("arrived", b"".join(pieces))


def test_a_call_that_waits_for_the_next_turn_is_sampled_in_this_one_where_others_are_given_up() -> None:
    def work(mine: dict[str, Any]) -> None:
        def give_up() -> None:
            with pytest.raises(openai.APITimeoutError):
                ask(client_of(mine, timeout=1.0))

        first = threading.Thread(target=give_up)
        first.start()
        time.sleep(0.3)  # it is the one call of the turn
        ask(client_of(mine), messages=[{"role": "user", "content": "Another."}])
        first.join()
        finish(mine)

    played = one(World(limits(max_generations_per_turn=1, step_timeout_s=20), delay_s=2.0), work)
    assert played.solved and [len(turn.generations) for turn in played.turns] == [1]


@pytest.mark.parametrize("delay_s", [1.0, 60.0])  # sampled before it is given up, and not
def test_a_call_that_its_client_gives_up_counts_for_none_of_the_turn(delay_s: float) -> None:
    def work(mine: dict[str, Any]) -> None:
        with pytest.raises(openai.APITimeoutError):
            ask(client_of(mine, timeout=0.5))
        [session] = programs_of(world.environment)._open.values()
        while not session.counts["n_abandoned_requests"]:
            time.sleep(0.05)
        world.engine.delay_s = 0.0
        ask(client_of(mine), messages=[{"role": "user", "content": "Another."}])
        finish(mine)

    world = World(limits(max_generations_per_turn=1, step_timeout_s=60), delay_s=delay_s)
    played = one(world, work)
    assert played.solved and [len(turn.generations) for turn in played.turns] == [1]


def test_calls_that_wait_for_the_next_turn_keep_their_order() -> None:
    async def answered() -> tuple[list[str], int]:
        session, said, n_left = Session({}), list[str](), 0

        async def answer(asked: ChatRequest, give: Any) -> Any:
            nonlocal n_left
            if not n_left:
                raise AgentError("no call is left")
            n_left -= 1
            said.append(asked.messages[-1].text)
            await give(ChatReply("ab", "", (), Finish.STOP, 0, 0))
            return None, "ab"

        bodies = [{"model": "m", "messages": [{"role": "user", "content": str(i)}]} for i in range(5)]
        asking = [asyncio.create_task(session.ask(chat.read(body))) for body in bodies]
        await asyncio.sleep(0)
        n_turns = 0
        while not all(task.done() for task in asking):
            n_left, n_turns = 2, n_turns + 1
            await session.turn(answer)
        return said, n_turns

    assert asyncio.run(answered()) == (["0", "1", "2", "3", "4"], 3)


def test_a_request_that_is_sent_again_is_sampled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.gateway.session.GRACE_S", 60.0)  # however long a busy machine's client takes

    def work(mine: dict[str, Any]) -> None:
        ask(client_of(mine, timeout=1.0, max_retries=5))
        finish(mine)

    world = World(limits(), delay_s=2.5)
    played = one(world, work)
    assert played.solved and len(played.generations) == 1 and world.engine.begun == 1


def test_the_same_question_asked_twice_is_answered_twice_unless_it_has_a_name() -> None:
    def work(mine: dict[str, Any]) -> None:
        client = client_of(mine)
        for _ in range(2):
            ask(client)
        named = [ask(client, extra_headers={"Idempotency-Key": "a"}).message.content for _ in range(2)]
        assert named[0] == named[1]
        finish(mine)

    played = one(World(limits()), work)
    assert played.solved and len(played.generations) == 3


def test_a_client_that_counts_no_repeats_asks_anew_once_it_has_the_reply() -> None:
    def work(mine: dict[str, Any]) -> None:
        for _ in range(3):
            ask(client_of(mine), extra_headers={"x-stainless-retry-count": openai.Omit()})
        finish(mine)

    assert len(one(World(limits()), work).generations) == 3


@pytest.mark.parametrize("count", [openai.Omit(), "0"])
def test_equal_requests_at_once_are_samples_of_their_own(count: Any) -> None:
    def work(mine: dict[str, Any]) -> None:
        said: list[str] = []

        def one_of_both() -> None:
            said.append(ask(client_of(mine), extra_headers={"x-stainless-retry-count": count}).message.content)

        both = [threading.Thread(target=one_of_both) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert len(set(said)) == 2
        finish(mine)

    played = one(World(limits(), delay_s=1.0), work)
    assert played.solved and len(played.generations) == 2


def test_requests_beyond_the_calls_of_a_turn_are_sampled_in_the_next() -> None:
    def work(mine: dict[str, Any]) -> None:
        said: list[int] = []

        def one_of_five(i: int) -> None:
            content = f"Question {i}"
            asked = client_of(mine).chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
            said.append(asked.usage.completion_tokens)  # type: ignore[union-attr]

        five = [threading.Thread(target=one_of_five, args=(i,)) for i in range(5)]
        for thread in five:
            thread.start()
        for thread in five:
            thread.join()
        assert len(said) == 5 and all(said)
        finish(mine)

    played = one(World(limits(max_generations_per_turn=2), delay_s=1.0), work)
    assert played.solved and [len(turn.generations) for turn in played.turns] == [2, 2, 1]


@pytest.mark.parametrize("delay_s", [2.5, 1.0])  # sent again before it is answered, and after that
def test_a_request_without_a_count_is_sampled_once_where_its_client_was_gone(
    delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.gateway.session.GRACE_S", 60.0)

    def work(mine: dict[str, Any]) -> None:
        uncounted: Any = {"x-stainless-retry-count": openai.Omit()}
        with pytest.raises(openai.APITimeoutError):
            ask(client_of(mine, timeout=0.5), extra_headers=uncounted)
        time.sleep(1.0)
        ask(client_of(mine), extra_headers=uncounted)
        finish(mine)

    world = World(limits(), delay_s=delay_s)
    played = one(world, work)
    assert played.solved and len(played.generations) == 1 and world.engine.begun == 1


def test_equal_requests_that_are_sent_again_get_a_reply_each() -> None:
    async def asked_again() -> tuple[int, int]:
        session = Session({})
        asked = chat.read({"model": "m", "messages": HELLO})
        lost = [asyncio.create_task(session.ask(asked)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in lost:
            task.cancel()
        await asyncio.gather(*lost, return_exceptions=True)
        again = [asyncio.create_task(session.ask(asked, repeats=True)) for _ in range(3)]
        await asyncio.sleep(0)
        session.answer_with("ab", lambda text, asked: ChatReply(text, "", (), Finish.STOP, 0, 0))
        return len({reply.id for reply in await asyncio.gather(*again)}), session.counts["n_requests"]

    assert asyncio.run(asked_again()) == (3, 3)


def test_a_request_after_the_end_is_refused() -> None:
    def work(mine: dict[str, Any]) -> None:
        ask(client_of(mine))
        finish(mine)
        try:
            ask(client_of(mine, max_retries=3))
        except openai.APIError as error:
            refused.append(error)

    refused: list[openai.APIError] = []
    played = World(limits()).play(work, 2, n_threads=1)  # the gateway is there while the second is made
    assert [attempt.solved for attempt in played] == [True, True]
    first = refused[0]
    assert isinstance(first, openai.APIStatusError) and first.status_code in (404, 409) and "over" in str(first)


def test_what_ended_a_session_is_said() -> None:
    async def refused(end: Callable[[Session], None]) -> str:
        session = Session({})
        end(session)
        session.close()
        return session._refused_over().message

    def fall_silent(session: Session) -> None:
        session.failure = "no request for 30 s"

    assert "the agent has ended it" in asyncio.run(refused(lambda session: session.end(finished=True)))
    assert "no request for 30 s" in asyncio.run(refused(fall_silent))
    assert "turns or time are over" in asyncio.run(refused(lambda session: None))


def test_of_requests_that_are_alike_none_waits_for_ever_at_the_end() -> None:
    async def alike() -> list[object]:
        session = Session({})
        asked = chat.read({"model": "m", "messages": HELLO})
        both = [asyncio.create_task(session.ask(asked)) for _ in range(2)]
        await asyncio.sleep(0)
        session.close()
        async with asyncio.timeout(30):
            return list(await asyncio.gather(*both, return_exceptions=True))

    found = asyncio.run(alike())
    assert [type(one) for one in found] == [Refusal, Refusal], found


def test_a_wrong_key_is_refused() -> None:
    def work(mine: dict[str, Any]) -> None:
        with pytest.raises(openai.AuthenticationError):
            ask(client_of({**mine, "key": "another"}))
        ask(client_of(mine))
        finish(mine)

    assert one(World(limits()), work).solved


BREAKS = [
    {"temperature": 0}, {"top_p": 0.9}, {"n": 2}, {"stop": ["."]}, {"logit_bias": {"5": 1}}, {"presence_penalty": 0.5},
    {"frequency_penalty": 1}, {"response_format": {"type": "json_object"}}, {"tool_choice": "required"},
    {"logprobs": True, "top_logprobs": 3},
    {"parallel_tool_calls": False, "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}]},
]  # fmt: skip


def test_parameters_that_break_the_contract_of_log_probs_are_refused() -> None:
    def work(mine: dict[str, Any]) -> None:
        for broken in BREAKS:
            with pytest.raises(openai.BadRequestError, match="override_sampling"):
                ask(client_of(mine), **broken)
        harmless = {
            "temperature": 1,
            "top_p": 1,
            "n": 1,
            "seed": 3,
            "user": "me",
            "store": True,
            "metadata": {"a": "b"},
            "parallel_tool_calls": False,  # there are no tools
        }
        said = ask(client_of(mine), **harmless, logprobs=True)
        recorded.extend(token.logprob for token in said.logprobs.content)
        finish(mine)

    recorded: list[float] = []
    played = one(World(limits()), work)
    assert played.solved and list(played.generations[0].logprobs) == pytest.approx(recorded)


def test_a_recipe_may_override_parameters_and_the_record_says_so() -> None:
    def work(mine: dict[str, Any]) -> None:
        ask(client_of(mine), temperature=0, top_p=0.5)
        finish(mine)

    played = one(World(limits(), ExternalAgent(override_sampling=True)), work)
    assert played.solved and played.turns[0].action.notes["overridden"] == "temperature=0, top_p=0.5"


def test_a_reply_that_was_cut_says_so_and_is_not_gone_on_from() -> None:
    def work(mine: dict[str, Any]) -> None:
        client = client_of(mine)
        for i in range(20):  # one token may be the last of a reply
            begun: Any = [{"role": "user", "content": f"Begin {i}."}]
            said = ask(client, messages=begun, max_completion_tokens=1)
            if said.finish_reason == "length":
                ask(client, messages=[*begun, said.message.model_dump(exclude_none=True), HELLO[0]])
                break
        finish(mine)

    played = one(World(limits()), work)
    forks = [note for turn in played.turns for name, note in turn.action.notes.items() if name.startswith("fork")]
    assert played.solved and forks[-1].startswith("cut ")
    assert played.generations[-2].finish is Finish.LENGTH


def test_a_delivery_in_the_middle_of_an_attempt_loses_nothing() -> None:
    def work(mine: dict[str, Any]) -> None:
        client = client_of(mine)
        messages = [*HELLO]

        def ask_again() -> None:
            said.append(ask(client, messages=messages))

        for version in (1, 2):
            asking, begun = threading.Thread(target=ask_again), world.engine.begun
            asking.start()
            while world.engine.begun == begun:
                time.sleep(0.01)
            delivery = world.engine.load(PolicyWeights(version))
            asyncio.run_coroutine_threadsafe(delivery, world.engine.loop).result(30)
            asking.join()
            messages += [said[-1].message.model_dump(exclude_none=True), HELLO[0]]
        said.append(ask(client, messages=messages))
        finish(mine)

    said: list[Any] = []
    world = World(limits(max_tokens=24), delay_s=0.2)
    played = one(world, work)
    versions = [generation.policy_version for generation in played.generations]
    assert played.solved and len(said) == 3 and versions[-1] == 2 and versions == sorted(versions)


def of_anthropic(mine: dict[str, Any], **how: Any) -> Any:
    import anthropic

    client = anthropic.Anthropic(base_url=mine["url"], api_key=mine["key"], max_retries=0)
    return client.messages.create(**{"model": "m", "max_tokens": 9, "messages": HELLO, **how})


def of_responses(mine: dict[str, Any], **how: Any) -> Any:
    return client_of(mine).responses.create(**{"model": "m", "input": "Begin.", **how})


@pytest.mark.parametrize(
    ("wire", "body", "told"),
    [
        (chat, {"messages": HELLO}, {"parallel_tool_calls": False}),
        (responses, {"input": "Begin."}, {"parallel_tool_calls": False}),
        (anthropic_messages, {"messages": HELLO}, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ],
)
def test_every_wire_tells_of_a_client_that_takes_one_call_at_a_time(wire: Any, body: Any, told: Any) -> None:
    assert wire.read({**body, **told}).sampling == told
    assert not wire.read({**body, "parallel_tool_calls": True}).sampling


def test_a_text_as_it_is_anyway_is_no_parameter_of_a_response() -> None:
    form, length = {"format": {"type": "text"}}, {"verbosity": "medium"}
    for text in ({}, form, length, {**form, **length}, {**length, **form}):
        assert not responses.read({"input": "Begin.", "text": text}).sampling
    for text in ({**form, "verbosity": "low"}, {"format": {"type": "json_object"}, **length}):
        assert responses.read({"input": "Begin.", "text": text}).sampling == {"text": text}


@pytest.mark.parametrize("parallel", [True, False])
def test_a_response_repeats_whether_calls_may_be_parallel(parallel: bool) -> None:
    asked = responses.read({"input": "Begin.", "parallel_tool_calls": parallel})
    said = responses.reply(ChatReply("ab", "", (), Finish.STOP, 0, 0), asked)
    assert said["parallel_tool_calls"] is parallel


def test_one_call_at_a_time_is_no_parameter_where_no_more_are_made() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    asked = chat.read({"messages": HELLO, "tools": tools, "parallel_tool_calls": False})
    assert ExternalAgent(max_calls_per_reply=1).overridden(asked, 1.0) == {}
    with pytest.raises(Refusal, match="parallel_tool_calls"):
        ExternalAgent(max_calls_per_reply=2).overridden(asked, 1.0)


@pytest.mark.parametrize("asks", [of_anthropic, of_responses])
def test_the_other_wires_refuse_in_their_own_form(asks: Any) -> None:
    def work(mine: dict[str, Any]) -> None:
        gateway = programs_of(world.environment).gateway
        assert gateway is not None
        given: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({**mine, "key": "another"}, {}),
            (mine, {"extra_body": {"temperature": 0.0}}),
            (mine, {"tools": [{"type": "web_search"}]}),
        ]
        for where, how in given:
            with pytest.raises(Exception, match="Do:") as refused:
                asks(where, **how)
            statuses.append((refused.value.status_code, type(refused.value).__name__))  # type: ignore[attr-defined]
        gateway.max_requests = 0
        with pytest.raises(Exception, match="under way") as refused:
            asks(mine)
        statuses.append((refused.value.status_code, type(refused.value).__name__))  # type: ignore[attr-defined]
        gateway.max_requests = 10
        asks(mine)
        finish(mine)

    statuses: list[tuple[int, str]] = []
    world = World(limits())
    assert one(world, work).solved
    bad = (400, "BadRequestError")
    assert statuses == [(401, "AuthenticationError"), bad, bad, (429, "RateLimitError")]


def test_a_gateway_without_room_says_when_to_come_again() -> None:
    def work(mine: dict[str, Any]) -> None:
        gateway = programs_of(world.environment).gateway
        assert gateway is not None
        gateway.max_requests = 0
        with pytest.raises(openai.RateLimitError) as busy:
            ask(client_of(mine))
        assert busy.value.response.headers["retry-after"] == "1"
        gateway.max_requests = 10
        ask(client_of(mine))
        finish(mine)

    world = World(limits())
    assert one(world, work).solved


def test_a_reply_that_is_not_known_cannot_be_gone_on_from() -> None:
    def work(mine: dict[str, Any]) -> None:
        with pytest.raises(openai.NotFoundError):
            client_of(mine).responses.create(model="m", input="x", previous_response_id="resp_none")
        ask(client_of(mine))
        finish(mine)

    assert one(World(limits()), work).solved


@pytest.mark.parametrize("content", [[{"type": "image_url", "image_url": {"url": "x"}}], 5])
def test_messages_that_are_no_text_are_refused(content: Any) -> None:
    def work(mine: dict[str, Any]) -> None:
        with pytest.raises(openai.BadRequestError, match="Expected"):
            ask(client_of(mine), messages=[{"role": "user", "content": content}])
        ask(client_of(mine))
        finish(mine)

    assert one(World(limits()), work).solved


def test_a_prompt_that_fills_the_context_is_refused_and_the_agent_may_go_on() -> None:
    def work(mine: dict[str, Any]) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client_of(mine), messages=[{"role": "user", "content": "ab" * 9000}])
        assert refused.value.code == "context_length_exceeded"
        ask(client_of(mine))
        finish(mine)

    assert one(World(limits()), work).solved


PROGRAM = """
import json, os, sys, urllib.request
task, key = json.loads(os.environ["RLHF_TASK"]), os.environ["RLHF_KEY"]
def post(url, body):
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)))
if "crash" in sys.argv: raise SystemExit("out of luck")
post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": [{"role": "user", "content": task["id"]}]})
if "silent" not in sys.argv: post(os.environ["RLHF_SESSION"] + "/reward", {"reward": 2.0})
"""


@pytest.mark.parametrize(
    ("how", "outcome", "says"),
    [
        ("well", Outcome.SOLVED, ""),
        ("silent", Outcome.REWARD_ERROR, "without a reward"),
        ("crash", Outcome.AGENT_ERROR, "out of luck"),
        ("absent", Outcome.AGENT_ERROR, "cannot be started"),
    ],
)
def test_a_program_of_each_attempt(how: str, outcome: Outcome, says: str, tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(PROGRAM)
    python = "no-such-program" if how == "absent" else sys.executable
    settings = {"command": (python, str(path), how), "reward_timeout_s": 0.1}
    (played,) = World(limits(), settings=settings).play(lambda mine: None, 1, n_threads=0)
    assert played.outcome is outcome and says in played.detail
    if how == "well":
        assert played.turns[-1].reward == 2.0 and played.task_id in played.opening


def one_program() -> Programs:
    """Programs of an environment, of which one runs at a time."""
    limits: dict[str, Any] = {"variables": {}, "memory_mb": None, "cpu_s": None, "folder": None}
    return Programs(SimpleNamespace(command=("python3", "agent.py"), n_programs=1, **limits))  # type: ignore[arg-type]


def test_a_program_that_cannot_be_started_leaves_its_place_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = [OSError("Resource temporarily unavailable")]

    async def start(self: Program) -> None:
        if fails:
            raise fails.pop()

    monkeypatch.setattr(Program, "start", start)
    programs = one_program()
    gateway: Any = SimpleNamespace(keys=set(), url="http://127.0.0.1:1")

    async def run() -> None:
        with pytest.raises(OSError, match="temporarily"):
            await programs._start(gateway)
        assert not programs._running and not gateway.keys
        await programs._start(gateway)
        assert len(programs._running) == len(gateway.keys) == 1

    asyncio.run(run())


def test_attempts_fail_at_once_where_no_program_can_be_started_again(tmp_path: Path) -> None:
    program = tmp_path / "agent"
    program.write_text('#!/bin/sh\nrm "$0"\n')
    program.chmod(0o700)
    settings = {"command": (str(program),), "n_programs": 1}
    (played,) = World(limits(start_timeout_s=9), settings=settings).play(lambda mine: None, 1, n_threads=0)
    assert played.outcome is Outcome.AGENT_ERROR and "cannot be started" in played.detail


def test_an_attempt_is_not_given_to_a_client_that_has_gone() -> None:
    gateway = Gateway(key="known")
    gateway.start()
    try:
        with socket.create_connection(("127.0.0.1", gateway.port)) as gone:
            asks = "POST /sessions HTTP/1.1", "Host: here", "Authorization: Bearer known", "Content-Length: 0"
            gone.sendall("".join(f"{line}\r\n" for line in (*asks, "")).encode())
            time.sleep(0.3)
        session: Any = SimpleNamespace(id="one", key="its own", task={})
        gateway.add(session, waits=True)
        time.sleep(0.3)
        assert post(f"{gateway.url}/sessions", gateway.key)["id"] == "one"
    finally:
        gateway.close()


def test_an_attempt_is_not_given_to_a_client_that_goes_while_it_is_told() -> None:
    gateway, claimed = Gateway(key="known"), list[str]()
    gateway.claimed = lambda session, key: claimed.append(session.id)
    gateway.start()
    try:
        session: Any = SimpleNamespace(id="one", key="its own", task={"prompt": "m" * 2**23})  # no buffer holds it
        gateway.add(session, waits=True)
        lose(f"{gateway.url}/sessions", gateway.key, {})
        assert post(f"{gateway.url}/sessions", gateway.key)["id"] == "one" and claimed == ["one"]
    finally:
        gateway.close()


def test_an_attempt_that_is_removed_while_it_is_put_back_waits_for_nobody() -> None:
    gateway = Gateway(key="known")
    session: Any = SimpleNamespace(id="one")

    class Line(deque[Any]):
        def appendleft(self, given: Any) -> None:  # the run's thread removes it at this moment
            gateway.remove(session)
            super().appendleft(given)

    gateway.waiting = Line()
    gateway.add(session, waits=False)
    gateway.put_back(session)
    assert not gateway.waiting


DIES = """
import os, pathlib, subprocess as s, sys, time, urllib.request as u
if (been := pathlib.Path(sys.argv[1])).exists(): time.sleep(60)
been.touch()
children = [s.Popen(["sleep", "60"]).pid for _ in sys.argv[2:]]
been.write_text(" ".join(map(str, children)))
key = {"Authorization": "Bearer " + os.environ["RLHF_GATEWAY_KEY"]}
u.urlopen(u.Request(os.environ["RLHF_GATEWAY"] + "/sessions", b"{}", key)).read(1)
os.write(2, b"out of luck")
os._exit(0)
"""


def test_a_program_that_ends_as_it_gets_its_attempt_fails_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Programs._claimed

    def late(self: Programs, session: Session, key: str) -> None:
        deadline = time.monotonic() + 20
        while self.gateway and key in self.gateway.keys and time.monotonic() < deadline:
            time.sleep(0.01)  # the run hears that the program has ended before the server does
        real(self, session, key)

    monkeypatch.setattr(Programs, "_claimed", late)
    (tmp_path / "agent.py").write_text(DIES)
    settings = {"command": (sys.executable, str(tmp_path / "agent.py"), str(tmp_path / "been")), "n_programs": 1}
    (played,) = World(limits(start_timeout_s=9), settings=settings).play(lambda mine: None, 1, n_threads=0)
    assert played.outcome is Outcome.AGENT_ERROR and "out of luck" in played.detail


def test_what_a_program_began_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(DIES)
    command = (sys.executable, str(tmp_path / "agent.py"), str(tmp_path / "been"), "with a child")
    settings = {"command": command, "n_programs": 1}
    (played,) = World(limits(start_timeout_s=9), settings=settings).play(lambda mine: None, 1, n_threads=0)
    child = Path("/proc", (tmp_path / "been").read_text(), "stat")
    assert played.outcome is Outcome.AGENT_ERROR
    assert not child.exists() or child.read_text().rpartition(") ")[2].startswith("Z")


def test_programs_that_end_between_attempts_fail_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(self: Program) -> None:
        pass

    monkeypatch.setattr(Program, "start", start)
    programs = one_program()
    gateway: Any = SimpleNamespace(keys=set(), url="http://127.0.0.1:1", remove=lambda session: None)
    programs.gateway = gateway

    async def run() -> None:
        waiting = Session({})
        programs._open[waiting.id] = waiting
        for _ in range(5):
            await programs._start(gateway)
            [key] = programs._running
            done = Session({})
            programs._claimed(done, key)
            programs.end(done)
            programs._ended(key)
            await asyncio.gather(*programs._replacing)
            programs._running.clear()
        assert not waiting.is_over and not programs._served

    asyncio.run(run())


@pytest.mark.parametrize("wire", [chat, anthropic_messages, responses])
def test_results_of_parallel_calls_stand_in_the_order_of_the_calls(wire: Any) -> None:
    cities = {"a": "Oslo", "b": "Rome"}
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in cities]
    of_wire = {
        chat: lambda ids: {
            "messages": [
                {"role": "assistant", "tool_calls": calls},
                *({"role": "tool", "tool_call_id": i, "content": cities.get(i, "?")} for i in ids),
            ]
        },
        anthropic_messages: lambda ids: {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i in cities],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": i, "content": cities.get(i, "?")} for i in ids],
                },
            ]
        },
        responses: lambda ids: {
            "input": [
                *({"type": "function_call", "call_id": i, "name": "f", "arguments": "{}"} for i in cities),
                *({"type": "function_call_output", "call_id": i, "output": cities.get(i, "?")} for i in ids),
            ]
        },
    }
    for ids, told in ((("b", "a"), ["Oslo", "Rome"]), (("b", "c"), ["Rome", "?"])):
        assert [message.text for message in wire.read(of_wire[wire](ids)).after(()).messages[1:]] == told


def test_results_of_parallel_calls_of_a_reply_gone_on_from_stand_in_the_order_of_the_calls() -> None:
    calls = tuple((str(n), ToolCall("f", {"n": n})) for n in range(2))
    answered = ChatReply("", "", calls, Finish.STOP, 1, 1)
    items = responses.reply(answered, responses.read({"input": "a"}))["output"]
    called = [item["call_id"] for item in items if item["type"] == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": name, "output": name} for name in reversed(called)]
    asked = responses.read({"input": outputs, "previous_response_id": responses.id_of(answered)})
    assert [message.text for message in asked.after([answered.said]).messages[1:]] == called


@pytest.mark.parametrize(
    ("wire", "body"),
    [
        (chat, {"messages": [{"role": "user", "content": "a"}], "stream_options": True}),
        (chat, {"messages": [{"role": {}, "content": "a"}]}),
        (chat, {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}),
        (anthropic_messages, {"messages": [{"role": "user", "content": "a"}], "thinking": "enabled"}),
        (responses, {"input": "a", "include": 5}),
    ],
)
def test_fields_of_another_type_are_refused(wire: Any, body: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as caught:
        server._read(wire, body)
    assert caught.value.status == 400


async def long_task_and_message() -> None:
    task = Session({"text": "a" * 200_000})
    assert "RLHF_TASK" not in variables_of("http://here", task)
    assert "RLHF_TASK" in variables_of("http://here", Session({"text": "a"}))
    asked = chat.read({"messages": [{"role": "user", "content": "a" * 5_000_000 + "end"}]})
    task._pending.append(SimpleNamespace(asked=asked))  # type: ignore[arg-type]
    assert len(task.said) == 1_000_000 and task.said.endswith("end")


def test_long_tasks_and_messages_fit() -> None:
    asyncio.run(long_task_and_message())


def test_a_program_that_reads_nothing_begins_with_a_long_task() -> None:
    async def run() -> None:
        program = Program(("sleep", "60"), {}, on_end=lambda: None)
        async with asyncio.timeout(20):
            await program.start(b"a" * 1_000_000)
            await program.close()

    asyncio.run(run())


def test_the_agent_outside_speaks_the_format_of_the_recipes_tools() -> None:
    found = external_agent(ToolAgent(tool_format="json"), "system_prompt")
    assert (found.tool_format, found.tool_definitions) == ("json", ToolAgent().tool_definitions)
    assert external_agent(None, "system_prompt") == ExternalAgent(tool_definitions="system_prompt")
