"""A model behind an OpenAI-compatible address, as a rollout engine: text goes out, text comes back.

What stays refused is an EngineError: the attempt is an error of a part, and never a failure of the policy.
"""

from __future__ import annotations

from typing import Any

from rlhf.chat_api import KEY, ChatServer, Patience, first_choice
from rlhf.data import Finish, Generation, Prompt, SamplingParams
from rlhf.evaluation.baselines import NoModel, WholeMessages

__all__ = ["KEY", "EndpointEngine", "Patience"]

_SEEDS = 1 << 31


class EndpointEngine(NoModel):
    """An engine that sends messages to `url` and takes the reply of `model`.

    Args:
        url: of the server, with or without /v1, such as http://127.0.0.1:8000 or https://host/v1.
        model: as the server names it.
        renderer: that the prompts were made with.
        patience: with a server in trouble.
    """

    def __init__(self, url: str, model: str, renderer: WholeMessages, patience: Patience | None = None) -> None:
        self.server, self.renderer = ChatServer(url, model, patience), renderer

    @property
    def n_tokens(self) -> tuple[int, int]:
        """(read, sampled) so far, as the server counts them."""
        return self.server.n_tokens

    @property
    def n_refused(self) -> int:
        """Requests that had to be asked again."""
        return self.server.n_refused

    async def generate(self, prompt: Prompt, params: SamplingParams, session: str = "") -> Generation:
        """Ask once, and again where that may help.

        Raises:
            ContextFull: the server says that the messages are too long.
            EngineError: the server refuses for good, or was asked too often.
        """

        def read(answer: Any) -> Generation:
            content, reason, _ = first_choice(answer)
            ids = self.renderer.encode_reply(content)
            finish = Finish.LENGTH if reason == "length" else Finish.STOP
            return Generation(prompt, ids, (0.0,) * len(ids), finish, 0, usage=_usage(answer.get("usage")))

        return await self.server.complete(self._body(prompt, params), read, seed=params.seed)

    async def close(self) -> None:
        """Close the connections."""
        await self.server.close()

    def _body(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        said = [{"role": m.role.value, "content": m.content} for m in self.renderer.messages(prompt.token_ids)]
        body: dict[str, Any] = {
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


def _usage(said: Any) -> tuple[int, int] | None:
    """Tokens (read, sampled) as the server counted them; None where it says nothing that can be read."""
    if not isinstance(said, dict):
        return None
    read, sampled = (said.get(name) for name in ("prompt_tokens", "completion_tokens"))
    return (read, sampled) if isinstance(read, int) and isinstance(sampled, int) else None
