"""Sanitised terminal text: control and bidirectional characters are made visible.

Ids of tasks, messages of exceptions and replies of models and environments may hold escape sequences that move the
cursor, rename the window, or make a line read as another one. Every command writes by a
`CleanConsole` or by `say`, so that none has to think of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

_BIDI = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_CONTROLS: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) != "\n"},
    0x7F: "␡",
    **{code: f"<{code:02x}>" for code in range(0x80, 0xA0)},
    **{code: f"<{code:04x}>" for code in [*_BIDI, 0x2028, 0x2029]},
    **dict.fromkeys(range(0xD800, 0xE000), "\N{REPLACEMENT CHARACTER}"),
}


def clean(text: str) -> str:
    """Return `text` with all that steers a terminal made visible, but for line feeds.

    Of C0, NUL, ESC, carriage return and tab among them, its pictures (␛); C1, direction marks, embeddings, overrides
    and isolates, line and paragraph separators as their numbers (<9b>, <202e>); half a pair of surrogates as �.
    """
    return text.translate(_CONTROLS)


class CleanConsole(Console):
    """Console that sanitises its output, and reads no markup in it unless told to.

    What rich itself writes to style text and to move the cursor is not text, and stays.
    """

    def __init__(self, **options: Any) -> None:
        # A notebook is given text: rich would make a page of each line, or move a cursor that is not there.
        of_notebook = {"force_jupyter": False, "force_terminal": False} if "ipykernel" in sys.modules else {}
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **of_notebook, **options})

    def on_broken_pipe(self) -> None:
        """Go on without messages where nobody reads them any more; what a command was asked for ends it instead."""
        if not self.stderr:
            raise BrokenPipeError
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(s if s.control else Segment(clean(s.text), s.style) for s in buffer)


def say(*lines: str, end: str = "\n") -> None:
    """Print lines to standard output as they are, without wrapping, cleaned."""
    sys.stdout.write("".join(clean(line) + end for line in lines))
    sys.stdout.flush()
