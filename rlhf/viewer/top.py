"""A run in the terminal, live: where it is, success with its interval, loss, KL, speed and time left."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlhf.evaluation.run_data import RunData
from rlhf.evaluation.wording import duration_text, number_text, percent_text
from rlhf.metrics import KLS, ROUNDING
from rlhf.terminal import clean
from rlhf.viewer.run_folder import RunFolder
from rlhf.viewer.run_views import LOSSES, head

#: Seconds between two looks.
LOOK_S = 0.5
_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {"running": "bold blue", "finished": "bold green", "stopped": "bold yellow", "gone": "bold red"}


def watch(run: RunFolder, console: Console, *, once: bool = False) -> None:
    """Show a run until it ends, or once: also where the console is no terminal, on which nothing can be updated."""
    if once or not console.is_terminal:
        console.print(shown(run))
        return
    with Live(shown(run), console=console, auto_refresh=False) as live:
        while run.state() == "running":
            time.sleep(LOOK_S)
            live.update(shown(run), refresh=True)
        live.update(shown(run), refresh=True)


def shown(run: RunFolder) -> Group:
    """Render the present state of a run."""
    data = run.poll()
    told = head(run, data)
    title = Text.assemble((clean(told["id"]), "bold"), "  ", (told["state"], _STYLES[told["state"]]))
    title.append(f"  {clean(told['stage'])}" if told["stage"] else "  not begun")
    table = Table.grid(padding=(0, 3))
    for name, value, curve in _rows(told, data):
        table.add_row(Text(name, "dim"), Text(value, "bold"), Text(curve, "blue"))
    parts: list[Any] = [title, *_bar(told), table]
    if told["waits_for"]:
        parts.append(Text(f"waits for {told['waits_for']}", "dim"))
    for i, finding in enumerate(f for f in run.findings(data) if f.level != "fine"):
        is_problem = finding.level == "problem"
        if is_problem or i < 3:
            parts.append(Text(clean(f"{finding.name}: {finding.value}"), "red" if is_problem else "yellow"))
    parts += [Text(clean(f"{p['file']}: {p['says']}"), "red") for p in told["problems"]]
    return Group(*parts)


def _bar(told: dict[str, Any]) -> list[Any]:
    if not told["n_steps"]:
        return [Text(f"step {told['step']}")]
    left = (
        f", {duration_text(told['left_s'])} left{'' if told['is_last_stage'] else ' of this stage'}"
        if told["left_s"]
        else ""
    )
    words = Text(f" {told['step']} of {told['n_steps']} steps{left}")
    line = Table.grid()
    line.add_row(ProgressBar(total=told["n_steps"], completed=told["step"], width=32), words)
    return [line]


def _rows(told: dict[str, Any], data: RunData) -> list[tuple[str, str, str]]:
    rows = []
    if success := told["success"]:
        within = (
            f" ({percent_text(success['low'])} to {percent_text(success['high'])})"
            if success["low"] is not None
            else ""
        )
        rows.append(("success", percent_text(success["value"]) + within, _curve(data, "rollout/success")))
    for name, choices in (("loss", LOSSES), ("KL", KLS), ("tokens/s", ("rollout/tokens_per_s",))):
        last = data.lines[-1].stage if data.lines else ""
        found = next((c for c in choices if any(curve.stage == last for curve in data.curves(c))), None)
        is_noise = found == KLS[-1] and max(map(abs, data.values(found)), default=0.0) <= ROUNDING
        if found is not None and not is_noise and (values := data.values(found)):
            rows.append((name, number_text(values[-1]), _curve(data, found)))
    rows += [
        (f"on unseen tasks, {clean(e['name'])}", f"{percent_text(e['success'])}", "")
        for e in told["evaluations"][-2:]
        if e["success"] is not None
    ]
    return rows


def _curve(data: RunData, name: str, width: int = 32) -> str:
    """The last values of a metric as a line of blocks."""
    curves = data.curves(name)
    values = [v for v in (curves[-1].values if curves else []) if v is not None][-width:]
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    return "".join(
        _BARS[round((v - low) / (high - low) * (len(_BARS) - 1))] if high > low else _BARS[0] for v in values
    )
