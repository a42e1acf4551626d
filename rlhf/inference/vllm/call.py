"""State of a call of `VllmEngine` while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlhf.data import Finish, Generation, Prompt, SamplingParams
from rlhf.inference.seeds import stable_seed
from rlhf.inference.vllm.instance import Sampled


@dataclass(eq=False)
class GenerationRequest:
    """A call of `generate`, which may be sampled in several pieces, by several versions of the weights.

    `withdrawn` says that its session was released; `task` works on it.
    """

    prompt: Prompt
    params: SamplingParams
    session: str
    withdrawn: bool = False
    request_id: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: list[tuple[int, int]] = field(default_factory=list)
    task: asyncio.Task[Generation] | None = None

    def rest(self) -> SamplingParams:
        """Parameters for the remaining tokens; after an interruption with a different seed."""
        if not self.token_ids:
            return self.params
        n = len(self.token_ids)
        return replace(self.params, max_tokens=self.params.max_tokens - n, seed=stable_seed(self.params.seed, n))

    def take(self, sampled: Sampled, versions: Sequence[tuple[int, int]]) -> None:
        """Add what an instance sampled."""
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs
        for version, n in versions:
            if self.spans and self.spans[-1][0] == version:
                self.spans[-1] = (version, self.spans[-1][1] + n)
            elif n:
                self.spans.append((version, n))

    def rewind(self) -> None:
        """Forget the last tokens of an interrupted call, in which a stop string may have begun.

        vLLM looks for the strings only in what it samples itself, so what goes on must hold the whole of one. A token
        has at least one byte.
        """
        n = max((len(text.encode()) - 1 for text in self.params.stop_strings), default=0)
        n_kept = max(len(self.token_ids) - n, 0)
        self.token_ids, self.logprobs = self.token_ids[:n_kept], self.logprobs[:n_kept]
        spans, self.spans = self.spans, []
        for version, length in spans:
            if taken := min(length, n_kept):
                self.spans.append((version, taken))
            n_kept -= taken

    def generation(self, finish: Finish, version: int) -> Generation:
        """The answer."""
        first = self.spans[0][0] if self.spans else version
        spans = tuple(self.spans) if len(self.spans) > 1 else ()
        return Generation(self.prompt, self.token_ids, self.logprobs, finish, first, spans)

    def end(self) -> None:
        """Stop working on it."""
        if self.task is not None:
            self.task.cancel()
