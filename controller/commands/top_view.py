"""The view of `holdfast top`: workers, load and latest events, fitted to the terminal's size."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from controller.deciders.worker import SPARE
from controller.replay.recent import URGENCY, RecentEvents
from controller.terminal_text import escape_controls, safe_values

HEAD_LINES, EVENT_LINES_LEAST = 5, 5
COLOURS = {
    "HEALTHY": "green",
    "SUSPICIOUS": "yellow",
    "UNHEALTHY": "red",
    "DRAINING": "blue",
    "DEAD": "bright_black",
}


@dataclass(slots=True)
class FleetSeen(RecentEvents):
    """The status and events known so far."""

    status: Mapping[str, Any] | None = None
    fault: str = ""  # why the status is missing or outdated


def picture(seen: FleetSeen, lines: int) -> RenderableType:
    """Return one screen of at most `lines` lines."""
    seen = replace(seen, status=seen.status and safe_values(seen.status), fault=escape_controls(seen.fault))
    status = seen.status or {}
    workers = sorted(status.get("workers", ()), key=_urgency)
    room = max(1, lines - HEAD_LINES - 2 - EVENT_LINES_LEAST)
    shown = workers[:room]
    rest = len(workers) - len(shown)
    used = HEAD_LINES + 1 + len(shown) + (1 if rest else 0)
    latest = [*seen.told][-max(1, lines - used - 1) :]
    parts: list[RenderableType] = [*_head(seen, workers), _table(shown)]
    if rest:
        parts.append(Text(f"{rest} more workers", style="dim"))
    parts.append(Text())
    parts += [_line(one.line()) for one in latest]
    return Group(*parts)


def _urgency(worker: Mapping[str, Any]) -> tuple[int, bool, str]:
    health = str(worker.get("health"))
    place = URGENCY.index(health) if health in URGENCY else len(URGENCY)
    return place, not _why(worker), str(worker.get("id"))


def _why(worker: Mapping[str, Any]) -> str:
    return "; ".join(reason for reason in worker.get("reasons") or () if reason != SPARE)


def _head(seen: FleetSeen, workers: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    if seen.fault:
        yield _line(seen.fault, style="bold red")
    elif seen.status is None:
        yield _line("waiting for the fleet", style="dim")
    else:
        yield Text.assemble(("Holdfast  ", "bold"), *_counts(workers), overflow="ellipsis", no_wrap=True)
    serving = [worker for worker in workers if not worker.get("spare")]
    share = sum(worker.get("weight") or 0.0 for worker in serving)
    busy = sum(worker.get("in_flight") or 0 for worker in workers)
    spares = sum(bool(worker.get("spare")) for worker in workers)
    extra = f", {spares} spare{'' if spares == 1 else 's'}" if spares else ""
    yield _line(f"serving with {share:.3g} of {len(serving)}{extra}   {busy} in flight")
    unknown = f"   {seen.unknown} events of unknown kinds skipped" if seen.unknown else ""
    yield _line(seen.rates() + unknown)
    yield _line(_positions(seen.status) if seen.status is not None else "")
    yield Text()


def _counts(workers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for health in URGENCY[-1:] + URGENCY[:-1]:
        if count := sum(worker.get("health") == health for worker in workers):
            yield f"{count} {health}  ", COLOURS[health]


def _positions(status: Mapping[str, Any]) -> str:
    levels = [f"{model} level {level}" for model, level in status.get("levels", {}).items() if level]
    leader = (status.get("leader") or "none").removeprefix("controller:").partition(":")[0]
    journal, lag = status.get("journal", {}), status.get("projector", {}).get("lag")
    parts = [f"leader {leader}", f"{journal.get('last_seq') or 0:,} events"]
    parts += [] if lag is None else [f"store {lag} behind"]
    return "   ".join([*parts, *(levels or ["no degradation"])])


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, overflow="ellipsis", no_wrap=True)


def _table(workers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(expand=True, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("worker", "health", "weight", "breaker", "in flight", "why"):
        justify: JustifyMethod = "right" if name in ("weight", "in flight") else "left"
        table.add_column(
            name, justify=justify, overflow="ellipsis", no_wrap=True, ratio=1 if name == "why" else None
        )
    for worker in workers:
        health = str(worker.get("health"))
        weight = SPARE if worker.get("spare") else f"{worker.get('weight') or 0:.3g}"
        cells = (str(worker.get("breaker") or "–"), str(worker.get("in_flight") or 0), _why(worker))
        row = [Text(str(worker.get("id"))), Text(health, style=COLOURS.get(health, "")), Text(weight)]
        table.add_row(*row, *map(Text, cells))  # Text, so that names and reasons are not parsed as markup
    return table
