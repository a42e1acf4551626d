"""Lists of files with their digests: read once by who writes them, and again after anybody else has."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf import digests
from rlhf.digests import MANIFEST, Manifest
from rlhf.errors import CheckpointError, whole


def write(folder: Path, name: str, text: str = "x") -> Path:
    path = folder / name
    path.write_text(text)
    Manifest(folder).record(path)
    return path


def test_lines_are_read_once_by_who_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(5):
        write(tmp_path, f"a{i}")
    digests._READ.clear()  # as a new process has it
    read: list[bytes] = []
    unsealed = digests._unsealed
    monkeypatch.setattr(digests, "_unsealed", lambda line: read.append(line) or unsealed(line))  # type: ignore[func-returns-value]
    for i in range(40):
        write(tmp_path, f"b{i}")
    Manifest(tmp_path).check_all()
    assert len(read) == 5
    assert len((tmp_path / MANIFEST).read_bytes().splitlines()) == 45


def test_what_others_write_is_read(tmp_path: Path) -> None:
    write(tmp_path, "a")
    held = dict(digests._READ)
    path = write(tmp_path, "b")
    digests._READ.clear()
    digests._READ.update(held)  # as the process has it that wrote the first line
    write(tmp_path, "c")
    assert all(Manifest(tmp_path).check(tmp_path / name) for name in "abc")
    path.write_text("y")
    with pytest.raises(CheckpointError, match="b"):
        Manifest(tmp_path).check_all()


def test_half_a_line_is_cut_off_and_a_changed_one_refused(tmp_path: Path) -> None:
    write(tmp_path, "a")
    target = tmp_path / MANIFEST
    with target.open("ab") as file:
        file.write(b'{"name": "b", ')
    write(tmp_path, "c")
    assert Manifest(tmp_path).check(tmp_path / "a") and Manifest(tmp_path).check(tmp_path / "c")
    target.write_bytes(target.read_bytes().replace(b'"bytes": 1', b'"bytes": 2', 1))
    with pytest.raises(CheckpointError, match="line 1"):
        write(tmp_path, "d")


def test_a_file_or_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "notes.txt"
    with whole("notes", path) as partial:
        partial.write_text("first")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), whole("notes", path) as partial:
        partial.write_text("half of the sec")
        1 / 0  # noqa: B018
    (path.parent / ".notes.txt.partial").symlink_to(tmp_path)  # of somebody else; a folder would be of a killed process
    assert path.read_text() == "first"
    with whole("notes", path) as partial:
        partial.write_text("second")
    assert path.read_text() == "second" and [p.name for p in path.parent.iterdir()] == ["notes.txt"]
    with (
        pytest.raises(CheckpointError, match="the model cannot be written"),
        whole("the model", path / "in" / "a file"),
    ):
        pass
