"""SHA-256 digests of files, to detect changes after they were written.

    checkpoints/NAME/files.json    every other file of a checkpoint, and how much of the run's logs belongs to it
    files.jsonl                    the manifest of a run, an evaluation or a folder of trajectories: one line per file

Both guard themselves: `files.json` ends with a digest of what is before it, and so does each line of a manifest. What
is older than this has sizes alone, or nothing, and is read as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.errors import CheckpointError, disk, whole

#: Of a checkpoint, and of other folders.
FILES, MANIFEST = "files.json", "files.jsonl"
#: Bytes that are read at a time.
_BLOCK = 1 << 20
#: Hexadecimal digits of the digest that guards a list or a line.
_N_SEAL = 32
#: Endings of files that may take long to read.
_WEIGHTS = (".safetensors", ".bin", ".pt")
#: What to do about a file that is not what was written, where the caller knows nothing better.
_HINT = "put it back from a copy, or name another checkpoint, run or evaluation"


@dataclass(frozen=True, slots=True)
class Mark:
    """Length and SHA-256, in hexadecimal, of a file or its beginning; an empty digest matches any content."""

    n_bytes: int
    sha256: str


def mark_of(path: Path, n_bytes: int | None = None) -> Mark:
    """The mark of a file, or of its first bytes. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        if n_bytes is None:
            digest = hashlib.file_digest(file, "sha256")
            return Mark(file.tell(), digest.hexdigest())
        digest, left = hashlib.sha256(), n_bytes
        while left and (block := file.read(min(left, _BLOCK))):
            digest.update(block)
            left -= len(block)
    return Mark(n_bytes - left, digest.hexdigest())


def _seal(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:_N_SEAL]


def _unsealed(text: str | bytes) -> dict[str, Any]:
    """The values of JSON text whose `seal` fits them. Raises ValueError."""
    values = json.loads(text)
    if not isinstance(values, dict) or values.pop("seal", None) != _seal(values):
        raise ValueError("its own digest does not match its content")
    return values


def _differs(path: Path, wanted: Mark) -> str:
    """Difference of a file from its mark in words; empty where there is none."""
    if not path.is_file():
        return "it is missing"
    size = path.stat().st_size
    if size != wanted.n_bytes:
        return f"{size} bytes instead of {wanted.n_bytes}"
    return "" if wanted.sha256 in ("", mark_of(path).sha256) else f"other content in its {size} bytes"


def _changed(path: Path, got: str, hint: str) -> CheckpointError:
    return CheckpointError(
        "this file has changed since it was written",
        where=str(path),
        got=got,
        expected="the file with its recorded size and SHA-256",
        hint=hint or _HINT,
    )


# --- checkpoints ---


@dataclass(frozen=True)
class Listing:
    """Content of `files.json`.

    Attributes:
        sizes: bytes of each file by its name in the checkpoint.
        marks: the same with digests; None in a checkpoint of before there were any.
        logs: by the name of a log of the run, the mark of its beginning that belongs to the checkpoint.
    """

    sizes: Mapping[str, int]
    marks: Mapping[str, Mark] | None
    logs: Mapping[str, Mark]


def seal(
    folder: Path, logs: Mapping[str, Mark], *, last: str, text: str, known: Mapping[str, Mark] | None = None
) -> None:
    """List every file of a checkpoint but `last`, then write `last` with content `text`.

    Args:
        folder: of the checkpoint.
        logs: see `Listing`.
        last: name of the file without which the folder is no checkpoint.
        text: of it.
        known: marks of files that are the same as in another checkpoint.
    """
    content = text.encode()
    names = {_name(path, folder): path for path in _files(folder)}
    marks = {name: (known or {}).get(name) or mark_of(path) for name, path in names.items()}
    marks[last] = Mark(len(content), hashlib.sha256(content).hexdigest())
    values = {"files": {name: _plain(m) for name, m in marks.items()}, "logs": {n: _plain(m) for n, m in logs.items()}}
    (folder / FILES).write_text(json.dumps({**values, "seal": _seal(values)}, indent=1) + "\n")
    (folder / last).write_bytes(content)


def listing(folder: Path, hint: str = "") -> Listing:
    """Read `files.json`; one without digests, or none at all, has no `marks`. `hint` says what to do if it is changed.

    Raises:
        CheckpointError: it is not what was written.
        ValueError, OSError: it is truncated or cannot be read.
    """
    path = folder / FILES
    if not path.is_file():
        return Listing({}, None, {})
    content = path.read_bytes()
    if not content.rstrip().endswith(b"}"):
        raise ValueError(f"{FILES} is truncated")
    try:
        values = json.loads(content)
        if isinstance(values, dict) and values and all(isinstance(v, int) for v in values.values()):
            return Listing(values, None, {})
        values = _unsealed(content)
        marks = {name: Mark(*plain) for name, plain in values["files"].items()}
        logs = {name: Mark(*plain) for name, plain in values["logs"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _changed(path, f"{type(error).__name__}: {error}", hint) from error
    return Listing({name: mark.n_bytes for name, mark in marks.items()}, marks, logs)


def has_digests(folder: Path) -> bool:
    """True if a checkpoint has digests of its files. Raises CheckpointError where their list was changed."""
    try:
        return listing(folder).marks is not None
    except (OSError, ValueError):
        return True  # it is truncated, which is said where it is read


def verify(folder: Path, only: str = "", *, without: str = "", weights: bool = True, hint: str = "") -> bool:
    """Compare files of a checkpoint with what was written; return whether it has digests to compare with.

    Args:
        folder: of the checkpoint.
        only: a file in it, or a folder with all that is in it; empty is everything.
        without: a folder in it that is left out.
        weights: whether to look at files of weights too, which takes seconds for each gigabyte.
        hint: what to do where one differs.

    Raises:
        CheckpointError: a file is missing, additional, of another size or content; its name is said.
    """
    try:
        found = listing(folder, hint)
    except (OSError, ValueError) as error:
        raise _changed(folder / FILES, f"{type(error).__name__}: {error}", hint) from error

    def is_asked(name: str) -> bool:
        asked = (not only or name == only or name.startswith(f"{only}/")) and not name.startswith(f"{without}/")
        return asked and (weights or not name.endswith(_WEIGHTS))

    for name in sorted(filter(is_asked, found.sizes)):
        path = folder / name
        got = _differs(path, found.marks[name] if found.marks else Mark(found.sizes[name], ""))
        if got:
            raise _changed(path, got, hint)
    for path in _files(folder) if found.marks else ():
        name = _name(path, folder)
        if name != FILES and name not in found.sizes and is_asked(name):
            raise _changed(path, "a file that was not written with this checkpoint", f"move it elsewhere, or {hint}")
    return found.marks is not None


def verify_model(folder: Path, *, weights: bool = True, hint: str = "") -> None:
    """Verify a model folder against its digests, where a checkpoint or a run lists them.

    Raises:
        CheckpointError: as in `verify`.
    """
    if folder.name == "policy" and (folder.parent / FILES).is_file():
        verify(folder.parent, "policy", weights=weights, hint=hint)
    for above in list(folder.resolve().parents)[:2]:
        if (above / MANIFEST).is_file():
            Manifest(above).check_below(folder.resolve())


def check_log(run: Path, name: str) -> None:
    """Compare the beginning of a run's log with what its newest checkpoint says of it.

    Raises:
        CheckpointError: the log is not what was written.
    """
    found = [path.parent for path in run.glob(f"checkpoints/[!.]*/{FILES}") if not path.parent.suffix]
    newest = max(found, key=lambda folder: [int(digits) for digits in re.findall(r"\d+", folder.name)], default=None)
    try:
        mark = listing(newest).logs.get(name) if newest is not None else None
    except (CheckpointError, OSError, ValueError):
        return  # said where that checkpoint is read
    if mark is not None:
        check_beginning(run / name, mark)


def check_beginning(path: Path, mark: Mark) -> None:
    """Raise CheckpointError where a file does not begin with what `mark` is of."""
    found = mark_of(path, mark.n_bytes)
    if found == mark:
        return
    got = f"{found.n_bytes} bytes" if found.n_bytes < mark.n_bytes else f"other content in its first {mark.n_bytes}"
    hint = f"put it back from a copy; to go on without what it held: mv {path} {path}.damaged"
    raise _changed(path, got, hint)


def _plain(mark: Mark) -> list[Any]:
    return [mark.n_bytes, mark.sha256]


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# --- other folders ---


@dataclass(frozen=True)
class Manifest:
    """The list of the finished files of a folder, appended to by the process that writes there.

    A file is listed before it is renamed into its place. A process that is killed in between leaves the file as it was
    before; so what a file is compared with is the last line of its name and the one before.

    Attributes:
        folder: with the list, and the files in it or below.
    """

    folder: Path

    @property
    def is_there(self) -> bool:
        """True if the folder has a list; ones written before there were digests have none."""
        return (self.folder / MANIFEST).is_file()

    def record(self, path: Path, source: Path | None = None) -> None:
        """List a file as it is in place, or in `source`, from where it will be renamed to `path`.

        Raises:
            CheckpointError: the list cannot be written, or was changed.
        """
        target, name = self.folder / MANIFEST, _name(path, self.folder)
        with disk("the list of files", target):
            mark = mark_of(source or path)
            known = self._known()
            before = _READ.get(target)
            if known.get(name, ())[-1:] == (mark,):
                return
            values = {"name": name, "bytes": mark.n_bytes, "sha256": mark.sha256}
            line = json.dumps({**values, "seal": _seal(values)}).encode() + b"\n"
            with target.open("ab+") as file:
                _end_with_a_line(file)
                n_bytes = file.tell()
                file.write(line)
            after = _state(target)
            is_own = n_bytes == 0 or (before is not None and before[0][1] == n_bytes)
            if is_own and after[1] == n_bytes + len(line):  # nobody else wrote meanwhile: not to be read again
                _keep(target, after, {**known, name: (*known.get(name, ())[-1:], mark)})

    def record_all(self, *names: str) -> None:
        """List those of the files and folders with these names that are there, as they are."""
        for name in names:
            path = self.folder / name
            for one in _files(path) if path.is_dir() else [path] * path.is_file():
                self.record(one)

    def check(self, path: Path, hint: str = "") -> bool:
        """Return whether a file is listed; `hint` says what to do where it differs.

        Raises:
            CheckpointError: it is, and is not what was written; or the list is not.
        """
        marks = self._known().get(_name(path, self.folder), ())
        found = [_differs(path, mark) for mark in marks]
        if found and all(found):
            raise _changed(path, found[-1], hint)
        return bool(found)

    def check_below(self, folder: Path) -> None:
        """Verify every listed file below `folder`, which lies in the manifest's own, and that no others are there."""
        own = self.folder.resolve()
        names = [name for name in self._known() if (own / name).is_relative_to(folder)]
        for name in names:
            self.check(self.folder / name)
        for path in _files(folder) if names else ():
            if _name(path, own) not in names:
                raise _changed(path, "a file that was not written with the others", "move it elsewhere")

    def check_all(self) -> None:
        """Check every listed file that is there."""
        for name in self._known():
            if (self.folder / name).is_file():
                self.check(self.folder / name)

    def require(self, path: Path, hint: str = "") -> None:
        """`check` a file that a list must contain, if there is a list; `hint` is the advice on a mismatch."""
        if not self.check(path, hint) and self.is_there:
            hint = f"move it elsewhere, or remove {MANIFEST} to read what is there without digests"
            raise _changed(path, f"{MANIFEST} beside it does not list it", hint)

    def _known(self) -> Mapping[str, tuple[Mark, ...]]:
        path = self.folder / MANIFEST
        if not path.is_file():
            return {}
        state, held = _state(path), _READ.get(path)
        if held is None or held[0] != state:
            held = state, _read_manifest(path)
            _keep(path, *held)
        return held[1]


def read_listed(path: Path) -> str:
    """The text of a file, compared with the manifest of its folder where that lists it.

    Raises:
        CheckpointError: it is not what was written.
    """
    Manifest(path.parent).check(path)
    return path.read_text("utf-8")


def write_listed(path: Path, text: str) -> None:
    """Write a file whole or not at all, and list it in the manifest of its folder."""
    with whole(path.name, path) as partial:
        partial.write_text(text, "utf-8")
        Manifest(path.parent).record(path, partial)


def _end_with_a_line(file: Any) -> None:
    """Cut off what a process that was killed left of a line, and stand at the end."""
    n_bytes = file.seek(0, 2)
    file.seek(max(n_bytes - 1, 0))
    if file.read() not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    file.seek(0, 2)


#: Manifests as they were read last or were left by this process: time of change, size and inode, and the marks.
_READ: dict[Path, tuple[tuple[int, int, int], Mapping[str, tuple[Mark, ...]]]] = {}
_MOST_READ = 64


def _state(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _keep(path: Path, state: tuple[int, int, int], found: Mapping[str, tuple[Mark, ...]]) -> None:
    """Remember what a manifest holds; of too many the one that was read first is forgotten."""
    _READ.pop(path, None)
    if len(_READ) >= _MOST_READ:
        _READ.pop(next(iter(_READ)), None)
    _READ[path] = state, found


def _read_manifest(path: Path) -> Mapping[str, tuple[Mark, ...]]:
    """By name, the last two marks of each file; a torn last line is left out."""
    content = path.read_bytes()
    found: dict[str, tuple[Mark, ...]] = {}
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
        try:
            values = _unsealed(line)
            name, mark = str(values["name"]), Mark(values["bytes"], values["sha256"])
        except (ValueError, KeyError) as error:
            raise _changed(path, f"line {number}: {error}", "") from error
        found[name] = (*found.get(name, ())[-1:], mark)
    return found
