"""What the tests of stores share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.stores.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store.sqlite", split="train", judged=frozenset({"judge"})) as made:
        yield made
