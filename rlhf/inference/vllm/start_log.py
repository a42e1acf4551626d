"""Progress of an engine's start, from the lines of vLLM's own log."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds between two looks at the log.
_LOOK_S = 0.25

#: What vLLM logs, and what it means; each is told once.
_LINES = (
    (re.compile(r"Starting to load model"), "the engine loads the weights"),
    (re.compile(r"Model loading took ([\d.]+) GiB memory and ([\d.]+) s"), "weights loaded, {0} GiB in {1} s"),
    (re.compile(r"Loading weights took ([\d.]+) seconds"), "weights loaded in {0} s"),
    (re.compile(r"Start compiling function|Dynamo bytecode transform time"), "the engine compiles the model"),
    (re.compile(r"torch\.compile took ([\d.]+) s"), "compiled in {0} s"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), "room for keys and values of {0} tokens"),
    (re.compile(r"Capturing (?:\w+ )?CUDA graphs"), "the engine captures CUDA graphs"),
    (re.compile(r"Graph capturing finished in (\d+) secs, took ([\d.]+) GiB"), "graphs captured, {1} GiB in {0} s"),
)


class StartLog:
    """Turns what vLLM has said so far into lines, each told once.

    Args:
        tell: gets a line.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._told = tell, set[str]()

    def feed(self, text: str) -> None:
        """Tell what is new in all that was said."""
        found = [(m.start(), says, m.groups()) for line, says in _LINES if (m := line.search(text))]
        for _, says, values in sorted(found):
            if says not in self._told:
                self._told.add(says)
                self._tell(says.format(*map(_number, values)))


def _number(value: str) -> str:
    return f"{float(value):.3g}" if "." in value else value


@contextmanager
def tailing(said: Callable[[], str], tell: Callable[[str], None] | None) -> Iterator[None]:
    """Look into a log while an engine starts inside, in a thread.

    Args:
        said: returns the log so far.
        tell: gets the lines; None for nobody.
    """
    if tell is None:
        yield
        return
    log, is_over = StartLog(tell), threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_S):
            log.feed(said())

    thread = threading.Thread(target=look, name="rlhf-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        log.feed(said())
