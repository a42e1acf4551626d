"""`rlhf gateway`: a policy behind OpenAI's and Anthropic's wires, for agents that come by themselves."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlhf.commands.output import Overrides, command, errors, quiet_libraries


class Judge(StrEnum):
    """Source of an attempt's reward."""

    client = "client"
    environment = "environment"
    recipe = "recipe"


Endpoint = Annotated[
    str, typer.Option(metavar="URL", help="OpenAI-compatible server to sample from instead of the policy.")
]


@command
def gateway(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe, run or checkpoint.")],
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A checkpoint or model folder (default: the run's newest checkpoint).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Output folder of the attempts.")] = Path("gateway"),
    split: Annotated[str, typer.Option(help="Task split for clients that name no task.")] = "test",
    reward: Annotated[
        Judge | None,
        typer.Option(help="Source of the reward: client (default), environment, or recipe."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Any client with a key can sample.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    endpoint: Endpoint = "",
    model: Annotated[str, typer.Option(help="Name of the model on --endpoint.")] = "",
    most: Annotated[int | None, typer.Option("--n", "-n", min=1, help="Stop after this many attempts.")] = None,
) -> None:
    """Serve a policy to external agents, with one base URL per attempt, and store their trajectories.

    Solved attempts are also written as chats for a supervised stage: data: {path: gateway/chats.jsonl}

    Examples: rlhf gateway runs/quickstart-seed0 --reward environment; rlhf gateway RECIPE --endpoint URL --model NAME
    -n 500
    """
    from rlhf.commands.evaluate import recipe_and_checkpoint, refuse_ignored
    from rlhf.errors import RecipeError
    from rlhf.recipe import load

    named, folder = recipe_and_checkpoint(recipe, checkpoint)
    loaded = load(named, overrides or [])
    refuse_ignored(
        [o for o in overrides or [] if not o.partition("=")[0].endswith(".temperature")],
        folder,
        "a gateway",
        ("seed", "name", "policy", "limits", "engine", "environment", "rewards", "agent"),
    )
    if bool(endpoint) != bool(model):
        raise RecipeError(
            "an endpoint and its model go together",
            where="rlhf gateway",
            got=f"--endpoint {endpoint or 'nothing'}, --model {model or 'nothing'}",
            expected="both, or neither",
            hint="name a server and a model that it serves",
        )
    from rlhf.serving.gateway import serve

    quiet_libraries()
    console = errors()
    ended = serve(
        loaded,
        checkpoint=folder,
        out=out,
        split=split,
        reward=reward.value if reward else None,
        host=host,
        port=port,
        console=console,
        endpoint=endpoint,
        model=model,
        most=most,
    )
    console.print(f"attempts: {ended['attempts']}", highlight=False)
