"""Time that the gateway adds to a request, beside a plain OpenAI route over the same engine.

    python benchmarks/gateway.py --sessions 64 --turns 6 --latency 0.5
    python benchmarks/gateway.py --soak 10000

The engine takes `latency` seconds for a reply and does nothing else, so what is beyond them is the route's. The plain
route renders the whole history by the chat template and keeps nothing. Clients are another process. Both routes are
asked some questions before they are measured, and are measured in turn. The processor's time says more than the clock
where the machine has other work.

With `--soak` so many sessions follow each other, in steps as a run makes them: each has to be answered and counted, and
the memory is printed on the way.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from rlhf.data import SamplingParams, Task

KEY = "benchmark"
REPLY = "go north, and then east"
#: Conversations before anything is measured.
N_WARM = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--latency", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=int, default=0, metavar="SESSIONS", help="sessions one after the other")
    parser.add_argument("--client", nargs=3, default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.client:
        mode, url, n = asked.client
        work = stream_of_sessions(url, int(n), asked) if mode == "soak" else at_once(mode, url, int(n), asked.turns)
        print(json.dumps(asyncio.run(work)))
        return
    os.environ["RLHF_GATEWAY_KEY"] = KEY
    if asked.soak:
        asyncio.run(soak(asked))
    else:
        compare(asked)


def compare(asked: argparse.Namespace) -> None:
    """Measure both routes in turn and print what they take."""
    found: dict[str, list[Any]] = {"plain route": [], "gateway": []}
    for _ in range(asked.rounds):
        found["plain route"].append(asyncio.run(plain(asked)))
        found["gateway"].append(asyncio.run(gateway(asked)))
    for name, rounds in found.items():
        over_ms = sorted(1000 * (s - asked.latency) for each in rounds for s in each["seconds"])
        median, p99 = statistics.median(over_ms), over_ms[int(0.99 * (len(over_ms) - 1))]
        used_ms = 1000 * sum(each["processor_s"] for each in rounds) / len(over_ms)
        walls = ", ".join(f"{each['wall_s']:.2f}" for each in rounds)
        print(
            f"{name:12} {len(over_ms)} requests, {asked.sessions} at once: {median:.1f} ms median and {p99:.1f} ms "
            f"99th percentile beyond the engine's {1000 * asked.latency:g} ms; {used_ms:.2f} ms of the processor for "
            f"each; wall clock {walls} s"
        )
    pairs = zip(found["gateway"], found["plain route"], strict=True)
    ratios = sorted(ours["wall_s"] / theirs["wall_s"] for ours, theirs in pairs)
    middle = statistics.median(ratios)
    print(f"wall clock of the gateway over that of the plain route: {middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


def poster(http: Any) -> Any:
    """Post JSON with a key, and again where there is nothing yet to take."""

    async def post(address: str, key: str, body: Any) -> Any:
        while True:
            async with http.post(address, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
                if answer.status == 429:
                    continue
                assert answer.status == 200, await answer.text()
                return await answer.json()

    return post


async def conversation(post: Any, mine: dict[str, Any], turns: int, seconds: list[float]) -> None:
    """Have one conversation and note how long each reply took."""
    messages: list[Any] = [{"role": "user", "content": f"You are in room {mine['key'][:4]}."}]
    for turn in range(turns):
        begun = time.perf_counter()
        body = {"model": "policy", "messages": messages}
        said = await post(f"{mine['base_url']}/chat/completions", mine["key"], body)
        seconds.append(time.perf_counter() - begun)
        messages += [said["choices"][0]["message"], {"role": "user", "content": f"Room {turn}."}]


async def at_once(mode: str, url: str, n: int, turns: int) -> dict[str, Any]:
    """Have `n` conversations at once and say how long each request took."""
    import aiohttp

    seconds: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        post = poster(http)

        async def talk(mine: dict[str, Any]) -> None:
            await conversation(post, mine, turns, seconds)
            if mode == "gateway":
                await post(f"{mine['url']}/finish", mine["key"], {"reward": 1.0})

        own = {"base_url": f"{url}/v1", "key": KEY}
        opened = [await post(f"{url}/sessions", KEY, {}) if mode == "gateway" else own for _ in range(n)]
        begun = time.perf_counter()
        await asyncio.gather(*map(talk, opened))
        return {"seconds": seconds, "wall_s": time.perf_counter() - begun}


async def stream_of_sessions(url: str, n: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Have `n` sessions, some at a time, and say how many came to their end."""
    import aiohttp

    seconds: list[float] = []
    left = iter(range(n))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        post = poster(http)

        async def worker() -> int:
            n_ended = 0
            for _ in left:
                mine = await post(f"{url}/sessions", KEY, {})
                await conversation(post, mine, asked.turns, seconds)
                n_ended += (await post(f"{mine['url']}/finish", mine["key"], {"reward": 1.0}))["ok"]
            return n_ended

        ended = await asyncio.gather(*(worker() for _ in range(asked.sessions)))
        return {"n_ended": sum(ended), "n_requests": len(seconds)}


async def at_client(mode: str, url: str, n: int, asked: argparse.Namespace) -> Any:
    """Run the clients in another process; says what this process took of the processor meanwhile."""
    command = [sys.executable, __file__, "--client", mode, url, str(n)]
    command += ["--sessions", str(asked.sessions), "--turns", str(asked.turns)]
    begun = time.process_time()
    done = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, check=True)
    return {**json.loads(done.stdout), "processor_s": time.process_time() - begun}


async def warm(mode: str, url: str, asked: argparse.Namespace) -> Any:
    """Ask some questions, then measure."""
    await at_client(mode, url, N_WARM, asked)
    return await at_client(mode, url, asked.sessions, asked)


def parts(latency: float) -> tuple[Any, Any]:
    """Engine and renderer."""
    from rlhf.inference.scripted import ScriptedEngine
    from rlhf.rollout.renderer import Renderer
    from rlhf.training.policy.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([REPLY, "You are in room 1."], vocab_size=320, max_context=4096)
    engine = ScriptedEngine(lambda text: REPLY, tokenizer=tokenizer, latency_s=latency, max_context=4096)
    return engine, Renderer(tokenizer)


@dataclass(frozen=True)
class Rooms:
    """As many tasks as there are sessions."""

    n: int

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"room/{i}", seed=i) for i in range(self.n)]

    def start(self, task: Task) -> Any:
        raise AssertionError("nobody plays here")


def served_by(asked: argparse.Namespace, n: int, latency: float) -> tuple[Any, Any]:
    """An environment of outside agents with `n` tasks, and how they are played."""
    from rlhf.gateway.agent import ExternalAgent
    from rlhf.gateway.environment import External
    from rlhf.rollout.group import run_groups
    from rlhf.rollout.limits import Limits

    engine, renderer = parts(latency)
    environment = External(environment=Rooms(n))  # type: ignore[arg-type]
    limits = Limits(max_turns=asked.turns + 1, max_tokens=64, max_concurrent=asked.sessions)
    how = (environment, ExternalAgent(), engine, renderer, limits, SamplingParams())
    return environment, lambda tasks: run_groups(tasks, *how, group_size=1, seed=0)


async def url_of(environment: Any) -> str:
    """Address of the gateway, once it listens."""
    from rlhf.gateway.programs import programs_of

    while (served := programs_of(environment).gateway) is None:
        await asyncio.sleep(0.01)
    return str(served.url)


def n_whole(groups: Any, turns: int) -> int:
    """Number of attempts that hold every turn and their reward."""
    return sum(len(t.generations) == turns and t.solved for group in groups for t in group)


async def gateway(asked: argparse.Namespace) -> Any:
    """Serve through the gateway, as a run does."""
    n = asked.sessions + N_WARM
    environment, play = served_by(asked, n, asked.latency)
    playing = asyncio.create_task(play(environment.tasks("train")))
    try:
        found = await warm("gateway", await url_of(environment), asked)
        assert n_whole(await playing, asked.turns) == n
        return found
    finally:
        playing.cancel()
        environment.close()


async def soak(asked: argparse.Namespace) -> None:
    """Serve many sessions in steps, and print how many came through and what memory is used."""
    import psutil

    environment, play = served_by(asked, asked.soak, 0.0)
    tasks, own = environment.tasks("train"), psutil.Process()
    n_step = max(asked.sessions, asked.soak // 20)
    clients: Any = None
    n_scored, memory_mb = 0, list[float]()
    begun = time.perf_counter()
    try:
        for at in range(0, asked.soak, n_step):
            playing = asyncio.create_task(play(tasks[at : at + n_step]))
            if clients is None:
                clients = asyncio.create_task(at_client("soak", await url_of(environment), asked.soak, asked))
            n_scored += n_whole(await playing, asked.turns)
            gc.collect()
            memory_mb.append(own.memory_info().rss / 2**20)
            took = time.perf_counter() - begun
            print(f"{n_scored} sessions, {took:.0f} s, {memory_mb[-1]:.1f} MiB, {len(gc.get_objects())} objects")
        said = await clients
    finally:
        environment.close()
    print(
        f"{asked.soak} sessions: {said['n_ended']} ended by their clients after {said['n_requests']} replies, "
        f"{n_scored} recorded whole; memory {memory_mb[-1] - memory_mb[len(memory_mb) // 2]:+.1f} MiB over the last "
        "half"
    )


async def plain(asked: argparse.Namespace) -> Any:
    """Serve a route that renders each history anew, on a thread of its own as the gateway does."""
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from rlhf.data import Message, Role

    engine, renderer = parts(asked.latency)
    loop = asyncio.get_running_loop()

    async def complete(request: Any) -> Any:
        body = await request.json()
        prompt = renderer.prompt([Message(Role(m["role"]), m["content"]) for m in body["messages"]])
        work = engine.generate(prompt, SamplingParams(max_tokens=64))
        said = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
        message = {"role": "assistant", "content": renderer.reply_text(said.token_ids)}
        return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)
    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    threading.Thread(target=server.run, args=([listening],), daemon=True).start()
    try:
        return await warm("plain", f"http://127.0.0.1:{listening.getsockname()[1]}", asked)
    finally:
        server.should_exit = True


if __name__ == "__main__":
    main()
