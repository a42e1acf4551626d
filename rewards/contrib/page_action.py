"""Partial credit for a shopper's next action: kind, fields and words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers.text import reference_of
from rewards.contrib.json_schema import parsed, parsed_last
from rewards.contrib.overlap import Rouge
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT

_Value = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_ROUGE = Rouge()
#: Kind of action -> what its fields are worth: being there, their words, and whether their words times `difficulty`.
_FIELDS: Mapping[str, tuple[tuple[str, float, float, bool], ...]] = {
    "click": (("name", 0.2, 0.0, True),),
    "type_and_submit": (("name", 0.1, 0.1, False), ("text", 0.1, 0.0, True)),
    "terminate": (),
}
_TERMINATE = 0.3


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PageAction:
    """Partial credit for one action: valid JSON .5, the right `type` .3 more, and the rest by type.

    With R the ROUGE-L of a field and D `difficulty`: `click` .2 where it has a `name`, + D · R(name); `type_and_submit`
    .1 for each of `name` and `text`, + .1 · R(name) + D · R(text); `terminate` .3. A right click with R .5:
    .5 + .3 + .2 + 1000 · .5 = 501. The reference is the JSON object of the right action.

    Source: Shop-R1, arXiv 2507.17842; without its reward for the policy's own certainty, which needs distributions.
    """

    needs_reference: ClassVar[bool] = True

    difficulty: _Value = 1000.0
    """D, the weight of long texts. Estimators that divide by the group's deviation tame it; 1 keeps values small."""
    min_score: Annotated[float, Field(ge=0, le=1)] = 0.0
    """An R below this counts as 0."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge the last action. Raises RewardError where the task has no reference."""
        wanted, wrong = parsed(reference_of(task, "page_action", with_parts=True))
        said, broken = parsed_last(trajectory)
        if broken or not isinstance(said, dict):
            return Verdict(0.0, why=broken or "no JSON object")
        if wrong or not isinstance(wanted, dict):
            return Verdict(0.5, why="valid JSON; the reference is no JSON object")
        return Verdict(*self.value(said, wanted))

    def value(self, said: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[float, str]:
        """Return reward and reason for one action."""
        kind = said.get("type")
        if not isinstance(kind, str) or kind != wanted.get("type"):
            return 0.5, "valid JSON of another type"
        total, scores = 0.8, []
        if kind == "terminate":
            return total + _TERMINATE, "terminate"
        for name, there, words, hard in _FIELDS.get(kind, ()):
            if not isinstance(said.get(name), str):
                continue
            score = _ROUGE.score(said[name], str(wanted.get(name, "")))
            score = score if score >= self.min_score else 0.0
            total += there + words * score + self.difficulty * score * hard
            scores.append(f"R({name}) {score:.2f}")
        return total, f"{kind}, {', '.join(scores) or 'no fields'}"
