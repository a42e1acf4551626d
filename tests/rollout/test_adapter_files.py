"""Adapters that come in messages: written where the server chooses, under safe names, and removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf.inference import adapter_files
from rlhf.inference.adapter_files import FOLDER, open_adapter, remove_adapter, write_adapter


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def test_an_adapter_is_put_together_and_removed(root: Path) -> None:
    folder = open_adapter("rlhf-ab_1.3-7", '{"r": 4}')
    assert folder.parent == root and folder.stat().st_mode & 0o777 == 0o700
    write_adapter("rlhf-ab_1.3-7", 0, b"abcd")
    write_adapter("rlhf-ab_1.3-7", 4, b"efg")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "adapter_config.json": '{"r": 4}',
        "adapter_model.safetensors": "abcdefg",
    }
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    remove_adapter("rlhf-ab_1.3-7")
    remove_adapter("rlhf-ab_1.3-7")  # once more does no harm
    assert not list(root.iterdir())


def test_two_processes_that_write_the_same_write_it_once(root: Path) -> None:
    folders = [open_adapter("a", "{}") for _ in range(2)]
    for place, data in ((0, b"1234"), (4, b"5678")):
        for _ in folders:
            write_adapter("a", place, data)
    assert folders[0] == folders[1] and (folders[0] / "adapter_model.safetensors").read_bytes() == b"12345678"


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "/etc", "-a", "a b", "a\n", "a\0b", "ä", "a" * 201])
def test_a_name_that_could_lead_elsewhere_is_refused(root: Path, name: str) -> None:
    for call in (lambda: open_adapter(name, "{}"), lambda: write_adapter(name, 0, b"x"), lambda: remove_adapter(name)):
        with pytest.raises(ValueError, match="no name for an adapter"):
            call()
    assert not list(root.iterdir())


def test_a_link_is_not_followed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    open_adapter("real", "{}").rename(root / "kept")
    (root / "rlhf-sent-real").symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="another user"):
        open_adapter("real", "{}")
    with pytest.raises(PermissionError, match="another user"):
        write_adapter("real", 0, b"x")
    folder = open_adapter("other", "{}")
    (folder / "adapter_model.safetensors").symlink_to(elsewhere / "target")
    with pytest.raises(OSError, match="adapter_model"):
        write_adapter("other", 0, b"x")
    assert not list(elsewhere.iterdir())


def test_an_adapter_that_is_too_large_or_was_never_begun_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError):
        write_adapter("never", 0, b"x")
    folder = open_adapter("a", "{}")
    for place in (-1, adapter_files.MAX_BYTES, adapter_files.MAX_BYTES - 1):
        with pytest.raises(ValueError, match="is not taken"):
            write_adapter("a", place, b"xy")
    assert not (folder / "adapter_model.safetensors").exists()
    monkeypatch.setattr(adapter_files, "MAX_BYTES", 5)
    write_adapter("a", 0, b"12345")
    with pytest.raises(ValueError, match="more than 5 bytes"):
        write_adapter("a", 5, b"6")


def test_without_a_folder_of_the_server_it_lies_among_the_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert open_adapter(f"a{os.getpid()}", "{}").parent == tmp_path
