"""Messages to token ids, and sampled ids to text.

What the policy sampled is never tokenised again. A prompt is

    first segment + reply ids + glue + reply ids + glue + ...

where the first segment is everything before the first sampled reply, written by the chat template as a whole, and the
glue is what the template writes between two replies: the end of the turn, the messages in between, the header of the
next reply. The glue is found by rendering a short conversation whose reply is a marker and keeping what follows the
marker. Each prompt therefore extends the previous prompt and its generation, also with templates that rewrite the past
(Qwen3 removes earlier reasoning): what was sampled stays as the model saw it.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf.data import Generation, Message, Prompt, Role
from rlhf.data.control_tokens import ControlTokens
from rlhf.data.tokens import packed_ids
from rlhf.errors import DataError, ModelError, boundary, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = "marker7c1e4b"
_PROBE = (Message(Role.USER, "x"), Message(Role.ASSISTANT, _MARKER))
_THINK, _THINK_END = "<think>", "</think>"
#: Control tokens that a reply is parsed by; those in brackets are of Mistral's calls.
_KEPT = (_THINK, _THINK_END, "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
#: Texts up to so many characters for each token that there is room for are tokenised without a look before.
_TOLD_AT_ONCE = 4
#: Characters of which the tokens are counted at a time, and tokens forgiven for the cut.
_PIECE, _FORGIVEN = 8192, 16


class Renderer:
    """Turns messages into prompts for one tokenizer and its chat template.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        chat_template_kwargs: variables of the template, such as `enable_thinking`; unknown ones are an error.
        generation_config: anything with `eos_token_id` (one or several), whose ids end a reply too.
        adapters: roles that have an adapter of their own; prompts of these say so.
        cache_size: distinct pieces of text whose ids are remembered.

    Attributes:
        stop_ids: any of these ends a reply; the template's own end of turn comes first.
        knows_tools: whether the template has a variable `tools`.
        opens_thinking: whether the header of a reply already contains `<think>`, so that replies begin inside it.

        tells_tokens: whether ids are tokens; there are renderers for which each is a message.
        has_lasting_ids: whether ids mean the same in another process.

    Raises:
        ModelError: no chat template, a template that cannot be used, an unknown template variable, or no stop token.
    """

    tells_tokens: ClassVar[bool] = True
    has_lasting_ids: ClassVar[bool] = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        generation_config: object | None = None,
        adapters: Collection[str] = (),
        cache_size: int = 4096,
    ) -> None:
        self.tokenizer, self._adapters = tokenizer, frozenset(adapters)
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self._check_template()
        self._control = ControlTokens(tokenizer, said=_KEPT)
        self._hidden = frozenset(i for text, i in self._control.ids.items() if text not in _KEPT)
        self._first = lru_cache(cache_size)(self._make_first)
        self._glue = lru_cache(cache_size)(self._make_glue)
        with boundary(ModelError, where="chat template", hint="the template must accept user and assistant messages"):
            closed = self._after_marker(self._render(_PROBE, header=False))
            headed = self._after_marker(self._render(_PROBE, header=True))
            self._check_header()
        self.opens_thinking = headed.rstrip().endswith(_THINK)
        self.stop_ids = self._find_stop_ids(closed, generation_config)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), role: str = "") -> Prompt:
        """Token ids of `messages` and of the header of the next reply.

        Args:
            messages: at least one before the first sampled reply.
            tools: definitions of functions, which the template writes where it writes the beginning.
            role: that the policy is asked in.

        Raises:
            DataError: no messages, a conversation that opens with a sampled reply, or one the template refuses; tools
                for a template that has no variable `tools`.
        """
        shown = self._shown(tools)
        replies = [i for i, m in enumerate(messages) if m.role is Role.ASSISTANT and m.token_ids is not None]
        borders = [*replies, len(messages)]
        if borders[0] == 0:
            raise DataError(
                "the prompt before the first reply is empty",
                where="Renderer.prompt",
                got=f"{len(messages)} messages",
                expected="at least one message before the first sampled reply",
            )
        ids = self._first(tuple(messages[: borders[0]]), shown)[:]
        for reply, following in zip(replies, borders[1:], strict=True):
            sampled = messages[reply].token_ids or ()
            ended_by = sampled[-1] if sampled and sampled[-1] in self.stop_ids else None
            ids.extend(sampled)
            ids += self._glue(tuple(messages[reply + 1 : following]), ended_by)
        return Prompt(ids, self.stop_ids, role if role in self._adapters else "")

    def exceeds(self, text: str, n: int) -> bool:
        """True if a text certainly has more than `n` tokens, reading no more of it than needed.

        Pieces are counted apart, some tokens of each forgiven for where it is cut.
        """
        if len(text) <= _TOLD_AT_ONCE * n:
            return False
        found = 0
        for start in range(0, len(text), _PIECE):
            found += max(0, len(self.encode_escaped(self._control.escaped(text[start : start + _PIECE]))) - _FORGIVEN)
            if found > n:
                return True
        return False

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` for reading and parsing, without control tokens other than those that replies are parsed by."""
        kept = [i for i in ids if i not in self._hidden]
        return str(self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def reply_text(self, ids: Sequence[int]) -> str:
        """`decode`, with the `<think>` in front that the template's header has already opened."""
        text = self.decode(ids)
        return f"{_THINK}\n{text}" if self.opens_thinking else text

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """Ids with which the policy would say `text` and end its turn: the inverse of `reply_text`.

        For demonstrations and scripted policies only; what a policy sampled is never encoded again.
        """
        if self.opens_thinking:
            inside = text.startswith(_THINK)
            text = text.removeprefix(_THINK).removeprefix("\n") if inside else f"\n{_THINK_END}\n\n{text}"
        return (*self.encode_escaped(self._control.escaped(text, is_assistant=True)), self.stop_ids[0])

    def escaped(self, value: Any, *, is_assistant: bool = False) -> Any:
        """JSON value with the literal control tokens in its texts escaped, for a chat template to write.

        Args:
            value: tools, the arguments of a call, or a text.
            is_assistant: whether the policy says it; it may say the tokens by which replies are parsed.
        """
        if isinstance(value, str):
            return self._control.escaped(value, is_assistant=is_assistant)
        if isinstance(value, list):
            return [self.escaped(inner, is_assistant=is_assistant) for inner in value]
        if isinstance(value, dict):
            return {
                self._control.escaped(name, is_assistant=is_assistant): self.escaped(inner, is_assistant=is_assistant)
                for name, inner in value.items()
            }
        return value

    def encode_escaped(self, text: str) -> tuple[int, ...]:
        """Ids of what a template wrote; what is escaped in it is encoded as ordinary text."""
        return self._control.encode(text)

    @staticmethod
    def extends(previous: Generation, prompt: Prompt) -> bool:
        """True if `prompt` extends all of `previous`, so that they share a row and a cache."""
        return prompt.extends(previous)

    def _check_template(self) -> None:
        if not self.tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template",
                where=str(self.tokenizer.name_or_path) or "tokenizer",
                hint="use an instruction-tuned model, or set `chat_template` in the model's tokenizer_config.json",
            )
        with boundary(ModelError, where="chat template"):
            template = str(self.tokenizer.get_chat_template())
        words = set(re.findall(r"\w+", template))
        self.knows_tools = "tools" in words
        for name in self.chat_template_kwargs:
            if name not in words:
                raise ModelError(
                    "the chat template has no such variable",
                    where=f"chat_template_kwargs.{name}",
                    got=name,
                    expected="a variable that the template uses",
                    hint=nearest(name, words),
                )

    def _shown(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Tools as one text that can be remembered; empty for none."""
        if not tools:
            return ""
        if not self.knows_tools:
            raise DataError(
                "the chat template does not support tools",
                where="Renderer.prompt",
                got=f"{len(tools)} tools",
                expected="a template with a variable `tools`",
                hint="describe the tools in the system prompt: agent.tool_definitions: system_prompt",
            )
        return json.dumps(list(tools))

    def _make_first(self, messages: tuple[Message, ...], tools: str) -> array[int]:
        with boundary(DataError, where="Renderer.prompt", hint="the chat template refuses these messages"):
            text = self._render(messages, header=True, tools=json.loads(tools) if tools else None)
            return packed_ids(self.encode_escaped(text))

    def _make_glue(self, between: tuple[Message, ...], ended_by: int | None) -> array[int]:
        with boundary(DataError, where="Renderer.prompt", hint="the chat template refuses these messages"):
            glue = self.encode_escaped(self._after_marker(self._render((*_PROBE, *between), header=True)))
        return packed_ids(glue if ended_by is None else self._without_end(glue, ended_by))

    def _render(self, messages: Sequence[Message], *, header: bool, tools: Any = None) -> str:
        conversation = [
            {"role": m.role.value, "content": self._control.escaped(m.content, is_assistant=m.role is Role.ASSISTANT)}
            for m in messages
        ]
        text = self.tokenizer.apply_chat_template(
            conversation,
            tools=self.escaped(tools),
            tokenize=False,
            add_generation_prompt=header,
            **self.chat_template_kwargs,
        )
        return str(text)

    def _check_header(self) -> None:
        """Raise ModelError if the generation prompt lacks the header with which replies begin.

        A template without any header, as Mistral's, is right: what the assistant says follows the question at once.
        """
        asked = [Message(Role.USER, "?")]
        before = self._render(asked, header=False)
        whole = self._render([*asked, Message(Role.ASSISTANT, _MARKER)], header=False)
        header = whole.removeprefix(before).partition(_MARKER)[0].strip()
        if header and whole.startswith(before) and before == self._render(asked, header=True):
            raise ModelError(
                "the chat template has no generation part: a prompt would not end with the header of the reply",
                where="chat template",
                got=f"add_generation_prompt changes nothing, and replies begin with {header[:80]!r}",
                expected=f"{{% if add_generation_prompt %}}{header[:80]}{{% endif %}} at the end of the template",
                hint="add it to the model's chat template, or name another with policy.template",
            )

    def _after_marker(self, text: str) -> str:
        _, found, rest = text.partition(_MARKER)
        if not found:
            raise ModelError(
                "the chat template drops assistant messages",
                where="chat template",
                expected="a template that writes the content of assistant messages",
            )
        return rest

    def _find_stop_ids(self, after_reply: str, generation_config: Any) -> tuple[int, ...]:
        end = next(iter(self.tokenizer.encode(after_reply.lstrip(), add_special_tokens=False)), None)
        found = [end] if end in self._control.ids.values() else []
        for eos in (self.tokenizer.eos_token_id, generation_config and generation_config.eos_token_id):
            found += eos if isinstance(eos, list | tuple) else [eos]
        stop_ids = tuple(dict.fromkeys(i for i in found if i is not None))
        if not stop_ids:
            raise ModelError(
                "no stop token ends a reply",
                where=str(self.tokenizer.name_or_path) or "tokenizer",
                got="no eos token, and no special token after a reply in the chat template",
                hint="set `eos_token` in the model's tokenizer_config.json",
            )
        return stop_ids

    def _without_end(self, glue: tuple[int, ...], end: int) -> tuple[int, ...]:
        """Return `glue` without the end of turn that it begins with, where the policy sampled that itself.

        Some templates write white space before the end of turn, which the policy did not; it goes too.
        """
        for i, token in enumerate(glue):
            if token == end:
                return glue[i + 1 :]
            if token in self._hidden or self.decode((token,)).strip():
                break
        return glue
