"""A page of MiniWoB++ in Chromium: begun by a seed, read as text, acted on by the numbers of its elements."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from environments.contrib.instance_pool import InstancePool
from environments.packages import import_from
from rlhf.child_process import Child
from rlhf.errors import MissingPackageError

EXTRA = "miniwob"

#: Parts of every page that are the package's own, or say again what is asked for.
_BESIDE = frozenset({"query", "sync-task-cover", "reward-display", "click-canvas"})
#: Tags that are acted on, and so are told also without text.
_CONTROLS = ("button", "input", "select", "textarea")
#: Milliseconds after which the page would end an episode by itself, and by which its reward decays: 23 days.
_FOREVER = 2_000_000_000


#: Texts of the options of each list, in the order of the page.
_OPTIONS = "return [...document.querySelectorAll('select')].map(s => [...s.options].map(o => o.text.trim()));"
#: Chooses an option by its text in the list that has these options.
_CHOOSE = """
for (const s of document.querySelectorAll('select')) {
  const texts = [...s.options].map(o => o.text.trim());
  if (JSON.stringify(texts) === JSON.stringify(arguments[0]) && texts.includes(arguments[1])) {
    s.selectedIndex = texts.indexOf(arguments[1]);
    s.dispatchEvent(new Event('change', {bubbles: true}));
  }
}
"""


@dataclass(frozen=True)
class Element:
    """Element of a page, as described to the policy.

    Attributes:
        ref: the package's number, which counts on from page to page; negative for bare text.
        tag: with the type of an input, as in `input_checkbox`.
        text: in it, or its value.
        is_on: whether it is ticked or in focus.
        options: of a list, what can be chosen.
    """

    ref: int
    tag: str
    text: str
    is_on: bool = False
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """State of a page.

    Attributes:
        asked: what is to be done.
        elements: what is seen, from the top of the page.
        over: whether the episode has ended.
        reward: of an episode that has ended, without its decay in time, from -1 to 1.
    """

    asked: str
    elements: tuple[Element, ...]
    over: bool = False
    reward: float = 0.0

    @property
    def solved(self) -> bool:
        """True if all is paid that the page pays, and not a share of it."""
        return self.over and self.reward >= 1

    @property
    def actable(self) -> tuple[Element, ...]:
        """Elements in the order of their numbers, from 1."""
        return tuple(e for e in self.elements if e.ref > 0)

    @property
    def text(self) -> str:
        """The page, a line for each element."""
        numbers = {e.ref: i for i, e in enumerate(self.actable, start=1)}
        return "\n".join(
            " ".join(filter(None, [f"[{numbers[e.ref]}]" if e.ref in numbers else "", e.tag if e.ref > 0 else "",
                                   f'"{e.text}"' if e.text else "", "(on)" if e.is_on else "",
                                   f"of {', '.join(e.options)}" if e.options else ""]))
            for e in self.elements
        )  # fmt: skip

    @property
    def key(self) -> str:
        """Hash of all that is seen."""
        if self.over:
            return f"over {self.reward:g}"
        seen = (self.asked, [(e.tag, e.text, e.is_on) for e in self.elements])
        return hashlib.blake2b(repr(seen).encode(), digest_size=8).hexdigest()


class Browser:
    """Chromium without a window that shows one task of the package, by one thread at a time."""

    def __init__(self, task: str) -> None:
        """Start it and load the page. Raises MissingPackageError without the package, Chromium or its driver."""
        self.task = task
        instance = import_from("miniwob.selenium_instance", "miniwob", EXTRA).SeleniumInstance
        self._type = import_from("miniwob.selenium_actions", "miniwob", EXTRA).execute_type_text
        self._dom = import_from("miniwob.dom", "miniwob", EXTRA).DOMElement
        os.environ.setdefault("MINIWOB_CHROME_BINARY", found("chromium", "google-chrome"))
        os.environ.setdefault("MINIWOB_CHROMEDRIVER", found("chromedriver"))
        self._instance = instance(0, task, headless=True)
        self._instance.record_screenshots = False
        self._instance.create_driver()
        driver = self._instance.driver.service.process.pid
        pids = [driver, *(child.pid for child in psutil.Process(driver).children())]
        # Its input ends with this process, however that does; Chromium alone would outlive it.
        self._guard = Child(["sh", "-c", f"read end; kill -9 {' '.join(map(str, pids))}"])

    def begin(self, seed: int) -> View:
        """Start the episode of a seed. Numbers below 10,000,000 draw from what the package has for training."""
        self._instance.force_stop()
        self._run(f"core.EPISODE_MAX_TIME = {_FOREVER};")
        self._instance.mode = "train" if seed < 10_000_000 else "test"
        self._instance.begin_task(seed=seed)
        return self.view()

    def click(self, element: Element) -> View:
        """Click on an element."""
        self._run(f"return core.elementClick({element.ref});")
        return self.view()

    def type(self, element: Element, text: str) -> View:
        """Put the cursor into a field, empty it, and type; of a list, choose what has this text."""
        if element.tag == "select":
            self._instance.driver.execute_script(_CHOOSE, element.options, text)
            return self.view()
        self._run(f"return core.elementClick({element.ref});")
        self._run("const e = document.activeElement; if (e && 'value' in e) { e.value = ''; }")
        self._type(text, self._instance.driver)
        return self.view()

    def view(self) -> View:
        """Read the page."""
        told = self._instance.get_metadata()
        asked = self._run("return core.getUtterance();")
        asked = str(asked["utterance"] if isinstance(asked, dict) else asked).strip()
        if told["done"]:
            return View(asked, (), True, float(told["raw_reward"]))
        options = iter([tuple(texts) for texts in self._run(_OPTIONS)])
        return View(asked, tuple(_elements(self._dom(self._run("return core.getDOMInfo();")), options)))

    def close(self) -> None:
        """End the browser, one that has crashed too."""
        self._guard.kill()
        with suppress(Exception):  # Selenium's own, and those of a broken connection
            self._instance.driver.quit()

    @property
    def answers(self) -> bool:
        """True if it runs scripts, as one that has crashed does not."""
        try:
            return bool(self._run("return true;"))
        except Exception:
            return False

    def _run(self, script: str) -> Any:
        return self._instance.driver.execute_script(script)


def found(*names: str) -> str:
    """Path of the first program of these that is installed. Raises MissingPackageError where none is."""
    for name in names:
        if path := shutil.which(name):
            return path
    raise MissingPackageError(
        "a program that this environment needs is not installed",
        where="environment miniwob",
        got=f"no {' or '.join(names)} on the path",
        hint="apt-get install chromium chromium-driver, or set MINIWOB_CHROME_BINARY and MINIWOB_CHROMEDRIVER",
    )


def _elements(root: Any, options: Iterator[tuple[str, ...]]) -> Iterator[Element]:
    if root.id in _BESIDE or root.width == 0 or root.height == 0:
        return
    if root.tag == "select":
        yield Element(root.ref, root.tag, str(root.value or ""), bool(root.focused), next(options, ()))
        return
    if root.children:
        for child in root.children:
            yield from _elements(child, options)
        return
    text = " ".join(
        str(root.value if isinstance(root.value, str) and root.tag != "button" else root.text or "").split()
    )
    if text or root.tag.startswith(_CONTROLS):
        yield Element(root.ref, root.tag, text, bool(root.focused) or root.value is True)


#: Browsers that are not in use: two at most, as each takes some 800 MB.
POOL: InstancePool[str, Browser] = InstancePool(
    Browser, lambda b: b.task, most=2, close=Browser.close, is_usable=lambda b: b.answers
)
atexit.register(POOL.clear)
