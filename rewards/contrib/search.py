"""Rewards for search and tool use: correctness first, then few calls.

All read the calls that the agent recorded (`search[x]`, `<search>x</search>`, a JSON call of `search`), the
answer, and the order of both (`rewards.answers.tags`). Only calls in turns that the environment understood count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers.calls import ANSWERS, calls_in
from rewards.answers.qa import exact, f1
from rewards.answers.tags import Format, answer_of
from rewards.answers.text import reference_of
from rlhf.checking import CheckContext, Problem
from rlhf.data import Action, Task, Trajectory, Verdict
from rlhf.settings import STRICT

_Value = Annotated[float, Field(allow_inf_nan=False)]
_Tag = Annotated[str, Field(pattern=r"^[a-zA-Z_][\w-]*$")]


def n_calls(trajectory: Trajectory, name: str) -> int:
    """Number of valid calls of `name`; repeated queries count each time."""
    understood = [turn.action for turn in trajectory.turns if turn.valid and turn.action.error is None]
    return sum(_is_call(step, name) for action in understood for step in action.steps)


def _is_call(step: str, name: str) -> bool:
    """True if a step is this call, or has it in tags before an answer: what stands within or behind one is not done."""
    names = "|".join(map(re.escape, (name, *ANSWERS)))
    ends = {m[1].lower(): m.start() for m in re.finditer(rf"</({names})>", step, re.IGNORECASE)}  # the last of each
    tags = () if step.lstrip().startswith("{") else re.finditer(rf"<({names})>", step, re.IGNORECASE)
    first = next((tag for tag in tags if ends.get(tag[1].lower(), -1) >= tag.end()), None)
    found = [first[1]] if first else [call.name for call in calls_in(Action(step), (name, *ANSWERS))]
    return any(one.lower() == name.lower() for one in found)


def tools_of(task: Task) -> tuple[str, ...]:
    """Names of the tools that a task offers in `Task.info["tools"]`, but for that of the answer."""
    functions = [tool.get("function", tool) for tool in task.info.get("tools", ())]
    return tuple(str(f["name"]) for f in functions if str(f.get("name", "answer")).lower() not in ANSWERS)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SearchEfficiency:
    """Search-efficiency reward: right answers with few searches earn most.

    Broken form −1; right 1 + `bonus` · max(0, `n_free` − searches); wrong `searched_wrong_score` if it
    searched, else 0.

    With the defaults a right answer earns 1.6, 1.4, 1.2 and 1 with 0, 1, 2 and 3 or more searches, a wrong one .05, 0:
    knowing is best, searching beats guessing.

    Source: IKEA, arXiv 2505.07596, and its released reward.
    """

    inline: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True

    form: Format = Field(default_factory=Format)
    """The order of calls and replies."""
    search: _Tag = "search"
    """The name of a search."""
    bonus: _Value = 0.2
    """Reward of each search saved."""
    n_free: Annotated[int, Field(ge=0)] = 3
    """From so many searches on there is no bonus."""
    searched_wrong_score: _Value = 0.05
    """Reward of a wrong answer that was searched for."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge one trajectory. Raises RewardError where the task has no reference."""
        reference = reference_of(task, "search_efficiency")
        if wrong := self.form.wrong(trajectory):
            return Verdict(-1.0, why=wrong)
        n, right = n_calls(trajectory, self.search), exact(answer_of(trajectory), reference)
        return Verdict(self.value(right, n), why=f"{'right' if right else 'wrong'} with {n} searches")

    def value(self, right: bool, n: int) -> float:
        """Return the reward of a well-formed attempt with `n` searches."""
        if right:
            return 1 + self.bonus * max(0, self.n_free - n)
        return self.searched_wrong_score if n else 0.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ToolUse:
    """Broken form −1; F1 of the answer, plus `bonus` where that is above 0 and every tool was used.

    F1 .7 with both tools .8, with one .7; F1 0 is 0 however many tools were used.

    Source: Tool-Star, arXiv 2505.16410, and its released reward.
    """

    inline: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True

    form: Format = Field(default_factory=Format)
    """The order of calls and replies."""
    tools: tuple[_Tag, ...] = ()
    """Names of the tools that all have to be used for the bonus; empty is all that the task offers."""
    bonus: _Value = 0.1
    """Reward of using all tools."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a bonus without named tools."""
        if not self.tools and not context.is_trained and context.recipe.without_tools():
            yield Problem(
                "the environment names no tools, so the bonus cannot be earned",
                where=context.at("tools"),
                got="no names",
                expected="names of calls, such as those of search_qa",
                do="write tools: [search]",
            )

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge one trajectory. Raises RewardError where the task has no reference."""
        reference, tools = reference_of(task, "tool_use"), self.tools or tools_of(task)
        if wrong := self.form.wrong(trajectory):
            return Verdict(-1.0, why=wrong)
        score = f1(answer_of(trajectory), reference)
        used = [tool for tool in tools if n_calls(trajectory, tool)]
        return Verdict(
            self.value(score, bool(tools) and len(used) == len(tools)),
            why=f"F1 {score:.3f}, used {', '.join(used) or 'no tool'}",
        )

    def value(self, score: float, used_all: bool) -> float:
        """Return the reward of a well-formed attempt."""
        return score + self.bonus * used_all if score else 0.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Called:
    """1 if a tool was called often enough, whatever came of it.

    One search is enough for 1, none gives 0. For a first stage that teaches to search at all, before another pays for
    right answers.

    Source: R1-Searcher, arXiv 2503.05592: .5 for a search and .5 for the form, then F1 and -2 for a broken form.
    """

    inline: ClassVar[bool] = True

    tool: _Tag = "search"
    """The name of the call."""
    min_calls: Annotated[int, Field(ge=1)] = 1
    """Number of calls that is enough."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Count the calls; never raises."""
        n = n_calls(trajectory, self.tool)
        return Verdict(float(n >= self.min_calls), why=f"{n} calls of {self.tool}")


def thrift(cost: float, low: float, high: float) -> float:
    """Thrift S = 1 − clip((√cost − low) / (high − low), 0, 1); .5 where low = high.

    With 11, 29 and cost 400: 1 − 9/18.
    """
    return 0.5 if high <= low else 1 - min(max((cost**0.5 - low) / (high - low), 0.0), 1.0)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CostAware:
    """Broken form −1; wrong `format_score` · (1 − c); else (metric + `format_score`)(1 − c) + c · S, S the thrift.

    S = 1 − (√cost − `min_sqrt_cost`) / (`max_sqrt_cost` − `min_sqrt_cost`), between 0 and 1, or .5 where both are
    equal. Metric .8, c .6 and S .5 give .8 · .4 + .6 · .5 = .62. The cost is the sum of the numbers that `cost` finds
    in the environment's replies.

    Source: Router-R1, arXiv 2506.09033. There both are the 5th and 95th percentile of √cost over the last
    1000 attempts; here they are set, so that equal attempts earn the same at any time.
    """

    inline: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True

    form: Format = Field(default_factory=Format)
    """The order of calls and replies."""
    format_score: _Value = 0.0
    """Reward of a well-formed reply, added to the metric."""
    metric: Literal["exact", "f1"] = "exact"
    """Metric of the answer."""
    cost_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight of the cost."""
    cost: str = r"(?i)cost[=: ]+(\d+(?:\.\d+)?)"
    """A regular expression whose first group is the cost of a call, in a reply."""
    min_sqrt_cost: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """√cost that is as cheap as it gets."""
    max_sqrt_cost: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """√cost that is as dear as it gets."""

    def __post_init__(self) -> None:
        try:
            n_groups = re.compile(self.cost).groups
        except re.error as error:
            raise ValueError(f"cost: not a regular expression: {error}") from error
        if n_groups < 1:
            raise ValueError("cost: a regular expression with a group around the number, as in cost=(\\d+)")

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge one trajectory. Raises RewardError where the task has no reference."""
        reference = reference_of(task, "cost_aware")
        if wrong := self.form.wrong(trajectory):
            return Verdict(-1.0, why=wrong)
        answer = answer_of(trajectory)
        score = f1(answer, reference) if self.metric == "f1" else float(exact(answer, reference))
        spent = self.spent(trajectory)
        return Verdict(self.value(score, spent), why=f"{self.metric} {score:.3f}, cost {spent:g}")

    def spent(self, trajectory: Trajectory) -> float:
        """Return the sum of the costs in the replies."""
        found = [m[1] for turn in trajectory.turns for m in re.finditer(self.cost, turn.reply[:10_000])]
        return sum(float(x) for x in found if x and re.fullmatch(r"\d{1,12}(?:\.\d{1,12})?", x))

    def value(self, score: float, spent: float) -> float:
        """Return the reward of a well-formed attempt."""
        if score == 0:
            return self.format_score * (1 - self.cost_weight)
        return (score + self.format_score) * (1 - self.cost_weight) + self.cost_weight * thrift(
            spent, self.min_sqrt_cost, self.max_sqrt_cost
        )
