"""What runs the stages that are no policy gradient."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rlhf.trainers.imitation import imitate
from rlhf.trainers.preference import Preference
from rlhf.trainers.preferring import prefer
from rlhf.trainers.rounds import imitate_attempts
from rlhf.trainers.run import Run
from rlhf.trainers.supervised import Supervised

#: Runs a stage from where the run stands to its end, and leaves the checkpoint of the end to its caller.
Work = Callable[[Run, Any], Awaitable[None]]


def other_stage(stage: Any) -> tuple[str, Work] | None:
    """Return the kind of a stage and what runs it; None for a policy gradient."""
    if isinstance(stage, Supervised):
        return "supervised", imitate if stage.attempts is None else imitate_attempts
    return ("preference", prefer) if isinstance(stage, Preference) else None


def is_played(stage: Any) -> bool:
    """Whether the policy attempts tasks in this stage, so that what it could do before is worth knowing."""
    if isinstance(stage, Preference):
        return True
    return not isinstance(stage, Supervised) or stage.attempts is not None
