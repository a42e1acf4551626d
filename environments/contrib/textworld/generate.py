"""Games of TextWorld, generated in a process of their own and kept in a folder.

The generator draws from sets of strings, so what it makes depends on Python's hash seed; and it keeps random state for
the whole process. So each game is made in a process of its own with a fixed hash seed. A game takes 2 to 4 seconds of
one core, once: it is kept under a name that covers package, settings and seed, beside a note of what it has to look
like, and a game that does not is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.packages import cache_folder, content_hash, import_from, made_at_once, version_of
from rlhf.child_process import complaint, run_python
from rlhf.errors import EnvError

EXTRA = "textworld"
_PARTS = ("textworld/challenges/", "textworld/generator/", "textworld/logic/", "textworld/textgen/")
_MOST_TRIES = 50
_LIMIT_S = 300.0
_FILES = ("game.z8", "game.json")


@dataclass(frozen=True, slots=True)
class Game:
    """A game on disk.

    Attributes:
        path: the program; its facts lie beside it as `.json`.
        fingerprint: hash over facts, texts and quests, without the date of compilation.
        walkthrough: actions that win it from the start.
        max_score: points for winning it.
        objective: what the player is asked to do.
    """

    path: Path
    fingerprint: str
    walkthrough: tuple[str, ...]
    max_score: int
    objective: str


def release() -> str:
    """Name of the generator: version and hash of its files. Raises MissingPackageError, EnvError."""
    return f"{version_of('textworld', EXTRA)}-{content_hash('textworld', EXTRA, *_PARTS)}"


def game(challenge: str, settings: Mapping[str, Any], grammar: Mapping[str, bool], seed: int) -> Game:
    """Game of a seed, generated on first use; safe in several processes at once.

    Some seeds allow no game (treasure hunter): then the next of a fixed row of seeds of its own is tried.

    Raises:
        EnvError: the generator failed; the message holds what it said.
        MissingPackageError: textworld is not installed.
    """
    order = json.dumps([challenge, settings, grammar, seed], sort_keys=True)
    key = hashlib.sha256(order.encode()).hexdigest()[:24]
    target = cache_folder("textworld") / release() / key[:2] / key
    found = _read(target)
    if found is None:
        shutil.rmtree(target, ignore_errors=True)
        with made_at_once(target) as folder:
            _make_elsewhere(folder, order)
        found = _read(target)
    if found is None:
        raise EnvError(
            "a game that was just made cannot be read",
            where="TextWorld",
            got=str(target),
            hint="check whether the disk is full, or another program writes there",
        )
    return found


def _read(folder: Path) -> Game | None:
    """Stored game; None where there is none, or it differs from what was recorded."""
    try:
        note = json.loads((folder / "note.json").read_text())
        if any(_digest(folder / name) != note["files"][name] for name in _FILES):
            return None
        return Game(
            folder / _FILES[0],
            note["fingerprint"],
            tuple(note["walkthrough"]),
            note["max_score"],
            note["objective"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _make_elsewhere(folder: Path, order: str) -> None:
    (folder / "order.json").write_text(order)
    code = f"from environments.contrib.textworld.generate import make; make({str(folder)!r})"
    try:
        done = run_python(code, _LIMIT_S, PYTHONHASHSEED="0", OMP_NUM_THREADS="1")
    except subprocess.TimeoutExpired as error:
        raise EnvError("the generator hung", where="TextWorld", got=f"{order}, nothing in {_LIMIT_S:g} s") from error
    if done.returncode != 0 or not (folder / "note.json").exists():
        raise EnvError("the game cannot be generated", where="TextWorld", got=f"{order}: {complaint(done)}")


def make(folder: str) -> None:
    """Make in this process the game that `order.json` in `folder` asks for."""
    import_from("textworld", "textworld", EXTRA)
    here = Path(folder)
    challenge, settings, grammar, seed = json.loads((here / "order.json").read_text())
    made, options = _generate(challenge, settings, grammar, seed)
    options.path = str(here / _FILES[0])
    options.force_recompile = True
    import_from("textworld.generator", "textworld", EXTRA).compile_game(made, options)
    (here / "game.ni").unlink(missing_ok=True)  # the source, of no use any more
    note = {
        "fingerprint": fingerprint(made.serialize()),
        "walkthrough": list(made.metadata.get("walkthrough") or made.walkthrough),
        "max_score": made.max_score,
        "objective": made.objective,
        "files": {name: _digest(here / name) for name in _FILES},
    }
    (here / "note.json").write_text(json.dumps(note, indent=1))


def _generate(challenge: str, settings: Mapping[str, Any], grammar: Mapping[str, bool], seed: int) -> tuple[Any, Any]:
    textworld = import_from("textworld", "textworld", EXTRA)
    generator = import_from(f"textworld.challenges.tw_{challenge}.{challenge}", "textworld", EXTRA)
    no_game = import_from("textworld.generator.chaining", "textworld", EXTRA).QuestGenerationError
    for i in range(_MOST_TRIES):
        options = textworld.GameOptions()
        options.seeds = (seed + i * 40_000_003) % 2**31
        for name, value in grammar.items():
            setattr(options.grammar, name, value)
        with contextlib.suppress(no_game):
            return generator.make(dict(settings), options), options
    raise ValueError(f"no game for {_MOST_TRIES} seeds in a row")


def fingerprint(told: Mapping[str, Any]) -> str:
    """Hash of a game's map, objects, texts and quests, in canonical order."""
    kept = {name: value for name, value in told.items() if name in ("world", "quests", "infos", "objective")}
    if "world" in kept:
        kept["world"] = sorted(json.dumps(fact, sort_keys=True) for fact in kept["world"])
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
