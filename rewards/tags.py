"""Form as a state machine over tags, and the outcome reward of Search-R1 that is aware of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.extract import tagged
from rewards.qa import exact
from rewards.text import reference_of, transcript
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT

#: What may follow what in an answer that thinks, searches and reads before it answers.
SEARCH_R1: dict[str, tuple[str, ...]] = {
    "": ("think",),
    "think": ("search", "answer"),
    "search": ("information",),
    "information": ("think", "search", "answer"),
    "answer": (),
}
_TAG = re.compile(r"<(/?)([a-zA-Z_][\w-]{0,30})>")


def well_formed(text: str, then: Mapping[str, Sequence[str]], last: str, *, strict: bool = True) -> str:
    """Return what is wrong with the form of `text`, empty where nothing is.

    Tags that `then` does not name are text. The machine is in a tag or between two; a tag opens where the last one that
    closed allows it (`then[""]` may begin), and closes before another opens.

    Args:
        text: what the policy said, and only that: a prompt that shows the tags would be read as an answer.
        then: for each tag, which may follow it.
        last: the tag that ends the text.
        strict: whether only white space may stand between tags.
    """
    open_, before, place = "", "", 0
    for match in _TAG.finditer(text):
        closing, tag = match[1], match[2]
        if tag not in then or not tag:
            continue
        if not open_ and strict and text[place : match.start()].strip():
            return f"text before <{closing}{tag}>, outside of all tags"
        if closing:
            if tag != open_:
                return f"</{tag}> closes {'<' + open_ + '>' if open_ else 'nothing'}"
            open_, before, place = "", tag, match.end()
        elif open_:
            return f"<{tag}> within <{open_}>"
        elif tag not in then.get(before, ()):
            return f"<{tag}> {'follows <' + before + '>' if before else 'begins the text'}"
        else:
            open_ = tag
    if open_:
        return f"<{open_}> is never closed"
    if before != last:
        return f"ends after <{before}>, not <{last}>" if before else "no tags"
    return "text after the last tag" if strict and text[place:].strip() else ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Format:
    """1 if what was said keeps to an order of tags, else 0; needs no reference.

    By default that of Search-R1: think, then any number of (search, information, think), then answer.
    """

    inline: ClassVar[bool] = True

    then: Mapping[str, tuple[str, ...]] = Field(default_factory=lambda: dict(SEARCH_R1))
    """For each tag those that may follow it; the key `""` has those that may come first."""
    last: str = "answer"
    """The tag that ends the text."""
    strict: bool = True
    """Whether text outside of all tags breaks the form."""
    replies: bool = True
    """Whether the environment's replies belong to the text, as retrieved information does; that of the last turn does
    not."""

    def __post_init__(self) -> None:
        named = {tag for tags in self.then.values() for tag in tags} | {self.last}
        if missing := sorted(named - set(self.then)):
            raise ValueError(f"then: says nothing of what may follow {', '.join(missing)}; write `{missing[0]}: []`")

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Read all that was said; never raises."""
        wrong = self.wrong(trajectory)
        return Verdict(float(not wrong), why=wrong or "well-formed")

    def wrong(self, trajectory: Trajectory) -> str:
        """Return what is wrong with the form, empty where nothing is."""
        text = said(trajectory, self.replies)
        return well_formed(text, self.then, self.last, strict=self.strict)


def said(trajectory: Trajectory, replies: bool) -> str:
    """Return all actions, with the replies before the last one where asked for."""
    text = transcript(trajectory, replies=replies)
    if replies and trajectory.turns:
        text = text.removesuffix(trajectory.turns[-1].reply)
    return text


_Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FormatOutcome:
    """Exact match of the `<answer>`, softened by the form of what was said.

    Right and well-formed 1; right 1 − `structure`; well-formed `structure`, + `retrieval` where a reply holds the
    reference; an answer in tags and nothing else `final`; nothing 0. With the defaults: 1, .8, .2, .1, 0.

    Source: Search-R1, arXiv 2503.09516, and its v0.3 scripts. It looks at what was said, never at the prompt.
    """

    inline: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True

    form: Format = Field(default_factory=Format)
    """The order of tags."""
    structure: _Share = 0.2
    """What the form is worth."""
    final: _Share = 0.1
    """What an answer in tags is worth that is wrong and not well-formed."""
    retrieval: _Share = 0.0
    """What it is worth, in a well-formed text, to have been shown the reference."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge one trajectory. Raises RewardError where the task has no reference."""
        reference = reference_of(task, "format_outcome")
        answer = tagged(transcript(trajectory))
        right = answer is not None and exact(answer, reference)
        wrong = self.form.wrong(trajectory)
        hit = any(reference.strip() and reference.casefold() in turn.reply.casefold() for turn in trajectory.turns)
        value = self.value(right, not wrong, hit, answer is not None)
        return Verdict(value, why=f"{'right' if right else 'wrong'}, {wrong or 'well-formed'}")

    def value(self, right: bool, formed: bool, hit: bool, answered: bool) -> float:
        """Return the reward of these findings."""
        if right:
            return 1.0 if formed else 1.0 - self.structure
        if formed:
            return self.structure + self.retrieval * hit
        return self.final if answered else 0.0
