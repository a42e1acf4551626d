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


Endpoint = Annotated[
    str, typer.Option(metavar="URL", help="An OpenAI-compatible server, asked in the place of the policy.")
]


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
    endpoint: Endpoint = "",
    model: Annotated[str, typer.Option(help="The model's name on that server.")] = "",
    most: Annotated[int | None, typer.Option("--n", "-n", min=1, help="Stop after so many attempts.")] = None,
) -> None:
    """Serve a policy to agents elsewhere, each attempt at an address of its own, and store trajectories.

    Solved attempts are kept as chats too, for a supervised stage: data: {path: gateway/chats.jsonl}

    Examples: rlhf gateway runs/quickstart-seed0 --reward world; rlhf gateway RECIPE --endpoint URL --model NAME -n 500
    """
    from rlhf.commands.evaluate import recipe_and_checkpoint, refuse_ignored
    from rlhf.errors import RecipeError
    from rlhf.recipe import load

    named, folder = recipe_and_checkpoint(recipe, checkpoint)
    loaded = load(named, overrides or [])
    refuse_ignored(
        overrides or [],
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
        reward=reward.value,
        host=host,
        port=port,
        console=console,
        endpoint=endpoint,
        model=model,
        most=most,
    )
    console.print(f"attempts: {ended['attempts']}", highlight=False)
