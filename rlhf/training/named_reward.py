"""Resolution of the reward that a stage key names, or of the only candidate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf.checking import Problem
from rlhf.errors import nearest


def unnamed(where: str, name: str | None, found: Sequence[str], what: str, example: str) -> Iterator[Problem]:
    """Yield a problem unless `name` is one of `found`, or null and there is one.

    Args:
        where: YAML path of the key.
        name: its value.
        found: the rewards that it can name.
        what: they are.
        example: of a recipe with one.
    """
    if name in found or (name is None and len(found) == 1):
        return
    if name is None:
        got = f"null, and there are {', '.join(found)}" if found else f"null, and no reward is a {what}"
    else:
        got = name
    yield Problem(
        f"this is not the name of a trained reward of kind {what}",
        where=where,
        got=got,
        expected=" or ".join(found) or example,
        do=nearest(name or "", found) or ("name one of them" if found else "remove the key, or add the reward"),
    )
