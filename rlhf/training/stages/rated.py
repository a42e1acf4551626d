"""Rated replies for KTO: desirable or undesirable, and mismatched with other prompts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from rlhf.training.stages.pairs import Pair, Side


@dataclass(frozen=True, slots=True)
class Rated:
    """A reply that is good or bad.

    Attributes:
        task_id: replies to one task are not independent.
        side: its tokens, with a mask over what the policy wrote.
        is_good: whether it is one to be made likelier.
    """

    task_id: str
    side: Side
    is_good: bool


def of_pairs(pairs: Iterable[Pair]) -> list[Rated]:
    """Both sides of each pair, each reply once; one that is better than some and worse than others is both."""
    sides = (Rated(p.task_id, side, good) for p in pairs for side, good in ((p.chosen, True), (p.rejected, False)))
    return list(dict.fromkeys(sides))


def shuffled(rated: Sequence[Rated], at_once: int, seed: str) -> list[Rated]:
    """Return replies in the order in which they are trained on, without a last forward pass of one alone.

    The one that is left out for it has the label of most.
    """
    order = list(rated)
    random.Random(seed).shuffle(order)
    if len(order) % at_once == 1 and len(order) > 1:
        of_most = 2 * sum(reply.is_good for reply in order) >= len(order)
        del order[max(i for i, reply in enumerate(order) if reply.is_good == of_most)]
    return order


def mismatched(rated: Sequence[Rated], at_once: int, max_context: int) -> list[Side]:
    """Each prompt with the reply to another one, the nearest before it among `at_once` replies of one pass.

    Of A: a, B: b, C: c these are A: c, B: a, C: b. Whatever the policy has learnt of the prompt does not help it there.
    Where a whole pass is of one prompt, the reply comes from another pass, and where all are, from the neighbour. What
    the context has no room for is cut.
    """
    prompts = [reply.side.token_ids[: reply.side.mask.index(True)] for reply in rated]
    are_several = len(set(prompts)) > 1
    found = []
    for i, one in enumerate(rated):
        begin, end = i - i % at_once, min(i - i % at_once + at_once, len(rated))
        before = ((begin + (i - begin - k) % (end - begin)) for k in range(1, end - begin))
        order = chain(before, ((i - k) % len(rated) for k in range(1, len(rated)))) if are_several else ()
        others = (j for j in order if prompts[j] != prompts[i])
        found.append(_after(one.side, rated[next(others, i - 1)].side, max_context))
    return found


def _after(one: Side, other: Side, max_context: int) -> Side:
    """The prompt of `one` and the reply of `other`."""
    begin, own = one.mask.index(True), other.mask.index(True)
    end = own + max(max_context - begin, 1)
    return Side(one.token_ids[:begin] + other.token_ids[own:end], one.mask[:begin] + other.mask[own:end])
