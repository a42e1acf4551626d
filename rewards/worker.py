"""Worker process of `rewards.worker_pool`: a call and an answer per line, with a time limit.

    python -m rewards.worker module:function

The kernel kills it when its processor time is up, so it also ends where its parent has long gone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys

#: Memory that a call may take beyond what is loaded.
_MAX_BYTES = 4 * 2**30


def main(target: str) -> None:
    """Answer calls of `target` until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    sys.set_int_max_str_digits(20_000)
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    _say(answers, "ready")
    for line in sys.stdin:
        limit_s, *arguments = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # its default action ends the process, wherever it is
        try:
            said = ["returned", function(*arguments)]
        except ModuleNotFoundError as error:
            said = ["missing", error.name]
        except (Exception, RecursionError, MemoryError) as error:
            said = ["raised", f"{type(error).__name__}: {str(error)[:200]}"]
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(answers, said)


def _say(answers: object, said: object) -> None:
    print(json.dumps(said), file=answers, flush=True)  # type: ignore[call-overload]


if __name__ == "__main__":
    main(sys.argv[1])
