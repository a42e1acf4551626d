"""`rlhf serve`: vLLM's own server with a policy, for rollouts of other runs or for any OpenAI client."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf.commands.output import Overrides, command, errors, quiet_libraries


@command
def serve(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe, a run, or a checkpoint of one.")],
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A checkpoint or model folder; the newest of the run if left out.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Whoever reaches it can change the weights.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
) -> None:
    """Serve a policy with vLLM: token-in, token-out for `engine.servers`, and the OpenAI-compatible routes.

    Examples: rlhf serve runs/quickstart-seed0; rlhf serve RECIPE policy.path=./my_model --port 8001
    """
    from rlhf.commands.evaluate import recipe_and_checkpoint, refuse_ignored
    from rlhf.recipe import load

    recipe, folder = recipe_and_checkpoint(recipe, checkpoint)
    loaded = load(recipe, overrides or [])
    refuse_ignored(overrides or [], folder, "a server", ("seed", "name", "limits", "engine", "policy"))
    from rlhf.build_server import serve as run

    quiet_libraries()
    run(loaded, checkpoint=folder, host=host, port=port, console=errors())
