"""`rlhf stop`: have a run write a checkpoint and end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf.commands.output import command, errors
from rlhf.evaluation.folder import no_run
from rlhf.given_parts import how_to_resume


@command
def stop(
    run: Annotated[Path, typer.Argument(help="Folder of a run in progress.")],
    timeout: Annotated[float, typer.Option(min=1, help="Maximum seconds to wait.")] = 600.0,
) -> None:
    """Stop a run after it has written a checkpoint, as Ctrl-C does, and wait until all its processes have exited.

    Finished attempts are saved in the checkpoint; unfinished ones start over on resume. A run on Ray can be stopped
    from any node that sees its folder, any other run only from its own machine.

    Examples: rlhf stop runs/quickstart-seed0
    """
    if not run.is_dir():
        raise no_run(run, f"rlhf stop {run}")
    from rlhf.build.stopping import stop as ask
    from rlhf.training.checkpoints.store import latest

    ask(run, timeout)
    newest = latest(run / "checkpoints")
    errors().print(
        f"stopped at {newest}; to resume: {how_to_resume(run)}" if newest else "stopped before a checkpoint",
        highlight=False,
        soft_wrap=True,
    )
