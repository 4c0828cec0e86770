"""Prints a fleet's status and events, as text that fits the terminal and as JSON."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from controller.deciders.worker import SPARE
from controller.terminal_text import USUAL, columns, escape_controls, fitted, safe_values
from events import codec
from events.fact import Recorded
from events.process.presence import Presence

FIELD_CHARS_MAX = 60  # of one field of an event in text output
WORKERS_SHOWN_MAX = 40  # listed individually
EVENT_HANG = 8  # columns; continuation lines leave the sequence column empty
DAYS_SHOWN_MAX = 1_000


def print_status(status: dict[str, Any]) -> None:
    """Print the current state of the fleet."""
    status = safe_values(status)
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=max(USUAL, columns()))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("worker", "health", "weight", "breaker", "in flight", "model", "last canary"):
        # nothing is truncated: long names wrap
        table.add_column(column, overflow="fold", no_wrap=column not in ("worker", "model", "last canary"))
    for w in _shown(status["workers"]):
        weight = SPARE if w.get("spare") else None if w["weight"] is None else f"{w['weight']:g}"
        cells = (w["id"], w["health"], weight, w["breaker"], w["in_flight"], w["model"])
        table.add_row(*("–" if c is None else str(c) for c in cells), _canary(w.get("last_canary")))
    with console.capture() as written:  # rich would handle a closed pipe itself
        if table.rows:
            console.print(table)
    print("\n".join(line.rstrip() for line in written.get().splitlines()), end="\n" if table.rows else "")
    for line in _lines(status):
        print(fitted(line))


def _shown(workers: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the workers to list individually. In a large fleet these are the first of those that are not fully healthy."""
    if len(workers) <= WORKERS_SHOWN_MAX:
        return workers
    return [w for w in workers if not _well(w)][:WORKERS_SHOWN_MAX]


def _well(worker: dict[str, Any]) -> bool:
    return worker["health"] == "HEALTHY" and set(worker.get("reasons") or ()) <= {SPARE}


def _rest(workers: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a summary of the workers that are not listed individually, per model and health."""
    shown = {id(worker) for worker in _shown(workers)}
    rest = [worker for worker in workers if id(worker) not in shown]
    alike: dict[tuple[str, str, bool, bool], list[dict[str, Any]]] = {}
    for worker in rest:
        alike.setdefault(
            (worker["model"], worker["health"], _well(worker), bool(worker.get("spare"))), []
        ).append(worker)
    for (model, health, well, spare), group in alike.items():
        busy = sum(worker["in_flight"] or 0 for worker in group)
        share = "as spares" if spare else "at full weight" if well else "not at full weight"
        count = f"{len(group)} more" if shown else f"{len(group)}"
        yield f"{count} workers of {model} are {health}, {share}, {busy} in flight; -o json lists all"


def _lines(status: dict[str, Any]) -> Iterator[str]:
    """Yield the lines below the workers: levels, positions, the leader, the processes of this host."""
    yield from _rest(status["workers"])
    for w in _shown(status["workers"]):
        if w.get("spare") and not _well(w):
            others = [reason for reason in w["reasons"] if reason != SPARE]
            yield f"{w['id']} is a spare that is not ready: {'; '.join(others)}"
        elif w.get("reasons") and not w.get("spare"):
            yield f"{w['id']} is not at full weight: {'; '.join(w['reasons'])}"
        if w.get("place"):
            yield f"{w['id']} replaces {w['place']}"
    yield from _spares(status["workers"])
    yield from _awaited(status.get("awaited", ()))
    levels = ", ".join(f"{model} level {level}" for model, level in status["levels"].items())
    position, lag = status["projector"]["position"], status["projector"]["lag"]
    yield f"degradation  {levels or 'no model yet'}"
    yield from _stored(status)
    yield "projector    " + ("no report yet" if position is None else f"at {position}, {lag} behind")
    no_leader = "none: no decisions and no commands until a controller leads"
    yield f"leader       {(status['leader'] or no_leader).removeprefix('controller:')}"
    yield from _console(status["processes"])
    yield "processes"
    for p in status["processes"]:
        yield f"  {p['name']:<11} {p['role']:<11} pid {p['pid']:<8} {p['url']}"


def _console(processes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the URL of the web console. Each frontend serves one, unless it is disabled."""
    consoles = [p["console"] for p in processes if p.get("console")]
    if consoles:
        yield f"console      {consoles[0]}"


def _spares(workers: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the number of ready spares of each model that has spares."""
    for model in sorted({w["model"] for w in workers if w.get("spare")}):
        spares = [w for w in workers if w["model"] == model and w.get("spare")]
        yield f"spares       {sum(map(_well, spares))} of {len(spares)} ready for {model}"


def _awaited(waiting: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the awaited workers, and why they have not joined yet."""
    for one in waiting[:WORKERS_SHOWN_MAX]:
        model = f" with {one['model']}" if one["model"] else ""
        yield f"waiting for {one['id']}{model} since {one['since']}: {one['reason']}"
    if len(waiting) > WORKERS_SHOWN_MAX:
        yield f"waiting for {len(waiting) - WORKERS_SHOWN_MAX} more workers; -o json lists all"


def _stored(status: dict[str, Any]) -> Iterator[str]:
    """Yield the size and growth of the journal, and the size of the spools that wait for it."""
    journal, spool = status["journal"], status.get("spool", {})
    if journal.get("fault"):
        yield f"journal      {journal['fault']}"
    else:
        size = journal.get("bytes")
        dropped = (journal.get("first_seq") or 1) > 1  # it has reached its bounds
        events = f"{journal['last_seq']} events"
        events = f"events {journal['first_seq']} to {journal['last_seq']}" if dropped else events
        yield f"journal      {events}" + (f", {_size(size)}{_growth(journal)}" if size else "")
    if spool:
        yield f"spools       {_size(spool['bytes'])} on this host; at most {_size(spool['bytes_max_each'])} of each process"


def _growth(journal: dict[str, Any]) -> str:
    """Return a text on how fast the journal grows and how long its space will last."""
    most = f" of {_size(journal['bytes_max'])}" if journal["bytes_max"] else ""
    if journal["bytes_a_day"] is None:
        return f"{most}, growth not known yet"
    days = journal["days_left"]
    left = (
        "" if days is None else f", room for {days:g} days" if days < DAYS_SHOWN_MAX else ", room for years"
    )
    if journal["first_seq"] > 1:
        left = ", full"
    return f"{most}, {_size(journal['bytes_a_day'])} a day{left}"


def _size(count: float) -> str:
    """Return a number of bytes in a readable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _canary(last: Any) -> str:
    if not isinstance(last, dict):
        return "–"
    took = last.get("latency_ms")
    outcome = str(last.get("reason") or last.get("outcome", ""))
    return outcome + (f", {took:.0f} ms" if isinstance(took, float) else "")


def print_processes(living: Sequence[Presence], output: str) -> None:
    """Print the processes of this host: the only status that is known without a controller."""
    processes = [{"role": p.role, "name": p.name, "pid": p.pid, "url": p.url} for p in living]
    if output == "json":
        empty: dict[str, Any] = {
            "workers": [],
            "awaited": [],
            "levels": {},
            "journal": {"last_seq": None},
            "spool": {},
            "leader": None,
        }
        print(
            json.dumps(
                {**empty, "projector": {"position": None, "lag": None}, "processes": processes}, indent=1
            )
        )
    else:
        print("No controller answers. Running processes of the fleet on this host:")
        for p in processes:
            print(fitted(f"  {p['name']:<11} {p['role']:<11} pid {p['pid']:<8} {p['url']}"))


def event_line(event: Recorded, output: str) -> str:
    """Return one event as a line: JSON, or text wrapped to the terminal."""
    if output == "json":
        row = {"seq": event.seq, "at": event.at.isoformat(), "kind": event.fact.kind(), "id": event.id}
        row |= {
            "source": event.source,
            "through": event.through,
            "incident": event.correlation,
            "cause": event.causation,
        }
        return json.dumps({**row, "body": codec.to_builtins(event.fact)})
    body = codec.to_builtins(event.fact)
    fields = " ".join(
        f"{k}={escape_controls(_short(v))}" for k, v in body.items() if v not in (None, "", [], {}, ())
    )
    line = f"{event.seq:>7} {event.at:%Y-%m-%dT%H:%M:%S.%f}Z {event.fact.kind():<20} {fields}"
    return fitted(line, hang=EVENT_HANG - (len(line) - len(line.lstrip())))


def _short(value: Any) -> str:
    """Return a value as text, truncated so that an event takes a few lines; `-o json` has all of it."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= FIELD_CHARS_MAX else f"{text[: FIELD_CHARS_MAX - 1]}…"
