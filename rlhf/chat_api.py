"""Asking a model behind an OpenAI-compatible address, with patience.

What the address refuses for a while (429, 500 and above, a connection that drops, an answer that is none) is asked
again, later and later. What stays refused is an EngineError. The key is read from the environment, never from a file.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rlhf.errors import ContextFull, EngineError
from rlhf.extras import import_optional

#: Variable of the environment that holds the key, if the address wants one.
KEY = "OPENAI_API_KEY"
#: Seconds that a server has to take a first connection.
_REACH_S = 5.0
_TOO_LONG = ("context_length", "context length", "maximum context", "too many tokens")
Read = TypeVar("Read")


class RetryableError(Exception):
    """Error after which a call may be tried again; `after_s` is what the server asked for."""

    def __init__(self, text: str, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s


@dataclass(frozen=True)
class RetryPolicy:
    """Retry policy with exponential backoff, and time limit, of one call.

    Attributes:
        n_tries: in all.
        first_s: wait before the second try; it doubles from try to try.
        most_s: longest wait, unless the server asks for a longer one (`Retry-After`), which is kept up to `request_s`.
        request_s: limit of one request.
    """

    n_tries: int = 7
    first_s: float = 0.5
    most_s: float = 30.0
    request_s: float = 120.0

    @classmethod
    def within(cls, episode_s: float) -> RetryPolicy:
        """Policy for calls of an episode of so many seconds: one that is never answered leaves time for another."""
        return cls(request_s=episode_s / 2)


class ChatServer:
    """An address and a model there.

    Args:
        url: of the server, with or without /v1, such as http://127.0.0.1:8000 or https://host/v1.
        model: as the server names it.
        patience: with a server in trouble.
        where: what names them, for messages.
        hint: what to look at when the server refuses for good.

    Attributes:
        n_tokens: (read, sampled) so far, as the server counts them.
        n_refused: requests that had to be asked again.
        last_refusal: why the last of them had to be; empty where none had.
    """

    def __init__(
        self,
        url: str,
        model: str,
        patience: RetryPolicy | None = None,
        *,
        where: str = "--endpoint",
        hint: str = "check --endpoint and --model",
    ) -> None:
        base = url.rstrip("/")
        self.url = base if base.endswith("/chat/completions") else f"{_versioned(base)}/chat/completions"
        self.model, self.patience = model, patience or RetryPolicy()
        self.where, self.hint = where, hint
        self.n_tokens, self.n_refused, self.last_refusal = (0, 0), 0, ""
        self._session: Any = None

    async def complete(self, body: Mapping[str, Any], read: Callable[[Any], Read], *, seed: int = 0) -> Read:
        """Ask once, and again where that may help.

        Args:
            body: of the request, but for the model.
            read: makes something of the answer; raises RetryableError where it is none.
            seed: of how long is waited.

        Raises:
            ContextFull: the server says that the messages are too long.
            EngineError: the server refuses for good, or was asked `n_tries` times.
        """
        chance, problem = random.Random(seed), ""
        for number in range(self.patience.n_tries):
            try:
                answer = await self._ask({"model": self.model, **body})
                found = read(answer)
                self._count(answer)
                return found
            except RetryableError as later:
                problem = self.last_refusal = str(later)
                self.n_refused += 1
                if number + 1 < self.patience.n_tries:
                    wait = min(self.patience.first_s * 2**number, self.patience.most_s) * chance.uniform(0.5, 1.0)
                    await asyncio.sleep(max(wait, min(later.after_s, self.patience.request_s)))
        raise EngineError(
            "the model did not answer",
            where=self.url,
            got=f"{problem}, after {self.patience.n_tries} tries",
            expected="a chat completion",
            hint="check that the server runs, and how many concurrent requests it allows",
        )

    async def reach(self) -> None:
        """Wait until something takes connections at the address. Raises EngineError after 5 s."""
        address = urlsplit(self.url)
        port, problem = address.port or (443 if address.scheme == "https" else 80), "no answer"
        loop = asyncio.get_running_loop()
        end = loop.time() + _REACH_S
        while True:
            try:
                async with asyncio.timeout(max(0.1, end - loop.time())):
                    _, writer = await asyncio.open_connection(address.hostname, port)
                writer.close()
                return
            except (OSError, TimeoutError) as error:
                problem = str(error) or problem
            if loop.time() + self.patience.first_s >= end:
                break
            await asyncio.sleep(self.patience.first_s)
        raise EngineError(
            "nothing accepts connections at this address",
            where=self.where,
            got=f"{address.scheme}://{address.hostname}:{port}: {problem}, for {_REACH_S:g} s",
            expected="a server with an OpenAI-compatible API",
            hint="start the server, or correct host and port",
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _ask(self, body: Mapping[str, Any]) -> Any:
        """Send a request. Raises RetryableError, ContextFull and EngineError."""
        aiohttp = load_aiohttp(self.where)
        if self._session is None:
            key = os.environ.get(KEY)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            timeout = aiohttp.ClientTimeout(total=self.patience.request_s)
            connector = aiohttp.TCPConnector(limit=0)  # waiting for a connection would count as waiting for a reply
            self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        try:
            async with self._session.post(self.url, json=body) as response:
                text = await response.text(errors="replace")
                status, headers = response.status, response.headers
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RetryableError(f"{type(error).__name__}: {error}"[:200]) from error
        if status == 429 or status == 408 or status >= 500:
            raise RetryableError(f"status {status}: {text[:200]}", _seconds(headers.get("Retry-After")))
        if status != 200:
            raise self._refused(status, text)
        try:
            return json.loads(text)
        except ValueError as error:
            raise RetryableError(f"an answer that is no JSON: {text[:100]!r}") from error

    def _refused(self, status: int, text: str) -> EngineError:
        if status in (400, 413, 422) and any(words in text.casefold() for words in _TOO_LONG):
            return ContextFull("the messages leave no room for a reply", where=self.url, got=text[:200])
        hint = f"set {KEY}" if status in (401, 403) else self.hint
        return EngineError("the server refuses", where=self.url, got=f"status {status}: {text[:300]}", hint=hint)

    def _count(self, answer: Any) -> None:
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if isinstance(usage, dict):
            read, sampled = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
            if isinstance(read, int) and isinstance(sampled, int):
                self.n_tokens = (self.n_tokens[0] + read, self.n_tokens[1] + sampled)


def first_choice(answer: Any) -> tuple[str, str | None, Mapping[str, Any]]:
    """Return text, finish reason and the rest of an answer's first choice. Raises RetryableError if it has none."""
    try:
        choice = answer["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        content = message.get("content") if message.get("tool_calls") else message["content"]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise RetryableError(f"an answer without a message: {json.dumps(answer)[:150]}") from error
    if content is not None and not isinstance(content, str):
        raise RetryableError(f"a message whose content is no text: {json.dumps(content)[:150]}")
    return content or "", reason, choice


def _versioned(base: str) -> str:
    return base if base.rpartition("/")[2] in ("v1", "v2", "v3") else f"{base}/v1"


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or 0))
    except ValueError:  # a date, which servers of models do not send
        return 0.0


def load_aiohttp(where: str) -> Any:
    """Return the library. Raises MissingPackageError where it is not installed."""
    return import_optional("aiohttp", "servers", "an endpoint needs a package that is not installed", where)
