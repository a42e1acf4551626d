"""Session of an outside agent: the requests, reward and end of one attempt, on the run's event loop."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rlhf.data import Generation, Role
from rlhf.errors import AgentError, EngineError
from rlhf.gateway.conversation import ChatMessage, Conversations, Fork
from rlhf.gateway.request import ChatReply, ChatRequest, Refusal

#: Seconds for which a request goes on whose client has gone: one that asks again gets the reply.
GRACE_S = 3.0
_names = itertools.count(1)

#: The session of the attempt that the present task plays; the environment sets it, the agent answers its requests.
SESSION: ContextVar[Session] = ContextVar("SESSION")
#: Passes a reply on; returns once a client has it.
Give = Callable[[ChatReply], Awaitable[None]]
#: Answers one request with the policy and gives the reply; returns what was sampled, and its text.
Answer = Callable[[ChatRequest, Give], Awaitable[tuple[Generation, str]]]


async def _returned(answered: ChatReply) -> None:
    """Give a reply to whoever awaits `ask`."""


@dataclass(eq=False, slots=True)
class _Call:
    asked: ChatRequest
    future: asyncio.Future[ChatReply]
    number: int
    task: asyncio.Task[None] | None = None
    n_waiting: int = 0
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set once a client has the reply, or it is refused."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Generations between two waits for the agent's program.

    Attributes:
        text: the last reply, as sampled.
        generations: of all replies, in the order in which they ended.
        notes: forks and overridden parameters, for the record.
    """

    text: str
    generations: tuple[Generation, ...]
    notes: Mapping[str, str]


@dataclass(slots=True)
class Reward:
    """Reward that an agent's program posts for its attempt."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    success: bool | None = None


class Session:
    """One attempt, from its first request to its end.

    Args:
        task: what the agent's program is told, as plain JSON values.

    Attributes:
        id: in the address.
        key: that every request of it carries.
        reward: that was posted; None before.
        failure: why the attempt says nothing of the policy; empty unless it failed.
        refusal: of its last request; None where one that came later was answered.
        wrong_key: refusal of a request to its address that had another key or none; None where there was none.
        is_finished: whether the program said that it is done.
        has_left: whether the program that it was started for has ended.
        was_played: whether the policy has answered requests since the environment's last step.
        step: plays the world of the task, where there is one.
        forks: rows begun anew, and why.
        overridden: parameters of sampling that were, since the last turn.
        counts: of requests, and of what became of them.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.id, self.key = f"s{next(_names)}-{secrets.token_hex(4)}", secrets.token_urlsafe(24)
        self.task = task
        self.loop = asyncio.get_running_loop()
        self.reward: Reward | None = None
        self.failure, self.is_finished, self.has_left, self.is_over = "", False, False, False
        self.was_played = False
        self.refusal: Refusal | None = None
        self.wrong_key: Refusal | None = None
        self._n_before_refusal = 0
        self.step: Callable[[str], Coroutine[Any, Any, Mapping[str, Any]]] | None = None
        self.forks: list[Fork] = []
        self.n_told, self.overridden = 0, list[str]()
        self.counts: Counter[str] = Counter()
        self.conversations: Conversations | None = None
        self._pending: deque[_Call] = deque()
        self._calls = set[_Call]()  # without an answer yet
        self._known: defaultdict[str, list[_Call]] = defaultdict(list)
        self._changed = asyncio.Event()
        self._stored: dict[str, tuple[ChatMessage, ...]] = {"": ()}

    # --- what the server asks -----------------------------------------------------------------------------------------

    async def ask(
        self, asked: ChatRequest, name: str = "", *, repeats: bool = False, send: Give = _returned
    ) -> ChatReply:
        """Answer a request; one that is repeated gets the reply that there is, or is being made.

        A request is repeated where it says so, or has the name of an earlier one, or is equal to one whose client went
        away without the whole reply. Others are answered anew, also those that are equal and come at the same time.
        Cancelled, this is a client that has gone: one whose reply no other client gets is no part of the attempt.

        Args:
            asked: the request.
            name: by which a client knows it again; empty for none.
            repeats: whether the client says that it asks again.
            send: sends the reply to the client.

        Raises:
            Refusal: the session is over, or the request cannot be answered.
        """
        if self.is_over or self.is_finished:
            raise self._refused_over()
        if asked.previous not in self._stored:
            known = "of this session" if self._stored.keys() - {""} else "that there is"
            raise Refusal(404, f"no reply {known} is called {asked.previous!r}. Do: send the history.", "not_found")
        alike = self._known[f"id:{name}" if name else asked.digest]
        again = [call for call in alike if name or repeats or not (call.is_over.is_set() or call.n_waiting)]
        # Of several, one whose client has gone, else one that is waited for, else that was asked last.
        call = min(reversed(again), key=lambda call: (call.is_over.is_set(), call.n_waiting), default=None)
        if call is None:
            whole = asked.after(self._stored[asked.previous])
            self.counts["n_requests"] += 1
            call = _Call(whole, self.loop.create_future(), self.counts["n_requests"])
            alike.append(call)
            self._pending.append(call)
            self._calls.add(call)
            call.future.add_done_callback(lambda _: self._calls.discard(call))
            self._changed.set()
        else:
            self.counts["n_repeated_requests"] += 1
        call.n_waiting += 1
        try:
            answered = await asyncio.shield(call.future)
            history = call.asked.messages[bool(asked.instructions) :]
            self._stored.setdefault(f"resp_{answered.id}", (*history, answered.said))
            await send(answered)
            call.is_over.set()
            self.counts["n_answered_requests"] += 1
            if call.number > self._n_before_refusal:
                self.refusal = None
            return answered
        finally:
            call.n_waiting -= 1
            if not call.is_over.is_set():
                self.loop.call_later(GRACE_S, self._abandon, alike, call)

    def end(self, *, reward: Reward | None = None, finished: bool = False, failure: str = "") -> None:
        """Note what the program posts. Raises Refusal where the session is over."""
        if self.is_over:
            raise self._refused_over()
        if reward is not None:
            self.reward = reward
        self.failure = self.failure or failure
        self.is_finished = self.is_finished or finished
        self._changed.set()

    def note_refusal(self, refusal: Refusal) -> None:
        """Note that a request was refused: the program may end by it."""
        self.refusal, self._n_before_refusal = refusal, self.counts["n_requests"]

    def _refused_over(self) -> Refusal:
        if self.is_finished or self.has_left:
            why = "the agent has ended it"
        else:
            why = self.failure or "the run has ended it, whose turns or time are over"
        return Refusal(
            409, f"the session is over: {why}. Got: a request after its end. Do: open another session.", "session_over"
        )

    def _abandon(self, alike: list[_Call], call: _Call) -> None:
        """Cancel a request whose client has disconnected, or drop its reply."""
        if call.n_waiting or call.is_over.is_set() or call not in alike:
            return
        self.counts["n_abandoned_requests"] += 1
        alike.remove(call)
        if call in self._pending:
            self._pending.remove(call)
        call.future.cancel()
        if call.task is not None:
            call.task.cancel()

    # --- what the environment asks ------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """True if the program said that it is done, or failed, or has ended."""
        return self.is_finished or self.has_left or bool(self.failure)

    @property
    def is_asking(self) -> bool:
        """True if a request waits for the policy."""
        return bool(self._pending)

    async def changed(self) -> None:
        """Wait until the agent's program does something."""
        await self._changed.wait()
        self._changed.clear()

    def wake(self) -> None:
        """Let those look again who wait for a change."""
        self._changed.set()

    def leave(self) -> None:
        """Note that the program has ended."""
        self.has_left = True
        self.wake()

    def told(self, said: str) -> str:
        """Last words of a program, behind the refusal of its last request, or of one with a wrong key, if any."""
        if (refusal := self.refusal or self.wrong_key) is None:
            return said
        which = "its last request" if self.refusal else "a request to its address"
        refused = f"{which} was refused with {refusal.status}: {refusal.message}"
        # Clients' errors say the refusal again.
        return f"{refused}\n{said.replace(refusal.message, '(the same)')}".strip()

    @property
    def said(self) -> str:
        """Messages of the waiting request since the last reply, as text."""
        if not self._pending:
            return ""
        messages = self._pending[0].asked.messages
        last = max((i + 1 for i, m in enumerate(messages) if m.role is Role.ASSISTANT), default=0)
        return "\n".join(message.text for message in messages[last:])[-_MOST_SAID:]

    def answer_with(self, text: str, answered: Callable[[str, ChatRequest], ChatReply]) -> None:
        """Answer the waiting request with a text that was not sampled, when not the policy plays."""
        while self._pending:
            call = self._pending.popleft()
            call.future.set_result(answered(text, call.asked))

    def refuse(self, check: Callable[[ChatRequest], object]) -> None:
        """Refuse the waiting requests for which `check` raises Refusal, where another than the policy plays."""
        for call in list(self._pending):
            try:
                check(call.asked)
            except Refusal as refusal:
                self._pending.remove(call)
                _fail(call, refusal)

    def close(self) -> None:
        """End the session; later requests are rejected."""
        self.is_over = True
        for call in self._calls:
            if call.task is not None:
                call.task.cancel()
            _fail(call, self._refused_over())
        self._pending.clear()
        self._changed.set()

    # --- what the agent asks ------------------------------------------------------------------------------------------

    async def turn(self, answer: Answer, silence_s: float | None = None) -> Turn:
        """Answer requests until none is left and one was sampled, or the program is done or has ended.

        Args:
            answer: answers one.
            silence_s: most seconds without a request after one that was refused or given up; None for any number.

        Raises:
            EngineError: the engine failed; the attempt is over.
        """
        work = _Work(answer, self._pending, self.wake)
        self.was_played = True
        try:
            while True:
                work.begin()
                if not work.running and (work.done or work.is_full or self.has_ended):
                    break
                try:
                    async with asyncio.timeout(None if work.running else silence_s):
                        await self.changed()
                except TimeoutError:
                    self.failure = f"the agent's program asked for nothing more within {silence_s:g} s"
                work.look()
        finally:
            await work.stop()
        last = work.done[-1][1] if work.done else ""
        return Turn(last, tuple(generation for generation, _ in work.done), self._notes())

    def _notes(self) -> dict[str, str]:
        """Forks and overridden parameters since the last turn, as notes."""
        new = list(enumerate(self.forks, start=1))[self.n_told :]
        found = {f"fork {i}": str(fork) for i, fork in new}
        if self.overridden:
            found["overridden"] = ", ".join(self.overridden)
        self.n_told, self.overridden = len(self.forks), []
        return found


#: Characters that a turn keeps of what the program has said, the last of them.
_MOST_SAID = 1_000_000


class _Work:
    """Requests that are being answered in one turn.

    Args:
        answer: answers one.
        pending: those that wait.
        wake: called when one has been answered.

    Attributes:
        done: generation and text of each reply that a client has.
        running: those under way.
        is_full: whether the turn has no call left for those that wait.
    """

    def __init__(self, answer: Answer, pending: deque[_Call], wake: Callable[[], None]) -> None:
        self._answer, self._pending, self._wake, self.is_full = answer, pending, wake, False
        self.done: list[tuple[Generation, str]] = []
        self.running: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Begin with those that wait, as far as the turn has calls for them; it is over once all have been answered."""
        while self._pending and not self.is_full and (self.running or not self.done):
            call = self._pending.popleft()
            call.task = asyncio.create_task(self._one(call))
            call.task.add_done_callback(lambda _: self._wake())
            self.running.add(call.task)

    def look(self) -> None:
        """Forget those that are done; raise what one of them raised."""
        for task in [task for task in self.running if task.done()]:
            self.running.discard(task)
            if task.cancelled():  # its client has gone, and another may have its call
                self.is_full = False
            elif error := task.exception():
                raise error

    async def stop(self) -> None:
        """Give up what is under way."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)

    async def _one(self, call: _Call) -> None:
        async def give(answered: ChatReply) -> None:
            if not call.future.done():
                call.future.set_result(answered)
            await call.is_over.wait()

        try:
            self.done.append(await self._answer(call.asked, give))
        except Refusal as refusal:
            _fail(call, refusal)
        except AgentError:  # no more calls in this turn: it waits for the next
            if not self.done and len(self.running) == 1:
                raise
            self.is_full = True
            self._pending.insert(sum(other.number < call.number for other in self._pending), call)
        except EngineError as error:
            _fail(call, Refusal(503, f"the engine failed, and the attempt is over. {error}", "engine_error"))
            raise
        except Exception as error:
            _fail(call, Refusal(500, f"the attempt failed: {type(error).__name__}: {error}", "attempt_failed"))
            raise


def _fail(call: _Call, refusal: Refusal) -> None:
    if not call.future.done():
        call.future.set_exception(refusal)
        call.future.exception()  # perhaps nobody looks
        call.is_over.set()
