"""The demo's live view: workers, load, and the current fault."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, JustifyMethod, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from controller.commands.top_view import COLOURS
from controller.terminal_text import escape_controls


def render(
    status: Mapping[str, Any], lines: list[str], elapsed: float, seconds: float, counts: str
) -> RenderableType:
    """Return one frame of the view."""
    workers = Table(expand=True, box=None, pad_edge=False)
    for name in ("worker", "health", "breaker", "weight", "in flight", "pid"):
        justify: JustifyMethod = "left" if name in ("worker", "health", "breaker") else "right"
        workers.add_column(name, justify=justify, overflow="fold", no_wrap=name != "worker")
    for worker in status.get("workers", ()):
        health = str(worker.get("health"))
        workers.add_row(
            Text(escape_controls(str(worker["id"]))),
            Text(escape_controls(health), style=COLOURS.get(health, "")),
            Text(escape_controls(str(worker.get("breaker", "")))),
            f"{worker.get('weight') or 0:.2f}",
            _number(worker.get("in_flight")),
            _number(worker.get("pid")),
        )
    bar = ProgressBar(total=seconds, completed=min(elapsed, seconds))
    head = Text(f"{elapsed:4.0f} / {seconds:.0f} s   {counts}")
    return Panel(
        Group(head, bar, Text(), workers, Text(), *[Text(escape_controls(line)) for line in lines[-8:]]),
        title="Holdfast demo",
    )


def _number(value: Any) -> str:
    return "–" if value is None else str(value)
