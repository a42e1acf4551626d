"""`rlhf serve`: vLLM's own server with a policy, for rollouts and OpenAI clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf.commands.output import Overrides, command, errors, quiet_libraries


@command
def serve(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe, run or checkpoint.")],
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A checkpoint or model folder (default: the run's newest checkpoint).")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. No authentication: any client can update the weights.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    embedded: Annotated[
        bool,
        typer.Option("--embedded", help="Use the embedded engine, for small models, without vLLM's OpenAI routes."),
    ] = False,
) -> None:
    """Serve a policy with vLLM: token-in, token-out for `engine.servers`, and OpenAI-compatible routes.

    Examples: rlhf serve runs/quickstart-seed0; rlhf serve RECIPE policy.path=./my_model --port 8001
    """
    from rlhf.commands.evaluate import recipe_and_checkpoint, refuse_ignored
    from rlhf.recipe import load

    recipe, folder = recipe_and_checkpoint(recipe, checkpoint)
    loaded = load(recipe, overrides or [])
    refuse_ignored(overrides or [], folder, "a server", ("seed", "name", "limits", "engine", "policy"))
    if embedded:
        from rlhf.serving.embedded import serve as run
    else:
        from rlhf.serving.vllm import serve as run
    quiet_libraries()
    run(loaded, checkpoint=folder, host=host, port=port, console=errors())


@command
def serve_environment(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="An environment kind, or ./file.py:Name.")],
    fields: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. No authentication: any client can play.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    max_sessions: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent episodes.")] = 64,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Allow browser pages of this origin to connect (default: none).")
    ] = None,
) -> None:
    """Serve an environment over the OpenEnv protocol, for other toolkits or machines.

    Examples: rlhf serve-environment keyhole rows=3 --port 8001
    """
    from environments.base import Capabilities
    from rlhf.chat_api import load_aiohttp
    from rlhf.recipe.builder import build_environment
    from rlhf.recipe.text import parse_fields

    values = {"kind": kind, **parse_fields(fields or [])}
    environment = build_environment(values, "environment", base=Path.cwd())
    load_aiohttp("rlhf serve-environment")
    from aiohttp import web

    from rlhf.serving.contrib.openenv import Server

    console = errors()

    def say(line: str) -> None:
        if "Running on" in line:
            console.print(f"{kind} by OpenEnv's protocol at {line.partition('Running on ')[2].split()[0]}")

    app = Server(environment, max_sessions=max_sessions, origins=allow_origin or ()).application()
    try:
        web.run_app(app, host=host, port=port, print=say, handle_signals=True)
    finally:
        Capabilities(environment).close()
