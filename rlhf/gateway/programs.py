"""The gateway and the programs that the attempts of one environment share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from typing import TYPE_CHECKING

from environments.base import AgentFailed
from rlhf.errors import EnvError
from rlhf.gateway.program import Program
from rlhf.gateway.server import Gateway
from rlhf.gateway.session import Session

if TYPE_CHECKING:
    from rlhf.gateway.environment import External

#: Variable of the environment with the key by which programs ask for attempts.
KEY = "RLHF_GATEWAY_KEY"
#: Programs that may end one after the other without an attempt between.
_MOST_FAILED = 3

_of: dict[External, Programs] = {}


class Programs:
    """A gateway, and the programs that ask it for one attempt after the other.

    Args:
        settings: whose attempts they make.

    Attributes:
        gateway: once the first attempt has begun.
        told: limits that end a wait which was warned of.
    """

    def __init__(self, settings: External) -> None:
        self._settings = settings
        self.gateway: Gateway | None = None
        self.told: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[str, Program] = {}
        self._attempts: dict[str, tuple[str, Session]] = {}
        self._open: dict[str, Session] = {}
        self._n_failed = 0
        self._served: set[str] = set()  # keys of programs that have taken an attempt
        self._complaints: dict[str, str] = {}  # by the key of a program that has ended
        self._replacing = set[asyncio.Task[None]]()
        self._starting = asyncio.Lock()

    async def begin(self, session: Session) -> Gateway:
        """Serve a session, and see that there are programs to take it."""
        if self._loop is not asyncio.get_running_loop():  # programs of another loop have ended with it
            self._loop, self._running, self._n_failed = asyncio.get_running_loop(), {}, 0
            self._served.clear()
            self._complaints.clear()
            self._starting = asyncio.Lock()
        gateway = await self._listening()
        self._open[session.id] = session
        gateway.add(session, waits=self._settings.n_programs is not None or not self._settings.command)
        while len(self._running) < (self._settings.n_programs or 0):
            await self._start(gateway)
        return gateway

    def program_of(self, session: Session) -> Program | None:
        """The program that asked for an attempt; None for one that was not started here."""
        key, _ = self._attempts.get(session.id, ("", session))
        return self._running.get(key)

    def end(self, session: Session) -> None:
        """Serve a session no longer."""
        self._open.pop(session.id, None)
        self._attempts.pop(session.id, None)
        if self.gateway is not None:
            self.gateway.remove(session)

    def close(self) -> None:
        """End the gateway; the programs have ended, or lose their address."""
        _of.pop(self._settings, None)
        if self.gateway is not None:
            self.gateway.close()
            self.gateway = None

    async def _listening(self) -> Gateway:
        async with self._starting:
            if self.gateway is None:
                key = os.environ.get(KEY, "")
                if not (self._settings.command or key):
                    raise EnvError(
                        "agents that you start yourself need the gateway's key",
                        where="environment.command",
                        got=f"no command, and no variable {KEY}",
                        expected="one of them",
                        hint=f"{KEY}=... rlhf train RECIPE, and give your agents the same",
                    )
                gateway = Gateway(self._settings.host, self._settings.port, key=key)
                gateway.claimed = self._claimed
                await asyncio.to_thread(gateway.start)  # its packages take their time
                self.gateway = gateway
        return self.gateway

    def _claimed(self, session: Session, key: str) -> None:
        """Remember which program has an attempt, which fails where that has ended; called on the server's thread."""
        self._attempts[session.id] = (key, session)
        self._served.add(key)
        if complaint := self._complaints.get(key):  # looked up last: `_ended` notes it first
            with contextlib.suppress(RuntimeError):  # the run is over
                session.loop.call_soon_threadsafe(_fail, session, complaint)

    async def _start(self, gateway: Gateway) -> None:
        settings, key = self._settings, secrets.token_urlsafe(24)
        gateway.keys.add(key)
        program = Program(
            settings.command,
            dict(settings.variables) | {"RLHF_GATEWAY": gateway.url, KEY: key},
            memory_mb=settings.memory_mb,
            cpu_s=settings.cpu_s,
            folder=settings.folder,
            on_end=lambda: self._ended(key),
        )
        self._running[key] = program
        try:
            await program.start()
        except BaseException:  # its place is free again
            self._running.pop(key, None)
            gateway.keys.discard(key)
            raise

    def _ended(self, key: str) -> None:
        """A program has ended: its attempts fail, and others wait for a new one."""
        program = self._running.pop(key, None)
        if program is None or self.gateway is None:
            return
        self.gateway.keys.discard(key)
        self._complaints[key] = program.complaint
        own = [session for owner, session in list(self._attempts.values()) if owner == key]
        self._n_failed = 0 if key in self._served else self._n_failed + 1
        self._served.discard(key)
        for session in own if self._n_failed < _MOST_FAILED else list(self._open.values()):
            _fail(session, program.complaint)
        again = self._n_failed < _MOST_FAILED and any(not s.has_ended for s in self._open.values())
        task = asyncio.create_task(self._replace(program, self.gateway if again else None))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, program: Program, gateway: Gateway | None) -> None:
        """End what an ended program began, and start another for a gateway; where none is left, attempts fail."""
        await program.close()
        if gateway is None:
            return
        try:
            await self._start(gateway)
        except AgentFailed as error:
            for session in [] if self._running else list(self._open.values()):
                _fail(session, str(error))


def _fail(session: Session, why: str) -> None:
    if not (session.is_over or session.is_finished):
        session.end(failure=why)


def programs_of(settings: External) -> Programs:
    """Return the gateway and programs that attempts of an environment share in this process."""
    return _of.setdefault(settings, Programs(settings))
