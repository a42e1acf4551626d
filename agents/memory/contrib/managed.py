"""A bank of memories that a manager keeps and an answering agent reads: one policy, two prompts.

Source: Memory-R1, arXiv 2508.19828. There the two are separate models, trained one after the other; here they are two
roles of one policy, and `train_roles` of the stage says which of them learns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import PolicyHandle
from agents.memory.base import MEMORY, DemonstrationInputs, Exchange, MemoryBase, MemoryContext
from agents.parsing import split_thoughts
from agents.stores.contrib.operations import BadOperation, Bank, Operation, parsed, written
from agents.stores.search import by_words
from rlhf.data import Message, Role
from rlhf.settings import STRICT

#: Notes: what the manager did in a turn, as a list in JSON, and why nothing came of what it said.
OPERATIONS, REFUSED = "operations", "refused"
_SHOWN = re.compile(r"^([0-9]+): (.*)$", re.MULTILINE)
_NONE = "(none)"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Managed(MemoryBase):
    """Shows the memories that fit the newest observation, after a manager has taken in that observation.

    Each turn has two calls. The manager (role `memory`) is shown the newest observation and the memories that share
    most words with it, and answers with operations in JSON: add, update, delete or nothing. Then the policy acts, shown
    the opening, the memories that fit, and the newest observation: no other turn. What the manager says that is no
    operation, or names an unknown id, changes nothing, and the manager reads why with the next observation.

    The bank is not held anywhere: it is what all operations so far, left with their turns as notes, amount to.
    """

    needs: ClassVar[tuple[str, ...]] = ("recall",)

    n_managed: Annotated[int, Field(ge=1)] = 10
    """Memories that the manager is shown: all, where there are no more, else those nearest in words (BM25)."""
    n_shown: Annotated[int, Field(ge=1)] = 60
    """Memories that the policy is shown when it acts; likewise."""
    show_opening: bool = True
    """Show the policy the opening too. One that says something to remember may be out of date later."""
    max_operations: Annotated[int, Field(ge=1)] = 8
    """Most operations of one reply."""
    max_chars: Annotated[int, Field(ge=1)] = 300
    """Longest memory."""
    ask: str = (
        'What is to be remembered? Answer in JSON: {"op": "ADD", "text": "..."}, {"op": "UPDATE", "id": 1, "text": '
        '"..."}, {"op": "DELETE", "id": 1}, {"op": "NOOP"}, or a list of these.'
    )
    """Prompt of the manager, after the memories and the newest observation."""

    async def recall(self, past: Sequence[Exchange], policy: PolicyHandle, notes: Mapping[str, str]) -> MemoryContext:
        """Let the manager take in the newest observation, then show what fits it."""
        bank, now = bank_of(past), past[-1]
        if OPERATIONS in notes or REFUSED in notes:
            return MemoryContext(self._shown(bank.after(_read(notes)), past))
        lines = [f"{number}: {text}" for number, text in _nearest(bank, now.said, self.n_managed)]
        last = past[-2].notes.get(REFUSED, "") if len(past) > 1 else ""
        refused = [f"Your last reply changed nothing: {last}"] if last else []
        question = "\n".join(["Memories:", *(lines or [_NONE]), *refused, f"New: {now.said}", self.ask])
        reply = await policy.generate((Message(Role.USER, question),), role=MEMORY)
        try:
            said = split_thoughts(reply.text).answer.strip()
            operations = parsed(said, max_operations=self.max_operations, max_chars=self.max_chars)
            bank = bank.after(operations)
            made = [operation.plain for operation in operations if operation.op != "NOOP"]
            kept = {OPERATIONS: json.dumps(made, ensure_ascii=False)} if made else {}
        except BadOperation as error:
            kept = {REFUSED: str(error)}
        return MemoryContext(self._shown(bank, past), (reply.generation,), kept)

    def remembered(self, shown: DemonstrationInputs) -> str:
        """Return the manager's reply in a demonstration: the operations between two lists of memories.

        A list is the `recall` of the environment, its items parted by `;` or lines. What is new and begins like
        something gone is an update of it: with the same word.
        """
        before, now = _items(shown.recalled), _items(shown.recall)
        ids = {text: int(number) for number, text in _SHOWN.findall(shown.asked)}
        gone = [item for item in before if item not in now]
        operations = []
        for item in (item for item in now if item not in before):
            old = next((g for g in gone if g in ids and g.split()[0] == item.split()[0]), None)
            operations.append(Operation("UPDATE", ids[old], item) if old else Operation("ADD", text=item))
            gone = [g for g in gone if g != old]
        operations += [Operation("DELETE", ids[item]) for item in gone if item in ids]
        return written(operations or [Operation("NOOP")])

    def _shown(self, bank: Bank, past: Sequence[Exchange]) -> tuple[Message, ...]:
        now = past[-1]
        opening = [past[0].said] if self.show_opening and len(past) > 1 else []
        lines = [text for _, text in _nearest(bank, now.said, self.n_shown)]
        return now.opening_with("\n".join([*opening, "Memories:", *(lines or [_NONE]), now.observation]))


def bank_of(past: Sequence[Exchange]) -> Bank:
    """Return the bank that all operations of `past` leave."""
    bank = Bank()
    for exchange in past:
        bank = bank.after(_read(exchange.notes))
    return bank


def _read(notes: Mapping[str, str]) -> list[Operation]:
    return [Operation(**plain) for plain in json.loads(notes.get(OPERATIONS, "[]"))]


def _nearest(bank: Bank, query: str, k: int) -> list[tuple[int, str]]:
    """The `k` memories nearest to `query`, oldest first."""
    if len(bank.entries) <= k:
        return list(bank.entries)
    found = sorted(i for i, _ in by_words(query, [text for _, text in bank.entries], k))
    return [bank.entries[i] for i in found]


def _items(text: str) -> list[str]:
    return [item for part in re.split(r"[;\n]", text) if (item := " ".join(part.split()))]
