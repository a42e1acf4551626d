"""Token budgets: the attempts of a group are given different budgets, in the prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.data import Message, Role, Task
from rlhf.rollout.group_structure import Independent
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Budgets(Independent):
    """Attempts with token budgets in the prompt: attempt i has budget i mod n.

    With one budget it is a length asked for in the prompt; with several the attempts at a task are subgroups, in which
    none crowds out the long ones. `rewards: {kind: budgeted}` pays for keeping them, `stratified` compares within.

    Sources: HBPO, arXiv 2507.15844 (512, 1024, 2048 and 2560 tokens, a quarter of the group each); L1, arXiv
    2503.04697, whose lengths are drawn per task.
    """

    budgets: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    """Token budgets of the attempts."""
    prompt: str = "Answer with at most {budget} tokens."
    """Message with the budget; `{budget}` stands for the number."""

    def __post_init__(self) -> None:
        """Refuse a text without the number."""
        if "{budget}" not in self.prompt:
            raise ValueError(f"prompt is '{self.prompt}', expected a text with {{budget}} in it")

    def posed(self, task: Task, attempt: int) -> Task:
        """Return the task with the budget of attempt number `attempt` among its messages."""
        budget = self.budgets[attempt % len(self.budgets)]
        told = Message(Role.USER, self.prompt.replace("{budget}", str(budget)))
        return replace(task, messages=(*task.messages, told))

    def n_from_start(self, group_size: int) -> int:
        """All of them. Raises ValueError where the budgets cannot have as many attempts each."""
        if group_size % len(self.budgets):
            raise ValueError(f"a multiple of the number of budgets = {len(self.budgets)}")
        return group_size
