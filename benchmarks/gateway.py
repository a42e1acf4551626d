"""Time that the gateway adds to a request, beside a plain OpenAI route over the same engine.

    python benchmarks/gateway.py --sessions 64 --turns 6 --latency 0.5

The engine takes `latency` seconds for a reply and does nothing else, so what is beyond them is the route's. The plain
route renders the whole history by the chat template and keeps nothing. Clients are another process.
"""

from __future__ import annotations

import argparse
import asyncio
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--latency", type=float, default=0.5)
    parser.add_argument("--client", nargs=2, default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.client:
        print(json.dumps(asyncio.run(clients(*asked.client, asked.sessions, asked.turns))))
        return
    os.environ["RLHF_GATEWAY_KEY"] = KEY
    walls = {}
    for name, serve in (("plain route", plain), ("gateway", gateway)):
        found = asyncio.run(serve(asked))
        over_ms = sorted(1000 * (s - asked.latency) for s in found["seconds"])
        walls[name] = found["wall_s"]
        median, p99 = statistics.median(over_ms), over_ms[int(0.99 * (len(over_ms) - 1))]
        print(
            f"{name:12} {len(over_ms)} requests, {asked.sessions} at once: {median:.1f} ms median and {p99:.1f} ms "
            f"99th percentile beyond the engine's {1000 * asked.latency:g} ms; wall clock {found['wall_s']:.2f} s"
        )
    print(f"wall clock of the gateway over that of the plain route: {walls['gateway'] / walls['plain route']:.3f}")


async def clients(mode: str, url: str, n: int, turns: int) -> dict[str, Any]:
    """Have `n` conversations at once and say how long each request took."""
    import aiohttp

    seconds: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def post(address: str, key: str, body: Any) -> Any:
            async with http.post(address, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        async def talk(i: int, mine: dict[str, Any]) -> None:
            messages: list[Any] = [{"role": "user", "content": f"You are in room {i}."}]
            for turn in range(turns):
                begun = time.perf_counter()
                body = {"model": "policy", "messages": messages}
                said = await post(f"{mine['base_url']}/chat/completions", mine["key"], body)
                seconds.append(time.perf_counter() - begun)
                messages += [said["choices"][0]["message"], {"role": "user", "content": f"Room {turn}."}]
            if mode == "gateway":
                await post(f"{mine['url']}/finish", mine["key"], {"reward": 1.0})

        own = {"base_url": f"{url}/v1", "key": KEY}
        opened = [await post(f"{url}/sessions", KEY, {}) if mode == "gateway" else own for _ in range(n)]
        begun = time.perf_counter()
        await asyncio.gather(*(talk(i, mine) for i, mine in enumerate(opened)))
        return {"seconds": seconds, "wall_s": time.perf_counter() - begun}


async def at_client(mode: str, url: str, asked: argparse.Namespace) -> Any:
    """Run the clients in another process."""
    command = [sys.executable, __file__, "--client", mode, url]
    command += ["--sessions", str(asked.sessions), "--turns", str(asked.turns)]
    done = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def parts(asked: argparse.Namespace) -> tuple[Any, Any]:
    """Engine and renderer."""
    from rlhf.inference.scripted import ScriptedEngine
    from rlhf.rollout.renderer import Renderer
    from rlhf.training.policy.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([REPLY, "You are in room 1."], vocab_size=320, max_context=4096)
    engine = ScriptedEngine(lambda text: REPLY, tokenizer=tokenizer, latency_s=asked.latency, max_context=4096)
    return engine, Renderer(tokenizer)


@dataclass(frozen=True)
class Rooms:
    """As many tasks as there are sessions."""

    n: int

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"room/{i}", seed=i) for i in range(self.n)]

    def start(self, task: Task) -> Any:
        raise AssertionError("nobody plays here")


async def gateway(asked: argparse.Namespace) -> Any:
    """Serve through the gateway, as a run does."""
    from rlhf.gateway.agent import ExternalAgent
    from rlhf.gateway.environment import External
    from rlhf.gateway.programs import programs_of
    from rlhf.rollout.group import run_groups
    from rlhf.rollout.limits import Limits

    engine, renderer = parts(asked)
    environment = External(world=Rooms(asked.sessions))  # type: ignore[arg-type]
    limits = Limits(max_turns=asked.turns + 1, max_tokens=64, max_concurrent=asked.sessions)
    how = (environment, ExternalAgent(), engine, renderer, limits, SamplingParams())
    playing = asyncio.create_task(run_groups(environment.tasks("train"), *how, group_size=1, seed=0))
    try:
        while (served := programs_of(environment).gateway) is None:
            await asyncio.sleep(0.01)
        found = await at_client("gateway", served.url, asked)
        groups = await playing
        assert all(len(t.generations) == asked.turns and t.solved for group in groups for t in group)
        return found
    finally:
        playing.cancel()
        environment.close()


async def plain(asked: argparse.Namespace) -> Any:
    """Serve a route that renders each history anew, on a thread of its own as the gateway does."""
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from rlhf.data import Message, Role

    engine, renderer = parts(asked)
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
        return await at_client("plain", f"http://127.0.0.1:{listening.getsockname()[1]}", asked)
    finally:
        server.should_exit = True


if __name__ == "__main__":
    main()
