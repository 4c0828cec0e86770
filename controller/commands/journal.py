"""`holdfast journal inspect | quarantine`: what lies on the journal and is no event, and what shall not count as one.

Both read the stream itself, so they work when whoever folds it has stopped.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from controller.adapters.clock import SystemClock
from controller.processes.operator_client import find, who
from controller.replay import moment
from controller.runtime.history import patient
from events.errors import HoldfastError, UsageError
from events.fact import Decision, Recorded, Skipped
from events.journal.nats import NatsJournal
from events.journal.port import Journal, JournalUnavailable
from events.observations import EventQuarantined

FINDING = 3
REACH_S = 3.0
WRITE_S = 5.0
SINCE = (
    "a sequence, an instant (2026-03-01T12:00:03Z), a time of day in UTC (12:00:03), or how long ago (10m)"
)
Run = Callable[[argparse.Namespace], int]
Say = Callable[[str], None]


class NotToQuarantine(HoldfastError):
    """Only what stops this version, or is skipped by it, can be quarantined: anything else has been folded, and would have
    happened and not have happened."""


def prepare(parser: argparse.ArgumentParser, of: type[argparse.ArgumentParser]) -> Run:
    """Add the commands and their flags, and return what runs them."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=of)
    text = "list what on the journal is no event of Holdfast, and where an unknown one stops it (exit 3)"
    command = commands.add_parser("inspect", help=text, description=text, allow_abbrev=False)
    command.add_argument("--since", metavar="WHEN", help=f"only from there on: {SINCE}")
    command.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="how to print (default: text)"
    )
    command.set_defaults(journal="inspect")
    text = "decide that an event which no version of yours knows does not count: everybody steps over it, for ever"
    command = commands.add_parser("quarantine", help=text, description=text, allow_abbrev=False)
    command.add_argument("seq", metavar="SEQ", type=_sequence, help="its sequence, as `inspect` shows it")
    command.add_argument("--why", metavar="TEXT", required=True, help="the reason, for the journal")
    command.set_defaults(journal="quarantine")
    for command in commands.choices.values():  # --data is understood before and after the command
        command.add_argument("--data", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return lambda args: asyncio.run(_run(args))


def _sequence(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no sequence (1, 2 …)")
    return int(text)


async def _run(args: argparse.Namespace) -> int:
    async with _connected(args.data) as journal:
        if args.journal == "inspect":
            first = (await journal.stream_state()).first_seq
            return await inspect(journal, args.since, first, args.output)
        return await quarantine(journal, args.seq, args.why)


@asynccontextmanager
async def _connected(data: Path) -> AsyncIterator[NatsJournal]:
    journal = await NatsJournal.connect(
        find(data)["nats_url"], "operator:journal", wait_s=REACH_S, make=False
    )
    try:
        yield journal
    finally:
        await journal.close()


async def inspect(journal: Journal, since: str | None, first: int, output: str, say: Say = print) -> int:
    """Say what is skipped and what stops, and return the exit code. `first` is the first sequence that is there. Raise
    UsageError."""
    when = moment.parse(since, SystemClock().now()) if since else 0
    after, last = max(0, first - 1), await journal.last_seq()
    if isinstance(when, int) and when > last:
        raise UsageError(f"the journal ends at {last}, not {when}")
    after = max(after, when - 1) if isinstance(when, int) else after
    read, found = 0, list[Recorded]()
    async for batch in patient(journal.inspect(after, until=last), after, last):
        wanted = [event for event in batch if isinstance(when, int) or event.at >= when]
        read += len(wanted)
        found += [event for event in wanted if isinstance(event.fact, Skipped)]
    stops = [event for event in found if isinstance(event.fact, Skipped) and event.fact.unknown]
    if output == "json":
        told = [_as_json(event) for event in found]
        say(
            json.dumps(
                {"read": read, "stops_at": stops[0].seq if stops else None, "messages": told}, indent=1
            )
        )
    else:
        for line in _lines(read, found, stops):
            say(line)
    return FINDING if stops else 0


def _state(fact: Skipped) -> str:
    return "stops" if fact.unknown else "quarantined" if fact.quarantined else "skipped"


def _as_json(event: Recorded) -> dict[str, Any]:
    fact = event.fact
    assert isinstance(fact, Skipped)
    return {
        "seq": event.seq,
        "at": event.at.isoformat(),
        "subject": fact.subject,
        "bytes": fact.bytes,
        "state": _state(fact),
        "why": fact.why,
    }


def _lines(read: int, found: list[Recorded], stops: list[Recorded]) -> list[str]:
    said = []
    for event in found:
        one = _as_json(event)
        said.append(
            f"{event.seq:>7} {event.at:%Y-%m-%dT%H:%M:%S.%f}Z {one['state']:<11} "
            f"{_printable(one['subject'])}, {one['bytes']} bytes: {_printable(one['why'])}"
        )
    over = len(found) - len(stops)
    said.append(f"read {read}: {_counted(over) if found else 'all of them are events'}")
    if stops:
        seq = stops[0].seq
        said.append(
            f"nobody of this version reads beyond {seq}. If a newer Holdfast wrote it, upgrade this one; if not: "
            f"holdfast journal quarantine {seq} --why TEXT"
        )
    return said


def _counted(over: int) -> str:
    return f"{over} {'is' if over == 1 else 'are'} stepped over by everybody"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


async def quarantine(journal: Journal, seq: int, why: str, say: Say = print) -> int:
    """Write down that an event does not count. Raise NotToQuarantine, UsageError, or JournalUnavailable if it is not written."""
    last = await journal.last_seq()
    if seq > last:
        raise UsageError(f"the journal ends at {last}: there is no event {seq}")
    (event,) = [
        e async for batch in patient(journal.inspect(seq - 1, until=seq), seq - 1, seq) for e in batch
    ]
    if not isinstance(event.fact, Skipped):
        raise NotToQuarantine(f"event {seq} is a {event.fact.kind()}. {NotToQuarantine.__doc__}")
    if event.fact.quarantined:
        say(f"event {seq} is quarantined already: {event.fact.why}")
        return 0
    if event.fact.unknown:
        await _refuse_if_decided_on(journal, seq, last)
    journal.observe(EventQuarantined(event=seq, why=why, by=who()))
    if not await journal.flush(WRITE_S):
        raise JournalUnavailable(
            f"event {seq} is not quarantined: the journal did not take it in {WRITE_S:g} s"
        )
    say(f"event {seq} is quarantined: everybody steps over it")
    return 0


async def _refuse_if_decided_on(journal: Journal, seq: int, last: int) -> None:
    """Refuse where a controller has read on: a newer version, which knew the event."""
    async for batch in patient(journal.inspect(seq, until=last), seq, last):
        for event in batch:
            if isinstance(event.fact, Decision) and event.through >= seq:
                raise NotToQuarantine(
                    f"decision {event.fact.number}, at {event.seq}, was made by a controller that had read event {seq}: "
                    f"a newer Holdfast knows it, upgrade this one. {NotToQuarantine.__doc__}"
                )
