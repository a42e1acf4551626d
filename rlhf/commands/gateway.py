"""`rlhf gateway`: a policy behind OpenAI's and Anthropic's wires, for agents that come by themselves."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlhf.commands.output import Overrides, command, errors, quiet_libraries


class Judge(StrEnum):
    """Source of an attempt's reward."""

    posted = "posted"
    world = "world"
    recipe = "recipe"


@command
def gateway(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe, a run, or a checkpoint of one.")],
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A checkpoint or model folder; the newest of the run if left out.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the attempts.")] = Path("gateway"),
    split: Annotated[str, typer.Option(help="Tasks for who names none.")] = "test",
    reward: Annotated[Judge, typer.Option(help="Who says what an attempt earned.")] = Judge.posted,
    host: Annotated[str, typer.Option(help="Address to listen on. Who has a key can ask the policy.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
) -> None:
    """Serve a policy to agents elsewhere, each attempt at an address of its own, and store trajectories.

    Examples: rlhf gateway runs/quickstart-seed0 --reward world
    """
    from rlhf.commands.evaluate import recipe_and_checkpoint, refuse_ignored
    from rlhf.recipe import load

    named, folder = recipe_and_checkpoint(recipe, checkpoint)
    loaded = load(named, overrides or [])
    refuse_ignored(
        overrides or [],
        folder,
        "a gateway",
        ("seed", "name", "policy", "limits", "engine", "environment", "rewards", "agent"),
    )
    from rlhf.serving.gateway import serve

    quiet_libraries()
    console = errors()
    ended = serve(
        loaded,
        checkpoint=folder,
        out=out,
        split=split,
        reward=reward.value,
        host=host,
        port=port,
        console=console,
    )
    console.print(f"attempts: {ended['attempts']}", highlight=False)
