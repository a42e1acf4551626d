"""Tag format checked by a state machine, and Search-R1's format-aware outcome reward."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers.calls import ANSWERS, answer_in, calls_in
from rewards.answers.extract import MAX_TEXT, tagged
from rewards.answers.qa import exact, references
from rewards.answers.text import reference_of
from rlhf.checking import CheckContext, Problem
from rlhf.data import Action, Task, Trajectory, Verdict
from rlhf.settings import STRICT

#: What may follow what in an answer that thinks, calls tools and reads before it answers: thoughts are the agent's to
#: demand (`agent.think`), `call` is a call of any tool that has no line of its own, and `information` what the
#: environment replied.
SEARCHED: dict[str, tuple[str, ...]] = {
    "": ("think", "search", "call", "answer"),
    "think": ("search", "call", "answer"),
    "search": ("search", "call", "information"),
    "call": ("search", "call", "information"),
    "information": ("think", "search", "call", "answer"),
    "answer": (),
}
#: Stands in `transitions` for a call of a tool that is not named there.
CALL = "call"
_THINK = "think"
#: What the chat agent passes over in front of an action and around it.
_BESIDE = re.compile(r"</?action>|```\w*|(?:next |final )?(?:action|command|answer)\s*:", re.IGNORECASE)
_TAG = re.compile(r"<(/?)([a-zA-Z_][\w-]{0,30})>")
_WRAPPED = re.compile(r"<([a-zA-Z_][\w-]{0,30})>(.*)</\1>", re.DOTALL)


def well_formed(text: str, transitions: Mapping[str, Sequence[str]], last: str, *, strict: bool = True) -> str:
    """Return what is wrong with the form of `text`, empty where nothing is.

    Tags that `transitions` does not name are text. The machine is in a tag or between two; a tag opens where the last
    one that closed allows it (`transitions[""]` may begin), and closes before another opens.

    Args:
        text: what the policy said, and only that: a prompt that shows the tags would be read as an answer.
        transitions: for each tag, which may follow it.
        last: the tag that ends the text.
        strict: whether only white space may stand between tags.
    """
    open_, before, place = "", "", 0
    for match in _TAG.finditer(text):
        closing, tag = match[1], match[2]
        if tag not in transitions or not tag:
            continue
        if not open_ and strict and text[place : match.start()].strip():
            return f"text before <{closing}{tag}>, outside of all tags"
        if closing:
            if tag != open_:
                return f"</{tag}> closes {'<' + open_ + '>' if open_ else 'nothing'}"
            open_, before, place = "", tag, match.end()
        elif open_:
            return f"<{tag}> within <{open_}>"
        elif tag not in transitions.get(before, ()):
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
    """Format reward: 1 if thoughts, calls, replies and the answer are in order; needs no reference.

    By default: thoughts where there are some, a call of a tool, what came back, and so on, and then the answer.
    Thoughts are those of the reply (`<think>`), calls those that the agent recorded in any form that
    `rewards.answers.calls`
    reads, so `<search>x</search>`, `search[x]` and a JSON call of `search` are one. An action that could not be read
    breaks the form. `transitions` may demand thoughts (`"": [think]`), with an agent that demands them too (`think:
    require`).
    """

    inline: ClassVar[bool] = True

    transitions: Mapping[str, tuple[str, ...]] = Field(default_factory=lambda: dict(SEARCHED))
    """For each tag those that may follow it; the key `""` has those that may come first, `call` is any other call."""
    last: str = "answer"
    """The tag that ends the text."""
    strict: bool = True
    """Refuse text outside of all tags."""
    replies: bool = True
    """Include the environment's replies in the text, as retrieved information; that of the last turn does not count."""
    reply: str = "information"
    """The tag that a reply stands for; a reply that is in tags of its own keeps them."""
    inline_replies: bool = False
    """Accept replies within an action, as in a whole attempt in one text; else one there is the agent's invention."""

    def __post_init__(self) -> None:
        named = {tag for tags in self.transitions.values() for tag in tags} | {self.last}
        if missing := sorted(named - set(self.transitions)):
            raise ValueError(
                f"transitions: does not define what may follow {', '.join(missing)}; write `{missing[0]}: []`"
            )

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse to demand thoughts of an agent that is not let think."""
        if self.demands_thoughts and context.recipe.is_silent and not context.is_trained:
            yield Problem(
                "this format begins with thoughts, and the agent may not think: no attempt could match it",
                where=context.at("transitions"),
                got=f"'': {', '.join(self.transitions[''])}",
                expected="agent.think: require or allow",
                do="set agent.think, or leave out `transitions`: by default the agent decides about thoughts",
            )

    @property
    def demands_thoughts(self) -> bool:
        """True if nothing but thoughts may come first."""
        return tuple(self.transitions.get("", ())) == (_THINK,)

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Read all that was said; never raises."""
        wrong = self.wrong(trajectory)
        return Verdict(float(not wrong), why=wrong or "well-formed")

    def wrong(self, trajectory: Trajectory) -> str:
        """Return what is wrong with the form, empty where nothing is."""
        foreign = self.reply if self.replies and not self.inline_replies else None
        for i, turn in enumerate(trajectory.turns):
            if turn.action.error is not None:
                return f"turn {i}: the action could not be read"
            if any(tag == foreign for _, tag in _TAG.findall(turn.action.text)):
                return f"turn {i}: <{self.reply}> is for the environment to write"
        return well_formed(self.said(trajectory), self.transitions, self.last, strict=self.strict)

    def said(self, trajectory: Trajectory) -> str:
        """Return the whole attempt in tags; its end where it is long."""
        parts: list[str] = []
        for turn in trajectory.turns:
            parts.append(self._spoken(turn.action))
            parts += [self._replied(turn.reply)] if self.replies and turn is not trajectory.turns[-1] else []
        return "\n".join(filter(None, parts))[-MAX_TEXT:]

    def _spoken(self, action: Action) -> str:
        """Thoughts, calls, and, where `strict` counts it, what the agent passed over beside them."""
        before, closed, after = action.reply_text.rpartition("</think>")
        thought = f"<think>{before.strip().removeprefix('<think>')}</think>" if closed else ""
        if any(tag in self.transitions for _, tag in _TAG.findall(action.text)):
            acted = action.text  # in tags already
        else:
            acted = "\n".join(map(self._called, action.steps))
        return "\n".join(filter(None, [thought, self._beside(action, after), acted]))

    def _beside(self, action: Action, reply: str) -> str:
        """Words of a reply that are neither thoughts nor the action, where both can be told apart."""
        rest = _without_calls(reply)
        if rest == reply:
            rest = reply.replace(action.text, " ", 1) if action.text in reply else ""
        rest = _BESIDE.sub(" ", rest).strip(" \t\n\"'`*“”‘’«».:-")
        return rest if re.search(r"\w", rest) else ""

    def _called(self, step: str) -> str:
        calls = calls_in(Action(step), [tag for tag in self.transitions if tag not in ("", _THINK, CALL, self.reply)])
        if not calls:
            return step
        name = calls[0].name if calls[0].name in self.transitions else CALL
        return _in_tag(name, calls[0].argument) if name in self.transitions else step

    def _replied(self, reply: str) -> str:
        own = _WRAPPED.fullmatch(reply.strip())
        if own is not None and own[1] in self.transitions:
            return _in_tag(own[1], own[2])
        return _in_tag(self.reply, reply) if self.reply in self.transitions else ""


def _without_calls(reply: str) -> str:
    """The reply with a blank for each call in `<tool_call>` tags, and for all from `[TOOL_CALLS]` on."""
    begin, end, rest = "<tool_call>", "</tool_call>", reply.find("[TOOL_CALLS]")
    parts, at = list[str](), 0
    while (opening := reply.find(begin, at)) >= 0 and (closing := reply.find(end, opening)) >= 0:
        if 0 <= rest < opening:
            break
        parts.append(reply[at:opening])
        at = closing + len(end)
        rest = reply.find("[TOOL_CALLS]", at) if 0 <= rest < at else rest
    return " ".join([*parts, reply[at:rest], ""] if rest >= 0 else [*parts, reply[at:]])


def _in_tag(tag: str, text: str) -> str:
    """Text within a tag, its own tags escaped, so that foreign text cannot break or fake a form."""
    return f"<{tag}>{text.replace('<', '‹')}</{tag}>"


def answer_of(trajectory: Trajectory) -> str:
    """Last answer, in tags or as a call of `answer` or `submit`; empty where there is none."""
    for turn in reversed(trajectory.turns):
        if turn.action.error is None and (found := tagged(turn.action.text) or _answered(turn.action)):
            return found
    return ""


def _answered(action: Action) -> str:
    return answer_in(action) if any(call.name.lower() in ANSWERS for call in calls_in(action)) else ""


_Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FormatOutcome:
    """Exact match of the answer, softened by the form of what was said.

    Right and well-formed 1; right 1 − `structure`; well-formed `structure`, + `retrieval` where a reply holds the
    reference; an answer and nothing else `final`; nothing 0. With the defaults: 1, .8, .2, .1, 0.

    Source: Search-R1, arXiv 2503.09516, and its v0.3 scripts. It looks at what was said, never at the prompt.
    """

    inline: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True

    form: Format = Field(default_factory=Format)
    """The order of calls and replies."""
    structure: _Share = 0.2
    """Reward of the form."""
    final: _Share = 0.1
    """Reward of an answer that is wrong and not well-formed."""
    retrieval: _Share = 0.0
    """Reward, in a well-formed text, for having retrieved the reference: its words in a reply before the answer."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge one trajectory. Raises RewardError where the task has no reference."""
        reference = reference_of(task, "format_outcome")
        answer = answer_of(trajectory)
        right = exact(answer, reference)
        wrong = self.form.wrong(trajectory)
        wanted = [re.escape(text.strip()) for text in references(reference) if text.strip()]
        found = re.compile(rf"(?<!\w)(?:{'|'.join(wanted)})(?!\w)", re.IGNORECASE) if wanted else None
        hit = found is not None and any(found.search(turn.reply) for turn in trajectory.turns[:-1])
        value = self.value(right, not wrong, hit, bool(answer))
        return Verdict(value, why=f"{'right' if right else 'wrong'}, {wrong or 'well-formed'}")

    def value(self, right: bool, formed: bool, hit: bool, answered: bool) -> float:
        """Return the reward of these findings."""
        if right:
            return 1.0 if formed else 1.0 - self.structure
        if formed:
            return self.structure + self.retrieval * hit
        return self.final if answered else 0.0
