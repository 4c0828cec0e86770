"""How a fleet's status and its events look to people, within the columns that there are, and as JSON."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from controller.columns import USUAL, columns, fitted
from controller.deciders.worker import SPARE
from controller.terminal_text import safe, safe_values
from events import codec
from events.fact import Recorded
from events.process.presence import Presence

FIELD_CHARS_MAX = 60  # of one field of an event, in text
WORKERS_SHOWN_MAX = 40  # one by one
EVENT_HANG = 8  # columns: below an event's sequence stands nothing
DAYS_TOLD_MAX = 1_000


def print_status(status: dict[str, Any]) -> None:
    """Print the fleet as it is."""
    status = safe_values(status)
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=max(USUAL, columns()))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("worker", "health", "weight", "breaker", "in flight", "model", "last canary"):
        # nothing is cut: what somebody has named at length goes on below
        table.add_column(column, overflow="fold", no_wrap=column not in ("worker", "model", "last canary"))
    for w in _shown(status["workers"]):
        weight = SPARE if w.get("spare") else None if w["weight"] is None else f"{w['weight']:g}"
        cells = (w["id"], w["health"], weight, w["breaker"], w["in_flight"], w["model"])
        table.add_row(*("–" if c is None else str(c) for c in cells), _canary(w.get("last_canary")))
    with console.capture() as written:  # the console would take a closed pipe for its own business
        if table.rows:
            console.print(table)
    print("\n".join(line.rstrip() for line in written.get().splitlines()), end="\n" if table.rows else "")
    for line in _lines(status):
        print(fitted(line))


def _shown(workers: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the workers to show one by one: of a large fleet, those that are not simply well, and not all of them either."""
    if len(workers) <= WORKERS_SHOWN_MAX:
        return workers
    return [w for w in workers if not _well(w)][:WORKERS_SHOWN_MAX]


def _well(worker: dict[str, Any]) -> bool:
    return worker["health"] == "HEALTHY" and set(worker.get("reasons") or ()) <= {SPARE}


def _rest(workers: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what those that are not shown one by one have in common."""
    shown = {id(worker) for worker in _shown(workers)}
    rest = [worker for worker in workers if id(worker) not in shown]
    alike: dict[tuple[str, str, bool, bool], list[dict[str, Any]]] = {}
    for worker in rest:
        alike.setdefault(
            (worker["model"], worker["health"], _well(worker), bool(worker.get("spare"))), []
        ).append(worker)
    for (model, health, well, spare), group in alike.items():
        busy = sum(worker["in_flight"] or 0 for worker in group)
        share = "as spares" if spare else "with their full share" if well else "not with their full share"
        count = f"{len(group)} more" if shown else f"{len(group)}"
        yield f"{count} workers of {model} are {health}, {share}, {busy} in flight; -o json has each"


def _lines(status: dict[str, Any]) -> Iterator[str]:
    """Yield what stands below the workers: levels, positions, the leader, the processes of this host."""
    yield from _rest(status["workers"])
    for w in _shown(status["workers"]):
        if w.get("spare") and not _well(w):
            others = [reason for reason in w["reasons"] if reason != SPARE]
            yield f"{w['id']} is a spare that could take no place: {'; '.join(others)}"
        elif w.get("reasons") and not w.get("spare"):
            yield f"{w['id']} has not its full share: {'; '.join(w['reasons'])}"
        if w.get("place"):
            yield f"{w['id']} serves in the place of {w['place']}"
    yield from _spares(status["workers"])
    yield from _awaited(status.get("awaited", ()))
    levels = ", ".join(f"{model} level {level}" for model, level in status["levels"].items())
    position, lag = status["projector"]["position"], status["projector"]["lag"]
    yield f"degradation  {levels or 'no model yet'}"
    yield from _stored(status)
    yield "projector    " + ("not heard of yet" if position is None else f"at {position}, {lag} behind")
    nobody = "nobody: nothing is decided or carried out until one leads"
    yield f"leader       {(status['leader'] or nobody).removeprefix('controller:')}"
    yield from _console(status["processes"])
    yield "processes"
    for p in status["processes"]:
        yield f"  {p['name']:<11} {p['role']:<11} pid {p['pid']:<8} {p['url']}"


def _console(processes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield where a browser shows all this: each frontend does, unless it is told not to."""
    consoles = [p["console"] for p in processes if p.get("console")]
    if consoles:
        yield f"console      {consoles[0]}"


def _spares(workers: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield how many spares are ready, by model, where there are any."""
    for model in sorted({w["model"] for w in workers if w.get("spare")}):
        spares = [w for w in workers if w["model"] == model and w.get("spare")]
        yield f"spares       {sum(map(_well, spares))} of {len(spares)} ready for {model}"


def _awaited(waiting: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield who is awaited, and why they are not there yet."""
    for one in waiting[:WORKERS_SHOWN_MAX]:
        model = f" with {one['model']}" if one["model"] else ""
        yield f"{one['id']} is awaited{model}, since {one['since']}: {one['reason']}"
    if len(waiting) > WORKERS_SHOWN_MAX:
        yield f"{len(waiting) - WORKERS_SHOWN_MAX} more are awaited; -o json has each"


def _stored(status: dict[str, Any]) -> Iterator[str]:
    """Yield what the journal holds and takes, and what waits for it."""
    journal, spool = status["journal"], status.get("spool", {})
    if journal.get("fault"):
        yield f"journal      {journal['fault']}"
    else:
        size = journal.get("bytes")
        dropped = (journal.get("first_seq") or 1) > 1  # at its bounds
        said = f"{journal['last_seq']} events"
        said = f"events {journal['first_seq']} to {journal['last_seq']}" if dropped else said
        yield f"journal      {said}" + (f", {_size(size)}{_growth(journal)}" if size else "")
    if spool:
        yield f"spools       {_size(spool['bytes'])} on this host; at most {_size(spool['bytes_max_each'])} of each process"


def _growth(journal: dict[str, Any]) -> str:
    """Return how fast it grows and how long there is room."""
    most = f" of {_size(journal['bytes_max'])}" if journal["bytes_max"] else ""
    if journal["bytes_a_day"] is None:
        return f"{most}, too young to say how fast it grows"
    days = journal["days_left"]
    left = "" if days is None else f", room for {days:g} days" if days < DAYS_TOLD_MAX else ", room for years"
    if journal["first_seq"] > 1:
        left = ", full"
    return f"{most}, {_size(journal['bytes_a_day'])} a day{left}"


def _size(count: float) -> str:
    """Return a number of bytes for a person."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _canary(last: Any) -> str:
    if not isinstance(last, dict):
        return "–"
    took = last.get("latency_ms")
    said = str(last.get("reason") or last.get("outcome", ""))
    return said + (f", {took:.0f} ms" if isinstance(took, float) else "")


def print_processes(living: Sequence[Presence], output: str) -> None:
    """Show what is known without a controller: the processes of this host."""
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
        print("The controller does not answer; these processes of the fleet live:")
        for p in processes:
            print(fitted(f"  {p['name']:<11} {p['role']:<11} pid {p['pid']:<8} {p['url']}"))


def event_line(event: Recorded, output: str) -> str:
    """Write one event: as JSON on one line, as text within the columns that there are."""
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
    fields = " ".join(f"{k}={safe(_short(v))}" for k, v in body.items() if v not in (None, "", [], {}, ()))
    line = f"{event.seq:>7} {event.at:%Y-%m-%dT%H:%M:%S.%f}Z {event.fact.kind():<20} {fields}"
    return fitted(line, hang=EVENT_HANG - (len(line) - len(line.lstrip())))


def _short(value: Any) -> str:
    """Write a value so that an event stays a few lines; `-o json` has it whole."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= FIELD_CHARS_MAX else f"{text[: FIELD_CHARS_MAX - 1]}…"
