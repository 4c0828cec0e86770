"""Restores a past fleet state from the last earlier snapshot and the events after this snapshot."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from controller.deciders.fleet import Fleet
from controller.ports import Snapshot, StateStore
from controller.read_model import rows as projection
from controller.runtime.bounded_read import history
from controller.runtime.initial_fold import order_from, snapshots
from events.errors import HoldfastError
from events.fact import Recorded
from events.journal.port import Journal
from events.order import Order


class NotYet(HoldfastError):
    """The journal does not reach that far."""


class NoLonger(HoldfastError):
    """Earlier events were dropped at the journal's limits."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The fleet state after all events up to the sequence number `seq`."""

    seq: int
    # time of the event at `seq`, by the stream's clock; None: no event was folded after the snapshot
    at: datetime | None
    number: int  # number of the last decision up to `seq`
    fleet: Fleet
    folded: int  # number of events that were folded after the snapshot


async def at(journal: Journal, store: StateStore | None, when: int | datetime) -> Moment:
    """Return the fleet state at the sequence number or time `when`. If `store` is None, only the journal is read.

    Raise NotYet if the journal ends before the sequence number. Raise NoLonger if the needed events were dropped from the
    journal, and neither the store nor the journal has a snapshot from before `when`.
    """
    order, reached, folded = await _folded(journal, store, when)
    return Moment(order.last_seq, reached, order.position.number, order.shown, folded)


async def order_at(journal: Journal, store: StateStore | None, seq: int) -> Order[Fleet]:
    """Return the fleet state folded from the journal up to the event `seq`.

    The caller can add later events to the result. Raise NotYet or NoLonger as `at` does."""
    return (await _folded(journal, store, seq))[0]


async def _folded(
    journal: Journal, store: StateStore | None, when: int | datetime
) -> tuple[Order[Fleet], datetime | None, int]:
    """Restore a snapshot and fold the later events up to `when`.

    Return the fleet state, the time of the last of these events, and their number. The time is None if there are no such
    events. Raise NotYet or NoLonger as `at` does."""
    last = await journal.last_seq()
    if isinstance(when, int) and when > last:
        raise NotYet(f"the journal ends at {last}, before {when}. {NotYet.__doc__}")
    order = await _order(journal, store, when)
    start, reached = order.last_seq, None
    async for event in events(journal, start, when if isinstance(when, int) else last):
        if isinstance(when, datetime) and event.at > when:
            break
        order.take(event)
        reached = event.at
    return order, reached, order.last_seq - start


async def _order(journal: Journal, store: StateStore | None, when: int | datetime) -> Order[Fleet]:
    """Return the fleet state of the last snapshot before `when`. The caller can add the later events to the result.

    The snapshot is read from the store. If the store has none and the journal has dropped no event, the state is empty. If the
    journal has dropped events that follow the store's snapshot, the last snapshot on the journal before `when` is used
    instead. Raise NoLonger if the journal's snapshot is needed, but the journal has none from before `when`."""
    order, first = order_from(await _before(store, when)), await journal.first_seq()
    if first <= order.last_seq + 1:
        return order
    found, begins = None, 0
    async for event, snapshot in snapshots(journal):
        reach = max(snapshot.position.through, snapshot.position.decided)
        begins = begins or reach
        if reach <= when if isinstance(when, int) else event.at <= when:
            found = snapshot
    if found is None:
        contents = (
            f"the first state that it contains is that of {begins}" if begins else "it contains no snapshot"
        )
        raise NoLonger(f"the journal begins at {first}, and {contents}. {NoLonger.__doc__}")
    return order_from(found)


async def events(journal: Journal, after: int, until: int) -> AsyncIterator[Recorded]:
    """Yield the events after sequence number `after`, up to and including `until`.

    Raise JournalUnavailable if the journal sends no event for too long."""
    async for batch in history(journal, after, until):
        for event in batch:
            yield event


async def _before(store: StateStore | None, when: int | datetime) -> Snapshot | None:
    if store is None:
        return None
    return await (store.snapshot_before(when) if isinstance(when, int) else store.snapshot_at(when))


def describe(moment: Moment) -> dict[str, Any]:
    """Return a past fleet state as plain JSON types.

    The result holds the position, the rows as in the state store, and the open incidents."""
    fleet = moment.fleet
    rows = projection.state(fleet)
    tables = {
        name: [projection.as_json(name, row) for row in sorted(found, key=lambda row: str(row[0]))]
        for name, found in rows.items()
    }
    incidents = [
        {"incident": i.id, "subject": i.subject, "symptom": i.symptom, "opened_at": i.opened_at.isoformat()}
        for i in fleet.incidents.values()
    ]
    return {
        "seq": moment.seq,
        "at": moment.at.isoformat() if moment.at else None,
        "number": moment.number,
        **tables,
        "incidents": incidents,
    }


def lines(moment: Moment) -> list[str]:
    """Format a past fleet state as a heading and one line per worker, model and open incident."""
    fleet = moment.fleet
    when = f", {moment.at:%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC" if moment.at else ""
    output = [f"at {moment.seq}{when}, after decision {moment.number}"]
    for name, worker in sorted(fleet.workers.items()):
        why = f"  ({'; '.join(worker.reasons)})" if worker.reasons else ""
        output.append(
            f"  {name:<12} {worker.health.status.value:<10} breaker {worker.breaker.position:<9} "
            f"weight {worker.weight:<4g} {worker.joined.model}{why}"
        )
    output += [f"  {name}: level {model.level}" for name, model in sorted(fleet.models.items())]
    output += [
        f"  open: {i.id}, {i.subject}, {i.symptom}, since {i.opened_at:%H:%M:%S}"
        for i in fleet.incidents.values()
    ]
    return output
