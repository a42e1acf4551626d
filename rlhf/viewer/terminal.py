"""Trajectories in the terminal: a table of many, and one turn by turn or token by token.

Text of models and environments is printed as it is: markup in it has no effect and control characters are made visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlhf.data import Outcome, Turn
from rlhf.data.generation import calls_of
from rlhf.terminal import clean

if TYPE_CHECKING:
    from rlhf.evaluation.rows import FailureRecord, TrajectoryRecord

#: More cells than any table has.
_ENDLESS = 100_000
#: Cells that a message has at least.
_MESSAGE = 20
#: Cells that an evaluation has at least, unless its name and its figures have fewer.
_VALUE = 12
_OUTCOME_STYLES = {Outcome.SOLVED: "bold green", Outcome.FAILED: "yellow", Outcome.TURN_LIMIT: "yellow"}
#: Token ids to the text that each of them adds.
Pieces = Callable[[Sequence[int]], Sequence[str]]


class TrajectoryTable:
    """Trajectories, one a row, numbered from 0 in the order given.

    Ids of tasks are for copying and stay whole: where there is no room for them, they follow the table by its numbers.
    Print it with `crop=False`, for an id that is longer than a line.
    """

    def __init__(self, records: Iterable[TrajectoryRecord]) -> None:
        self._records = list(records)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, and the ids where they need lines of their own."""
        whole = _trajectories(self._records, with_tasks=True)
        if Measurement.get(console, options.update(max_width=_ENDLESS), whole).maximum <= options.max_width:
            yield whole
            return
        yield _trajectories(self._records, with_tasks=False)
        yield Text("# task", "bold")
        for i, record in enumerate(self._records):
            line = Text(f"{i} ", no_wrap=True, overflow="ignore")
            yield line.append_text(_plain(record.task_id))


def _trajectories(records: Iterable[TrajectoryRecord], *, with_tasks: bool) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("#", "step", "score", "turns", "tokens", "invalid", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("outcome", "made to", *["task"] * with_tasks):
        table.add_column(name, overflow="fold")
    for i, record in enumerate(records):
        t = record.trajectory
        n_invalid = sum(not turn.valid for turn in t.turns)
        table.add_row(
            str(i),
            str(record.step),
            f"{record.score.total:+.3g}" if record.score is not None else "",
            str(len(t.turns)),
            str(t.n_tokens),
            str(n_invalid) if n_invalid else "",
            f"{t.duration_s:.1f}",
            Text(str(t.outcome) + ", demonstrated" * t.is_demonstration, style=_outcome_style(t.outcome)),
            _plain(f"{record.phase} ({record.stage})"),
            *[_plain(record.task_id)] * with_tasks,
        )
    return table


def failure_table(failures: Iterable[FailureRecord], width: int) -> Table:
    """List attempts that ended with an infrastructure error, one a row.

    The table has `width` cells, or more where a message would have no room beside the rest, which stays whole; print
    it with `crop=False`.
    """
    rows = [(str(f.step), str(f.failure.outcome), f.task_id, f.failure.message) for f in failures]
    table = Table("step", "outcome", "task", header_style="bold", box=None, pad_edge=False)
    table.add_column("message", overflow="fold", min_width=_MESSAGE)
    for row in rows:
        table.add_row(*(_plain(text, "bold red" if i == 1 else "") for i, text in enumerate(row)))
    return _kept_whole(table, 3, width)


def flip_table(flips: Iterable[tuple[str, str, str]], names: tuple[str, str], width: int) -> Table:
    """List tasks with what two evaluations came to in them, one a row.

    The table has `width` cells, or more where those of the tasks leave no room for the rest; print it with
    `crop=False`.

    Args:
        flips: task, and the text of either evaluation.
        names: of the evaluations.
        width: in cells.
    """
    rows = list(flips)
    table = Table("task", box=None, pad_edge=False)
    for i, name in enumerate(names, 1):
        longest = max((_plain(row[i]).cell_len for row in rows), default=0)
        least = max(min(_plain(name).cell_len, _VALUE), longest)
        table.add_column(_plain(name), justify="right", overflow="fold", min_width=least)
    for row in rows:
        table.add_row(*map(_plain, row))
    return _kept_whole(table, 1, width)


def whole_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> tuple[Table, int]:
    """A table none of whose cells is folded, the first column a name and the others figures; and its width in cells.

    Print it with `crop=False`.
    """
    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*map(_plain, row))
    _kept_whole(table, len(columns), 0)
    return table, table.width or 0


def _kept_whole(table: Table, n_whole: int, width: int) -> Table:
    """Never fold the first columns; give the table more than `width` cells where the rest would have too few."""
    for column in table.columns[:n_whole]:
        column.no_wrap = True
    endless = Console(width=_ENDLESS)
    least = 2 * (len(table.columns) - 1)
    for i, column in enumerate(table.columns):
        cells = [column.header, *column.cells]
        whole = max(Measurement.get(endless, endless.options, cell).maximum for cell in cells)
        least += whole if i < n_whole else column.min_width or 0
    table.width = least if least > width else None
    return table


def show_trajectory(
    record: TrajectoryRecord, console: Console, tokens: bool = False, pieces: Pieces | None = None
) -> None:
    """Print one trajectory.

    Args:
        record: what to show.
        console: where to.
        tokens: list every sampled token with its id, log-prob (nats) and advantage.
        pieces: gives the text of each token; ids are shown without it.
    """
    t = record.trajectory
    title = _plain(record.task_id, "bold")
    title.append_text(_plain(f"  {record.stage}, {record.phase}, step {record.step}, attempt {t.attempt}", "dim"))
    title.append(f" {'─' * (console.width - title.cell_len - 1)}", "dim")
    console.print(title, soft_wrap=True)
    for said in _origin(record):
        console.print(_plain(said, "dim"))
    console.print(_plain(t.opening, "dim"))
    first = 0
    for k, turn in enumerate(t.turns):
        rows = record.advantages[first : first + len(turn.generations)] if record.advantages is not None else None
        first += len(turn.generations)
        reward = record.score.turns[k] if record.score is not None else turn.reward
        line = _action_line(k, turn, reward, rows)
        line.append("  given" if k < t.n_given else "  shared" if k < t.n_shared else "", "dim")
        if roles := _roles(turn):
            line.append_text(_plain(f"  asked for {roles}", "dim"))
        console.print(line)
        for name, note in turn.action.notes.items():
            console.print(Padding(_plain(f"{name}: {note}", "magenta"), (0, 0, 0, 4)))
        if tokens:
            for table in _token_tables(turn, rows, pieces):
                console.print(Padding(table, (0, 0, 0, 4)))
        console.print(_plain(turn.reply, "dim"))
    console.print(_end_line(record))


def _origin(record: TrajectoryRecord) -> Iterator[str]:
    """Say where the attempt comes from, where it was not simply made from the start."""
    t, spent = record.trajectory, record.spent
    if t.parent is not None:
        n = t.n_shared - t.n_given
        yield f"branches off attempt {t.parent} after {n} turns" if n else f"differs from attempt {t.parent}"
    if spent is not None:
        of = f"chosen from {spent.n_candidates} candidates, {spent.n_solved} of them solved: candidate {spent.chosen}"
        took = f"they took {spent.n_tokens} tokens and read {spent.n_prompt_tokens}"
        yield f"{of}, {spent.why}; {took}" if spent.why else f"{of}; {took}"


def _roles(turn: Turn) -> str:
    """Return the roles of the generations of a turn, in order; empty where all are actions."""
    calls = [call[0] for call in calls_of(turn.generations)]
    told = [(g.role or "an action") + (f" by {g.opponent}" if g.opponent else "") for g in calls]
    return ", ".join(told) if any(g.role or g.opponent for g in calls) else ""


def _action_line(k: int, turn: Turn, reward: float, rows: Sequence[Sequence[float]] | None) -> Text:
    line = Text()
    line.append(f"{k + 1:>3} > ", "bold cyan")
    line.append_text(_plain(turn.action.text or turn.action.reply_text or "(nothing)", "bold"))
    if reward:
        line.append(f"  reward {reward:+.3g}", "green" if reward > 0 else "red")
    if not turn.valid:
        line.append_text(_plain(f"  invalid: {turn.action.error or 'not understood'}", "red"))
    if advantages := [a for row in rows or () for a in row]:
        mean = sum(advantages) / len(advantages)
        line.append(f"  advantage {mean:+.3g}", "blue" if mean > 0 else "red" if mean < 0 else "dim")
    return line


def _token_tables(turn: Turn, rows: Sequence[Sequence[float]] | None, pieces: Pieces | None) -> Iterator[Table]:
    for j, generation in enumerate(turn.generations):
        table = Table(header_style="dim", box=None, pad_edge=False)
        table.add_column(f"token ({_plain(generation.role).plain})" if generation.role else "token")
        for name in ("id", "log-prob", "advantage"):
            table.add_column(name, justify="right")
        texts = pieces(generation.token_ids) if pieces is not None else [""] * generation.n_tokens
        for i, token_id in enumerate(generation.token_ids):
            advantage = rows[j][i] if rows is not None else None
            table.add_row(
                _plain(texts[i].replace("\n", "↵"), _shade(advantage)),
                str(token_id),
                f"{generation.logprobs[i]:.3f}",
                f"{advantage:+.3g}" if advantage is not None else "",
            )
        yield table


def _end_line(record: TrajectoryRecord) -> Text:
    t = record.trajectory
    line = Text(str(t.outcome), _outcome_style(t.outcome))
    if t.detail:
        line.append_text(_plain(f": {t.detail}", "red"))
    if record.score is not None:
        parts = ", ".join(f"{name} {verdict.value:.3g}" for name, verdict in record.score.parts.items())
        line.append_text(_plain(f"  score {record.score.total:+.3g}" + (f" ({parts})" if parts else ""), "not bold"))
        for name, verdict in record.score.monitored.items():
            line.append_text(_plain(f"  monitored {name} {verdict.value:.3g}", "not bold"))
    line.append(f"  {t.n_tokens} tokens, {t.duration_s:.1f} s", "dim not bold")
    return line


def _shade(advantage: float | None) -> str:
    if not advantage:
        return ""
    return "blue" if advantage > 0 else "red"


def _outcome_style(outcome: Outcome) -> str:
    return "bold red" if outcome.is_infrastructure_error else _OUTCOME_STYLES.get(outcome, "yellow")


def _plain(text: str, style: str = "") -> Text:
    return Text(clean(text), style=style)
