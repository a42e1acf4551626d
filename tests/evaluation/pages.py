"""Pages as tests read them."""

from __future__ import annotations

import base64
import gzip
import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects elements, attributes and visible text, and checks that elements are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.held = ""
        self.stack: list[str] = []
        self.feed(html)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack[-1:] == ["script"] and self.elements[-1][1].get("type") == "application/json":
            self.held += data
        elif not {"script", "style"} & set(self.stack):
            self.text.append(data)

    @property
    def answers(self) -> dict[str, Any]:
        """What the page answers in the place of a server, by path."""
        found: dict[str, Any] = json.loads(self.held)["answers"]
        return found

    @property
    def attempts(self) -> dict[str, Any]:
        """The attempts that the page holds, by RUN/STAGE:PHASE:STEP."""
        files = json.loads(self.held)["files"]
        return {
            f"{run}/{place}": json.loads(gzip.decompress(base64.b64decode(packed)))
            for run, places in files.items()
            for place, packed in places.items()
        }

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def fetches_nothing(self) -> bool:
        """Whether no element names anything outside the page, and the page forbids it besides."""
        policy = [a["content"] or "" for tag, a in self.elements if tag == "meta" and a.get("http-equiv")]
        named = [a.get(name) or "#" for _, a in self.elements for name in ("src", "href", "action", "data")]
        return (
            not {"img", "link", "iframe", "object", "base"} & {tag for tag, _ in self.elements}
            and all(link.startswith("#") for link in named)
            and len(policy) == 1
            and policy[0].startswith("default-src 'none'")
        )
