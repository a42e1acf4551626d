"""A model behind an OpenAI-compatible address, as a rollout engine: text goes out, text comes back.

What the address refuses for a while (429, 500 and above, a connection that drops, an answer that is none) is asked
again, later and later. What stays refused is an EngineError: the attempt is an error of a part, and never a failure of
the policy. The key is read from the environment and stands in no file.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.data import Finish, Generation, Prompt, SamplingParams
from rlhf.errors import ContextFull, EngineError, MissingPackageError
from rlhf.evaluation.baselines import NoModel, WholeMessages

#: Variable of the environment that holds the key, if the address wants one.
KEY = "OPENAI_API_KEY"
_SEEDS = 1 << 31
_TOO_LONG = ("context_length", "context length", "maximum context", "too many tokens")


class _Later(Exception):
    """What may go better the next time; `after_s` is what the server asked for."""

    def __init__(self, text: str, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s


@dataclass(frozen=True)
class Patience:
    """How often and how long one reply is asked for.

    Attributes:
        n_tries: in all.
        first_s: wait before the second try; it doubles from try to try.
        most_s: longest wait.
        request_s: limit of one request.
    """

    n_tries: int = 7
    first_s: float = 0.5
    most_s: float = 30.0
    request_s: float = 120.0


class EndpointEngine(NoModel):
    """An engine that sends messages to `url` and takes the reply of `model`.

    Args:
        url: of the server, with or without /v1, such as http://127.0.0.1:8000 or https://host/v1.
        model: as the server names it.
        renderer: that the prompts were made with.
        patience: with a server in trouble.

    Attributes:
        n_tokens: (read, sampled) so far, as the server counts them.
        n_refused: requests that had to be asked again.
    """

    def __init__(self, url: str, model: str, renderer: WholeMessages, patience: Patience | None = None) -> None:
        base = url.rstrip("/")
        self.url = base if base.endswith("/chat/completions") else f"{_versioned(base)}/chat/completions"
        self.model, self.renderer, self.patience = model, renderer, patience or Patience()
        self.n_tokens, self.n_refused = (0, 0), 0
        self._session: Any = None

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        """Ask once, and again where that may help.

        Raises:
            ContextFull: the server says that the messages are too long.
            EngineError: the server refuses for good, or was asked `n_tries` times.
        """
        body = self._body(prompt, params)
        chance, problem = random.Random(params.seed), ""
        for number in range(self.patience.n_tries):
            try:
                return self._generation(prompt, params, await self._ask(body))
            except _Later as later:
                problem = str(later)
                self.n_refused += 1
                if number + 1 < self.patience.n_tries:
                    wait = min(self.patience.first_s * 2**number, self.patience.most_s) * chance.uniform(0.5, 1.0)
                    await asyncio.sleep(max(wait, min(later.after_s, self.patience.most_s)))
        raise EngineError(
            "the model did not answer",
            where=self.url,
            got=f"{problem}, after {self.patience.n_tries} tries",
            expected="a chat completion",
            hint="look whether the server runs and how many requests it takes (limits.max_concurrent)",
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _body(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        said = [{"role": m.role.value, "content": m.content} for m in self.renderer.messages(prompt.token_ids)]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": said,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed % _SEEDS,
        }
        if params.top_p < 1:
            body["top_p"] = params.top_p
        if params.top_k:
            body["top_k"] = params.top_k  # no key of OpenAI's own; a server that does not know it refuses
        if params.stop_strings:
            body["stop"] = list(params.stop_strings)
        return body

    async def _ask(self, body: Mapping[str, Any]) -> Any:
        """One request. Raises _Later, ContextFull and EngineError."""
        aiohttp = _aiohttp()
        if self._session is None:
            key = os.environ.get(KEY)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            timeout = aiohttp.ClientTimeout(total=self.patience.request_s)
            self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)
        try:
            async with self._session.post(self.url, json=body) as response:
                text = await response.text(errors="replace")
                status, headers = response.status, response.headers
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Later(f"{type(error).__name__}: {error}"[:200]) from error
        if status == 429 or status == 408 or status >= 500:
            raise _Later(f"status {status}: {text[:200]}", _seconds(headers.get("Retry-After")))
        if status != 200:
            raise _refused(self.url, status, text)
        try:
            return json.loads(text)
        except ValueError as error:
            raise _Later(f"an answer that is no JSON: {text[:100]!r}") from error

    def _generation(self, prompt: Prompt, params: SamplingParams, answer: Any) -> Generation:
        """Read an answer. Raises _Later where it is none."""
        try:
            choice = answer["choices"][0]
            content, reason = choice["message"]["content"], choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise _Later(f"an answer without a message: {json.dumps(answer)[:150]}") from error
        if content is not None and not isinstance(content, str):
            raise _Later(f"a message whose content is no text: {json.dumps(content)[:150]}")
        usage = _usage(answer.get("usage"))
        if usage is not None:
            self.n_tokens = (self.n_tokens[0] + usage[0], self.n_tokens[1] + usage[1])
        ids = self.renderer.encode_reply(content or "")
        finish = Finish.LENGTH if reason == "length" else Finish.STOP
        return Generation(prompt, ids, (0.0,) * len(ids), finish, 0, usage=usage)


def _usage(said: Any) -> tuple[int, int] | None:
    """Tokens (read, sampled) as the server counted them; None where it says nothing that can be read."""
    if not isinstance(said, dict):
        return None
    read, sampled = (said.get(name) for name in ("prompt_tokens", "completion_tokens"))
    return (read, sampled) if isinstance(read, int) and isinstance(sampled, int) else None


def _versioned(base: str) -> str:
    return base if base.rpartition("/")[2] in ("v1", "v2", "v3") else f"{base}/v1"


def _refused(url: str, status: int, text: str) -> EngineError:
    if status in (400, 413, 422) and any(words in text.casefold() for words in _TOO_LONG):
        return ContextFull("the messages leave no room for a reply", where=url, got=text[:200])
    hint = f"set {KEY}" if status in (401, 403) else "check --endpoint and --model"
    return EngineError("the server refuses", where=url, got=f"status {status}: {text[:300]}", hint=hint)


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or 0))
    except ValueError:  # a date, which servers of models do not send
        return 0.0


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "an endpoint needs a package that is not installed",
            where="--endpoint",
            got="no module named aiohttp",
            expected="the extra 'servers'",
            hint="pip install 'rlhf-agents[servers]'",
        ) from error
    return aiohttp
