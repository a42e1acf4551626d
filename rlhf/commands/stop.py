"""`rlhf stop`: have a run write a checkpoint and end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf.commands.output import command, errors
from rlhf.evaluation.folder import no_run


@command
def stop(
    run: Annotated[Path, typer.Argument(help="The folder of a run that trains.")],
    timeout: Annotated[float, typer.Option(min=1, help="Most seconds to wait for its end.")] = 600.0,
) -> None:
    """Stop a run as Ctrl-C does: it writes a checkpoint and ends. Returns when it has, with all its processes.

    What was sampled and is finished is in the checkpoint; attempts that run begin again when the run goes on. A run on
    Ray may be stopped from any node that sees its folder, another one from its own machine.

    Examples: rlhf stop runs/quickstart-seed0
    """
    if not run.is_dir():
        raise no_run(run, f"rlhf stop {run}")
    from rlhf.build.stopping import stop as ask
    from rlhf.training.checkpoints.store import latest

    ask(run, timeout)
    newest = latest(run / "checkpoints")
    errors().print(
        f"stopped at {newest}; to go on: rlhf train --resume {run}" if newest else "stopped before a checkpoint",
        highlight=False,
        soft_wrap=True,
    )
