"""Chats as token rows, with masks of the assistant tokens to learn.

The assistant's messages are encoded as replies of the policy and put between prompts by the renderer, as in a rollout.
The mask is therefore known by construction: the chat template needs no `{% generation %}` part, and what it rewrites of
the past stays as it was said.
"""

from __future__ import annotations

import random
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents.tool_calls import Style, write_calls
from rlhf.batching.samples import Sample
from rlhf.data import Message, Role
from rlhf.errors import DataError, RecipeError
from rlhf.rollout.renderer import Renderer
from rlhf.training.stages.chat_files import Chat
from rlhf.training.stages.chat_messages import ChatMessage
from rlhf.training.stages.chat_settings import Chats

_MARK = "mark4f0a"


@dataclass(frozen=True, slots=True)
class DataRows:
    """Training and held-out rows of a supervised stage.

    Attributes:
        learnt: rows of each chat or attempt.
        held_out: rows that are not learnt.
        n_dropped: chats longer than the context.
    """

    learnt: Sequence[Sequence[Sample]]
    held_out: Sequence[Sample] = ()
    n_dropped: int = 0


def split_rows(
    rows: Sequence[Sequence[Sample]],
    settings: Chats,
    seed: str,
    where: str,
    n_dropped: int,
    prompts: Sequence[Hashable],
) -> DataRows:
    """Hold out the rows of some prompts at random, so that no row of a held-out prompt is learnt.

    Args:
        rows: of each chat or attempt.
        settings: say how many.
        seed: of the draw.
        where: YAML path, for errors.
        n_dropped: rows left out before.
        prompts: of each chat or attempt, what it answers: `prompt_of`, or its task.

    Raises:
        RecipeError: nothing is left to learn.
    """
    order = list(dict.fromkeys(prompts))
    random.Random(seed).shuffle(order)
    n_out = max(round(settings.held_out * len(order)), 1) if settings.held_out else 0
    if len(order) <= n_out:
        got = f"{len(rows)} rows of {len(order)} prompts, {n_dropped} longer than the context, {n_out} held out"
        few = "give it rows of another prompt, or set held_out: 0"
        hint = few if rows else "shorten the rows, or take a policy with a longer context"
        raise RecipeError("there are no tokens to train on", where=where, got=got, expected="rows", hint=hint)
    out = set(order[:n_out])
    learnt = [group for group, prompt in zip(rows, prompts, strict=True) if prompt not in out]
    held_out = [sample for group, prompt in zip(rows, prompts, strict=True) if prompt in out for sample in group]
    return DataRows(learnt, held_out, n_dropped)


def prompt_of(chat: Sample) -> bytes:
    """Tokens before the last reply that is learnt of a chat; all of them where it is a text without a prompt."""
    begins = np.flatnonzero(chat.mask & ~np.roll(chat.mask, 1))
    at = begins[-1] if len(begins) else 0
    return chat.token_ids[: at if at > 1 else None].tobytes()


def chat_samples(
    chats: Iterable[Chat], renderer: Renderer, max_context: int, settings: Chats, where: str, style: Style = "hermes"
) -> tuple[list[Sample], int]:
    """Row of each chat, and the number left out as longer than the context.

    Args:
        chats: of a file.
        renderer: of the policy.
        max_context: tokens of the longest row.
        settings: say what becomes of longer ones.
        where: YAML path of the key `data`, for errors.
        style: how calls of tools are written where the chat template does not say.

    Raises:
        RecipeError: a chat is longer than the context, or the chat template refuses it; its line is named.
    """
    found: list[Sample] = []
    long: list[tuple[int, int]] = []
    for chat in chats:
        try:
            ids, mask = _encoded(chat, renderer, style)
        except DataError as error:
            raise RecipeError(
                f"this chat cannot be rendered: {error.what}",
                where=f"{where}, {settings.path}, line {chat.number}",
                got=error.got or str(error.__cause__ or error),
                expected=error.expected or "messages that the chat template accepts",
                hint=error.hint,
            ) from error
        if len(ids) > max_context:
            long.append((chat.number, len(ids)))
            continue
        zeros = np.zeros(len(ids), np.float32)
        learnt = np.array(mask, np.bool_)
        row = np.array(ids, np.int32)
        found.append(Sample(row, learnt, zeros, learnt.astype(np.float32), len(found), len(found)))
    if long and settings.too_long == "refuse":
        raise _too_long(long, len(found), max_context, settings, where)
    return found, len(long)


def _encoded(chat: Chat, renderer: Renderer, style: Style) -> tuple[Sequence[int], list[bool]]:
    """Ids `[L]` of a chat, and which of them are learnt."""
    if not chat.messages:
        ids = tuple(renderer.tokenizer.encode(chat.text))
        ids = ids if ids and ids[-1] in renderer.stop_ids else (*ids, renderer.stop_ids[0])
        return ids, [False] + [True] * (len(ids) - 1)
    before: list[Message] = []
    places: list[tuple[int, int]] = []
    ids = ()
    for said in chat.messages:
        if said.role is not Role.ASSISTANT or not before:
            before.append(Message(said.role, said.content))
            continue
        reply = _reply(said, renderer, style)
        prompt = renderer.prompt(before, chat.tools).token_ids
        ids = (*prompt, *reply)
        if said.is_learnt:
            places.append((len(prompt), len(ids)))
        before.append(Message(said.role, said.content, reply))
    mask = [False] * len(ids)
    for begin, end in places:
        mask[begin:end] = [True] * (end - begin)
    return ids, mask


def _reply(said: ChatMessage, renderer: Renderer, style: Style) -> tuple[int, ...]:
    """Ids with which the policy would say a message, calls of tools included."""
    if not said.calls:
        return renderer.encode_reply(said.content)
    text = _by_template(said, renderer)
    if text is None:
        return renderer.encode_reply("\n".join(filter(None, [said.content, write_calls(said.calls, style)])))
    return (*renderer.encode_escaped(text), renderer.stop_ids[0])


def _by_template(said: ChatMessage, renderer: Renderer) -> str | None:
    """Reply with calls as the chat template writes it, with what it says escaped; None where it does not know any."""
    tokenizer: Any = renderer.tokenizer
    if "tool_calls" not in re.findall(r"\w+", str(tokenizer.get_chat_template())):
        return None
    content, *arguments = (
        renderer.escaped(value, is_assistant=True) for value in (said.content, *(call.arguments for call in said.calls))
    )
    functions = [{"name": call.name, "arguments": given} for call, given in zip(said.calls, arguments, strict=True)]
    calls = [{"type": "function", "function": function} for function in functions]
    asked = {"role": "user", "content": "x"}

    def written(*messages: dict[str, Any], header: bool = False) -> str:
        options = {"tokenize": False, "add_generation_prompt": header, **renderer.chat_template_kwargs}
        return str(tokenizer.apply_chat_template([asked, *messages], **options))

    try:
        head = written(header=True)
        whole = written({"role": "assistant", "content": content, "tool_calls": calls})
        end = written({"role": "assistant", "content": _MARK}).partition(_MARK)[2]
    except Exception:  # whatever a template raises: it takes no such message
        return None
    fits = whole.startswith(head) and whole.endswith(end) and said.calls[0].name in whole
    return whole[len(head) : len(whole) - len(end)] if fits else None


def _too_long(
    long: Sequence[tuple[int, int]], n_others: int, max_context: int, settings: Chats, where: str
) -> RecipeError:
    number, most = max(long, key=lambda found: found[1])
    return RecipeError(
        "rows are longer than the policy's context",
        where=f"{where}, {settings.path}, line {long[0][0]}",
        got=f"{len(long)} of {len(long) + n_others} rows, the longest of {most} tokens in line {number}",
        expected=f"at most {max_context} tokens, the context of the policy",
        hint="leave them out with too_long: drop, shorten them, or take a policy with a longer context",
    )
