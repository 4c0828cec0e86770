"""`holdfast journal`: lists the messages that readers skip or stop at, or quarantines an event.

A process that folds the journal stops at an event that only a newer release knows, and at a decision with an unexpected number.
Both subcommands read the stream without folding it, and therefore also work when every process has stopped. They read from the
start of the stream, because the expected number of a decision follows from the decisions before it.
"""

import argparse
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from controller.adapters.clock import SystemClock
from controller.processes.operator_client import closing, find, operator_name
from controller.replay import moment_parser
from controller.runtime.bounded_read import patient
from events import codec, subjects
from events.decisions import PolicyAdopted
from events.errors import QUARANTINE, HoldfastError, UsageError
from events.fact import Decision, Recorded, Skipped
from events.journal.nats import NatsJournal
from events.journal.port import Journal, JournalUnavailable
from events.observations import EventQuarantined
from events.order import DecisionNumbering
from events.versions import Known

FINDING = 3
REACH_S = 3.0
WRITE_S = 5.0
Print = Callable[[str], None]
State = Literal["stops", "quarantined", "skipped"]


class NotToQuarantine(HoldfastError):
    """Only an event that stops this version, or that it skips, can be quarantined. Any other event has been folded already, so
    quarantining it would contradict what its readers did."""


@dataclass(frozen=True, slots=True)
class Place:
    """A message on the journal that readers skip or at which they stop, and the reason."""

    seq: int
    at: datetime
    subject: str
    bytes: int
    state: State
    why: str
    newer: bool = False  # whether a newer release may know and fold the message


async def run(args: argparse.Namespace) -> int:
    """Run the subcommand `inspect` or `quarantine`, and return its exit code. Raise HoldfastError if the subcommand fails."""
    url, known = find(args.data)["nats_url"], Known.ours()
    opening = NatsJournal.connect(url, "operator:journal", wait_s=REACH_S, make=False, known=known)
    async with closing(opening) as journal:
        first = (await journal.stream_state()).first_seq
        if args.journal == "inspect":
            return await inspect(journal, args.since, first, args.output)
        return await quarantine(journal, args.seq, first, args.why)


async def inspect(journal: Journal, since: str | None, first: int, output: str, say: Print = print) -> int:
    """Print the messages that readers skip or stop at. Return the exit code, which is 3 if readers stop at an event.

    `since` is the sequence number or the time from which messages are printed; None prints all. `first` is the first sequence
    number of the stream. Raise BadMoment or UsageError if `since` is invalid or after the end of the journal."""
    when = moment_parser.parse(since, SystemClock().now()) if since else 0
    last, turns = await journal.last_seq(), _turns(first)
    if isinstance(when, int) and when > last:
        raise UsageError(f"sequence {when} does not exist: the journal ends at {last}")
    read, found = 0, list[Place]()
    async for event in _events(journal, first - 1, last):
        place = _place(event, turns)
        if event.seq >= when if isinstance(when, int) else event.at >= when:
            read += 1
            found += [place] if place else []
    stops = [place for place in found if place.state == "stops"]
    if output == "json":
        fields = ("seq", "at", "subject", "bytes", "state", "why")
        messages = [{name: getattr(place, name) for name in fields} for place in found]
        answer = {"read": read, "stops_at": stops[0].seq if stops else None, "messages": messages}
        say(json.dumps(answer, indent=1, default=datetime.isoformat))
    else:
        for line in _lines(read, found, stops):
            say(line)
    return FINDING if stops else 0


def _turns(first: int) -> DecisionNumbering:
    return DecisionNumbering(0 if first <= 1 else None)


async def _events(journal: Journal, after: int, until: int) -> AsyncIterator[Recorded]:
    after = max(0, after)
    async for batch in patient(journal.inspect(after, until=until), after, until):
        for event in batch:
            yield event


def _place(event: Recorded, turns: DecisionNumbering) -> Place | None:
    """Describe an event that readers skip or at which they stop. Return None for an event that all readers apply."""
    fact, expected = event.fact, turns.expected(event)
    if isinstance(fact, Skipped):
        state: State = "stops" if fact.unknown else "quarantined" if fact.quarantined else "skipped"
        return Place(event.seq, event.at, fact.subject, fact.bytes, state, fact.why, fact.unknown)
    if expected is None or not isinstance(fact, Decision):
        return None
    why = f"decision {fact.number}, out of turn: expected {expected}"
    return Place(event.seq, event.at, subjects.subject(fact), len(codec.encode_body(fact)), "stops", why)


def _lines(read: int, found: list[Place], stops: list[Place]) -> list[str]:
    output = [
        f"{p.seq:>7} {p.at:%Y-%m-%dT%H:%M:%S.%f}Z {p.state:<11} {_printable(p.subject)}, {p.bytes} bytes: {_printable(p.why)}"
        for p in found
    ]
    over = len(found) - len(stops)
    skipped = f"{over} {'is' if over == 1 else 'are'} skipped by all readers"
    output.append(f"read {read}: {skipped if found else 'all are events'}")
    if stops:
        first = stops[0]
        command = f"{QUARANTINE} {first.seq} --why TEXT"
        output.append(
            f"readers of this version stop at {first.seq}. If a newer Holdfast wrote it, upgrade this one; otherwise: {command}"
            if first.newer
            else f"all readers stop at {first.seq}. If the journal was neither truncated nor recreated: {command}"
        )
    return output


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


async def quarantine(journal: Journal, seq: int, first: int, why: str, say: Print = print) -> int:
    """Record on the journal that all readers must skip the event `seq`, and return exit code 0.

    `first` is the first sequence number of the stream. Raise UsageError if the event does not exist, NotToQuarantine if it
    must not be skipped, or JournalUnavailable if the quarantine could not be recorded."""
    last = await journal.last_seq()
    if seq > last:
        raise UsageError(f"event {seq} does not exist: the journal ends at {last}")
    (event,) = [e async for e in _events(journal, seq - 1, seq)]
    if isinstance(event.fact, Skipped):
        if event.fact.quarantined:
            say(f"event {seq} is already quarantined: {event.fact.why}")
            return 0
        if event.fact.unknown:
            await _refuse_if_decided_on(journal, event, first, last)
    else:
        await _refuse_if_folded(journal, event, first)
    journal.observe(EventQuarantined(event=seq, why=why, by=operator_name()))
    if not await journal.flush(WRITE_S):
        raise JournalUnavailable(
            f"event {seq} is not quarantined: the journal did not acknowledge the write within {WRITE_S:g} s"
        )
    if journal.counters.withheld:
        raise JournalUnavailable(
            f"event {seq} is not quarantined: the kind event_quarantined is not in force, because a process of an older "
            "release is running and would stop at it. `holdfast fleet versions` shows which; upgrade or stop it, or run "
            "`holdfast fleet allow`."
        )
    say(f"event {seq} is quarantined: all readers skip it")
    return 0


async def _refuse_if_folded(journal: Journal, event: Recorded, first: int) -> None:
    """Raise NotToQuarantine if readers apply an event to the fleet state.

    Readers apply every known event except a decision with an unexpected number."""
    refused = NotToQuarantine(f"event {event.seq} is a {event.fact.kind()}. {NotToQuarantine.__doc__}")
    if not isinstance(event.fact, Decision):
        raise refused
    turns = _turns(first)
    expected = [turns.expected(e) async for e in _events(journal, first - 1, event.seq)]
    if expected[-1] is None:
        raise refused


async def _refuse_if_decided_on(journal: Journal, unknown: Recorded, first: int, last: int) -> None:
    """Raise NotToQuarantine if a controller of a newer release could have based a decision on the event `unknown`.

    Each decision records how far its controller had read the journal. A decision could be based on the event if its controller
    had read the event. The exception is an observation of a kind that was not in force: no decision is based on it.
    """
    seq = unknown.seq
    async for event in _events(journal, seq, last):
        if isinstance(event.fact, Decision) and event.through >= seq:
            if await _not_in_force(journal, unknown, first):
                return
            raise NotToQuarantine(
                f"decision {event.fact.number}, at {event.seq}, was made by a controller that had read event {seq}: "
                f"a newer Holdfast knows this event, so upgrade this one. {NotToQuarantine.__doc__}"
            )


async def _not_in_force(journal: Journal, unknown: Recorded, first: int) -> bool:
    """Return whether an unknown event is an observation of a kind that was not in force when the event was recorded."""
    assert isinstance(unknown.fact, Skipped)
    if unknown.fact.decided:
        return False
    kinds: tuple[str, ...] | None = None
    async for event in _events(journal, first - 1, unknown.seq):
        if isinstance(event.fact, PolicyAdopted):
            kinds = event.fact.kinds
    subject = unknown.fact.subject
    return kinds is not None and subject.rpartition(".")[2] not in kinds
