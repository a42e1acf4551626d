"""MiniWoB++: small web pages in a real Chromium, told in words (Liu et al., arXiv 1802.08802).

    MiniWoB(task="click-button")

An observation is what is asked for, and the elements of the page, numbered from the top. The words are our own, so
scores are not those of agents that see pixels or the package's tree.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from environments.base import Properties
from environments.contrib.miniwob.page import EXTRA, POOL, Browser, View
from environments.core.procedural import Attempt
from environments.core.seed_splits import FIRST_SEED, Seeded, split_in
from environments.packages import version_of
from rlhf.data import Task
from rlhf.errors import nearest
from rlhf.settings import STRICT

#: Tasks that can be done by clicking and typing, as the package calls them.
TASKS = (
    *("choose-list", "click-button", "click-button-sequence", "click-checkboxes", "click-checkboxes-large"),
    *("click-checkboxes-transfer", "click-collapsible", "click-collapsible-2", "click-dialog", "click-dialog-2"),
    *("click-link", "click-option", "click-tab", "click-tab-2", "click-test", "click-test-2", "click-widget"),
    *("email-inbox", "enter-password", "enter-text", "enter-text-2", "find-word", "focus-text", "focus-text-2"),
    *("login-user", "login-user-popup", "multi-layouts", "multi-orderings", "navigate-tree", "read-table"),
    *("search-engine", "simple-algebra", "simple-arithmetic", "social-media", "use-autocomplete"),
)
_CLICK = re.compile(r"^\W*click(?: on)?\W*(\d{1,4})\W*$", re.IGNORECASE)
_TYPE = re.compile(r"^\W*type(?: into| in)?\W*(\d{1,4})\W*?[\s:]\s*(.{1,200}?)\s*$", re.IGNORECASE | re.DOTALL)
_QUOTED = re.compile(r'"([^"]*)"')


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MiniWoB(Seeded):
    """Page of MiniWoB++ as a text environment. A step takes some hundredths of a second, a browser some 800 MB."""

    task: str = "click-button"
    """Name of the task, with or without `miniwob/` before and `-v1` after it."""
    max_steps: Annotated[int, Field(ge=1)] = 10
    """Maximum steps per episode; longer ones are truncated."""
    max_episodes: Annotated[int, Field(ge=1)] = 2
    """Browsers that are open at a time in one process."""

    @field_validator("task")
    @classmethod
    def _short_name(cls, task: str) -> str:
        name = task.removeprefix("miniwob/").removesuffix("-v1")
        if name not in TASKS:
            raise ValueError(f"no text task is called '{task}'; {nearest(name, TASKS) or ', '.join(TASKS)}")
        return name

    @property
    def properties(self) -> Properties:
        """Properties of the environment. Raises MissingPackageError when miniwob is not installed."""
        return Properties(
            deterministic=True,
            replayable=True,
            thread_safe=True,
            oracle=self.demonstrates,
            splits=tuple(FIRST_SEED),
            package=f"miniwob {version_of('miniwob', EXTRA)}",
            repeats=True,
        )

    @property
    def demonstrates(self) -> bool:
        """True if the oracle knows the task."""
        return self.task in SCRIPTED

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split: one per seed. Raises EnvError for another split."""
        return self.listed(split, self._prefix)

    def start(self, task: Task) -> MiniWoBEpisode:
        """Begin one attempt.

        Raises:
            DataError: `task` is of another page or package version.
            MissingPackageError: miniwob, Chromium or its driver is not installed.
        """
        split_in(task, self._prefix, "MiniWoB")
        with POOL.kept(self.task) as browser:
            return MiniWoBEpisode(browser, browser.begin(task.seed), self.max_steps)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Actions that solve `task` after `taken` within the step limit, tried out first; or None."""
        split_in(task, self._prefix, "MiniWoB")
        with POOL.lent(self.task) as browser:
            view, found = browser.begin(task.seed), list[str]()
            for text in taken:
                view = view if view.over else done(browser, view, text) or view
            if not view.over and self.demonstrates:
                for text in scripted(view)[: self.max_steps - len(taken)]:
                    found.append(text)
                    view = done(browser, view, text) or view
        return found if view.solved else None

    @property
    def _prefix(self) -> str:
        return f"miniwob-{version_of('miniwob', EXTRA)}/{self.task}"


def done(browser: Browser, view: View, text: str) -> View | None:
    """View after an action; None where the text is none, or names no element."""
    typed = _TYPE.match(text)
    named = typed or _CLICK.match(text)
    number = int(named[1]) if named else 0
    if not 1 <= number <= len(view.actable):
        return None
    element = view.actable[number - 1]
    if typed is None:
        return browser.click(element)
    said = typed[2]
    return browser.type(element, said[1:-1] if len(said) > 1 and said[0] == said[-1] == '"' else said)


class MiniWoBEpisode(Attempt):
    """Attempt at a page: `click N`, and `type N TEXT`, which empties a field first, or chooses from a list.

    Solved is what the package pays 1 for, before that decays in time; pages of boxes pay less for some right boxes.
    The page itself would end an episode after seconds; here steps are counted.
    """

    def __init__(self, browser: Browser, view: View, max_steps: int) -> None:
        super().__init__(max_steps)
        self._browser: Browser | None = browser
        self._view = view
        self.opening = self.opened(f"Task: {view.asked}\n{view.text}")

    def do(self, action: str) -> tuple[str, bool]:
        """Do one action. Text that is none of them costs a step and changes nothing else."""
        assert self._browser is not None
        after = done(self._browser, self._view, action)
        if after is None:
            return f"Unknown action. Say: click NUMBER, or type NUMBER TEXT.\n{self._view.text}", False
        self._view, self.done = after, after.over
        if not after.over:
            return after.text, True
        self.score, self.solved = after.reward, after.solved
        return "Solved." if self.solved else "That was not it.", True

    def state(self) -> str:
        """Return the key of the page."""
        return self._view.key

    def possible(self) -> tuple[str, ...]:
        """Return the clicks, and what the task names to be typed into fields."""
        fields = [
            i for i, e in enumerate(self._view.actable, 1) if e.tag.startswith(("input_text", "input_pass", "texta"))
        ]
        words = list(dict.fromkeys(_QUOTED.findall(self._view.asked)))
        typed = [f'type {i} "{word}"' for i in fields for word in words]
        typed += [f'type {i} "{word}"' for i, e in enumerate(self._view.actable, 1) for word in e.options]
        return tuple(sorted([*(f"click {i}" for i in range(1, len(self._view.actable) + 1)), *typed]))

    async def close(self) -> None:
        """Give the browser back for another attempt."""
        browser, self._browser, self.done = self._browser, None, True
        if browser is not None:
            POOL.give_back(browser)


def scripted(view: View) -> list[str]:
    """Actions of the oracle: it clicks what the task names, types what it quotes, and submits."""
    named = [word for word in _QUOTED.findall(view.asked) if word]
    fields = [i for i, e in enumerate(view.actable, 1) if e.tag.startswith(("input_text", "input_pass"))]
    buttons = [i for i, e in enumerate(view.actable, 1) if e.tag == "button"]
    listed = re.match(r"Select (.*?)(?: from the list)? and click Submit", view.asked)
    lists = [i for i, e in enumerate(view.actable, 1) if e.tag == "select"]
    if lists and listed:
        return [f'type {lists[0]} "{listed[1]}"', f"click {buttons[-1]}"]
    if view.asked.startswith("Select nothing"):
        return [f"click {buttons[-1]}"]
    if listed:
        wanted = [listed[1], *listed[1].split(", ")]
        chosen = [_beside(view, i) for i, e in enumerate(view.elements) if e.text in wanted]
        return [f"click {i}" for i in dict.fromkeys([*filter(None, chosen), *buttons[-1:]])]
    if fields and named and not view.asked.startswith("Click"):
        words = named * len(fields) if len(named) == 1 else named  # a password is asked for twice
        return [*(f'type {i} "{word}"' for i, word in zip(fields, words, strict=False)), f"click {buttons[-1]}"]
    if fields and not named:
        return [f"click {fields[0]}"]
    words = [word.strip(".,") for word in named]
    found = [i for i, e in enumerate(view.actable, 1) if e.text.strip(".,") in words]
    return [f"click {i}" for i in [*(i for i in found if i in buttons), *found, *buttons][:1]]


def _beside(view: View, at: int) -> int:
    """Number of the element at a place, or of the box or button just before bare text; 0 where there is none."""
    own, before = view.elements[at], view.elements[at - 1] if at else None
    element = own if own.ref > 0 else before
    return view.actable.index(element) + 1 if element is not None and element.ref > 0 else 0


#: Tasks whose page and words the oracle understands.
SCRIPTED = frozenset(
    ("choose-list", "click-button", "click-checkboxes", "click-link", "click-option", "click-test", "enter-password",
     "enter-text", "focus-text", "login-user")
)  # fmt: skip
