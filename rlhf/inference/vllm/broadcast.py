"""Broadcasts to vLLM instances: the group is formed, and each buffer sent, while the instances wait for it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch

from rlhf.inference.transfer import Slice
from rlhf.inference.transfer_group import GroupSender, Rendezvous
from rlhf.inference.vllm.instance import Instance
from rlhf.inference.vllm.receivers import Receivers
from rlhf.inference.vllm.start import missing_vllm
from rlhf.processes import free_port

#: Seconds in which an instance says why a broadcast failed.
_REASON_S = 2.0


async def formed(to: Receivers, n_workers: Mapping[Instance, int], buffer_bytes: int) -> GroupSender:
    """A buffer of this process that every worker of the instances receives.

    Args:
        to: the instances, which are numbered in their order.
        n_workers: of each.
        buffer_bytes: most of one buffer.

    Raises:
        MissingPackageError: vLLM is not installed here.
        EngineError: an instance did not join, or vanished.
        RuntimeError: the group was not formed.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    rendezvous = Rendezvous(
        own_address(i.name for i in to.instances), free_port(), 1 + sum(n_workers[i] for i in to.instances)
    )
    first_ranks, rank = {}, 1
    for instance in to.instances:
        first_ranks[instance] = rank
        rank += n_workers[instance]

    def info(instance: Instance) -> dict[str, Any]:
        group = {
            "address": rendezvous.address,
            "port": rendezvous.port,
            "n": rendezvous.n,
            "first_rank": first_ranks[instance],
        }
        return {"path": "", "group": group}

    sender = GroupSender(buffer_bytes, device)
    try:
        await _all_take_part(to, lambda i: i.connect_transfer(info(i)), partial(sender.join, rendezvous))
    except ImportError as error:
        raise missing_vllm(error) from error
    except BaseException:
        sender.close()
        raise
    return sender


async def send(sender: GroupSender, to: Receivers, slices: Sequence[Slice]) -> None:
    """Let every instance receive and load what lies in the buffer.

    Raises:
        EngineError: an instance failed or vanished; the others may wait for it until the group is left.
    """
    await _all_take_part(to, lambda i: i.update(slices, {}), partial(sender.broadcast, slices))


def own_address(names: Iterable[str]) -> str:
    """Address of this machine on its way to the first server elsewhere; the loopback's if there is none.

    Args:
        names: of instances: addresses of servers, or names of other engines, which run here.
    """
    for name in names:
        url = urlsplit(name)
        if url.hostname is None:
            continue
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((url.hostname, url.port or 80))  # sends nothing: it only finds the way
            if not (found := str(probe.getsockname()[0])).startswith("127."):
                return found
    return "127.0.0.1"


async def _all_take_part(to: Receivers, theirs: Callable[[Instance], Awaitable[Any]], ours: Callable[[], None]) -> None:
    """Wait for all instances and this process, or for the first error: a group without one of its members hangs.

    Where this process fails, an instance may soon say why; its error is raised then.
    """
    tasks = [asyncio.ensure_future(theirs(instance)) for instance in to.instances]
    mine = asyncio.ensure_future(_in_thread(ours))
    try:
        _, waiting = await asyncio.wait([*tasks, mine], return_when=asyncio.FIRST_EXCEPTION)
        if waiting and not any(map(_has_failed, tasks)):
            await asyncio.wait(tasks, timeout=_REASON_S, return_when=asyncio.FIRST_EXCEPTION)
        for task in (*tasks, mine):
            if task.done():
                task.result()
    finally:
        for task in (*tasks, mine):
            task.cancel()
        await asyncio.gather(*tasks, mine, return_exceptions=True)


def _has_failed(task: asyncio.Future[Any]) -> bool:
    return task.done() and task.exception() is not None


async def _in_thread(do: Callable[[], None]) -> None:
    """Wait for a call that may hang for ever if another process has ended; its thread is then abandoned."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def end(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            do()
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end, error)

    threading.Thread(target=run, name="rlhf-broadcast", daemon=True).start()
    await done
