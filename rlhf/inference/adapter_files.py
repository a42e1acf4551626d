"""Adapters received in messages, stored by the server under names of its choice.

Every worker process of a server gets every message. They write the same bytes to the same places, so it does not
matter how many of them share a disk.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

#: Environment variable that names the folder for adapters; without it they lie among the temporary files.
FOLDER = "RLHF_ADAPTER_FOLDER"

#: Most bytes of one adapter.
MAX_BYTES = 4 * 2**30

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


def open_adapter(name: str, config: str) -> Path:
    """Make the folder of an adapter that will come.

    Args:
        name: letters, digits, `_`, `.` and `-`.
        config: text of its `adapter_config.json`.

    Raises:
        ValueError: a name that could lead elsewhere.
        PermissionError: somebody else made a folder of that name.
    """
    folder = _folder(name)
    folder.mkdir(mode=0o700, exist_ok=True)
    _refuse_strange(folder)
    _write(folder / "adapter_config.json", 0, config.encode())
    return folder


def write_adapter(name: str, place: int, data: bytes) -> None:
    """Write bytes of `adapter_model.safetensors` of an adapter that is open, from `place` on.

    Raises:
        ValueError: the adapter becomes larger than `MAX_BYTES`.
        OSError: there is no such adapter, or no room.
    """
    folder = _folder(name)
    _refuse_strange(folder)
    if place < 0 or place + len(data) > MAX_BYTES:
        raise ValueError(f"an adapter of more than {MAX_BYTES} bytes is not taken")
    _write(folder / "adapter_model.safetensors", place, data)


def remove_adapter(name: str) -> None:
    """Remove an adapter's files; one that is not there is fine."""
    shutil.rmtree(_folder(name), ignore_errors=True)


def _folder(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is no name for an adapter: letters, digits, '_', '.' and '-' make one")
    return Path(os.environ.get(FOLDER) or tempfile.gettempdir()) / f"rlhf-sent-{name}"


def _refuse_strange(folder: Path) -> None:
    """Refuse a temporary folder of another user, and links."""
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")


def _write(path: Path, place: int, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        while data:
            n = os.pwrite(file, data, place)
            data, place = data[n:], place + n
    finally:
        os.close(file)
