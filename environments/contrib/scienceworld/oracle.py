"""The oracle of ScienceWorld: the simulator's gold paths, made once, tried out, and kept in a folder.

To make one takes from a second to a quarter of a minute, because the simulator plays the task to find it. So it is made
apart from the episodes and kept below the cache folder, under the names of package, task, variation and simplification.
A path that does not reach 100 points when it is played is kept as none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

from environments.contrib.scienceworld.sessions import POOL, Session, release
from environments.packages import cache_folder, made_at_once


def plan(task: str, variation: int, simplifications: str, taken: Sequence[str], limit: int) -> tuple[str, ...] | None:
    """Return actions that reach 100 points after `taken`, tried out before, or None.

    Along the gold path it is the rest of it. From elsewhere, the rest from where the path was left, and then the whole
    path, are tried: after a look around or an action that failed they still do, after a mistake they may not.

    Args:
        task: name of the task.
        variation: its number.
        simplifications: as the simulator reads them.
        taken: what was done already.
        limit: most actions, `taken` included.
    """
    done = tuple(action.strip() for action in taken)
    whole = gold_path(task, variation, simplifications)
    if whole is None:
        return None
    n_along = next((i for i, pair in enumerate(zip(done, whole, strict=False)) if pair[0] != pair[1]), len(done))
    n_along = min(n_along, len(whole))
    if n_along == len(done):
        return whole[n_along:] if len(whole) <= limit else None
    for rest in (whole[n_along:], whole):
        if len(done) + len(rest) <= limit:
            found = _tried(task, variation, simplifications, done, rest)
            if found is not None:
                return found
    return None


@lru_cache(maxsize=4096)
def gold_path(task: str, variation: int, simplifications: str) -> tuple[str, ...] | None:
    """Simulator's solution as far as needed; None where it does not reach 100 points."""
    folder = cache_folder("scienceworld") / release() / task / f"{variation}-{simplifications or 'full'}"
    try:
        kept = json.loads((folder / "gold.json").read_text())
        return tuple(kept) if kept is not None else None
    except (OSError, ValueError):
        found = _made(task, variation, simplifications)
        with made_at_once(folder) as making:
            (making / "gold.json").write_text(json.dumps(found))
        return found


def _made(task: str, variation: int, simplifications: str) -> tuple[str, ...] | None:
    with POOL.lent(None) as session:
        session.begin(task, variation, simplifications, gold=True)
        path = session.gold_path()
        # As long as paths are asked for, the simulator makes one at every beginning: no more of that.
        session.begin(task, variation, simplifications)
    return _tried(task, variation, simplifications, (), path)


def _tried(
    task: str, variation: int, simplifications: str, taken: Sequence[str], path: Sequence[str]
) -> tuple[str, ...] | None:
    """Play `taken` and `path`; give the part of `path` that was needed for 100 points, or None."""
    with POOL.lent(None) as session:
        return _played(session, session.begin(task, variation, simplifications).over, taken, path)


def _played(session: Session, over: bool, taken: Sequence[str], path: Sequence[str]) -> tuple[str, ...] | None:
    for action in taken:
        if over:
            return None
        over = session.step(action).over
    used: list[str] = []
    for action in path:
        if over:
            return None
        state = session.step(action)
        used.append(action)
        over = state.over
        if over and state.score == 100:
            return tuple(used)
    return None
