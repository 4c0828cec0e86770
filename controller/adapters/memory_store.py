"""A state store in memory for tests, which passes the same conformance suite as the Postgres store.

It creates rows with the same functions as the Postgres store, and encodes snapshots with the same codec.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from controller.deciders.fleet import DECIDERS_VERSION, OLDEST, Fleet
from controller.ports import (
    LATEST,
    PLANNED_BY,
    AnotherProjector,
    CatchUp,
    PlanningRead,
    ReadPosition,
    RowsRead,
    Snapshot,
    StoreLook,
    StoreUnavailable,
)
from controller.read_model import rows as projection
from controller.read_model import snapshot as fleet_codec
from events.fact import Decision, Recorded
from events.order import Last, Position

SNAPSHOT_EVERY = 5_000


@dataclass(frozen=True)
class _Kept:
    reach: int
    at: datetime
    position: Position
    sources: Mapping[str, Last]
    fleet: bytes
    deciders_version: int


@dataclass
class MemoryTables:
    """The contents of the simulated database, which several stores may share.

    If `reachable` is False, every access raises StoreUnavailable.
    """

    reachable: bool = True
    position: ReadPosition = field(default_factory=ReadPosition)
    rows: dict[str, dict[projection.Row, projection.Row]] = field(
        default_factory=lambda: {name: {} for name in projection.COLUMNS}
    )
    events: dict[str, projection.Row] = field(default_factory=dict)  # by ce-id
    snapshots: list[_Kept] = field(default_factory=list)


class MemoryStore:
    """The access of one process to the tables of a simulated database."""

    def __init__(self, tables: MemoryTables | None = None, *, snapshot_every: int = SNAPSHOT_EVERY) -> None:
        self.tables = tables or MemoryTables()
        self._snapshot_every = snapshot_every

    def _reach(self) -> MemoryTables:
        if not self.tables.reachable:
            raise StoreUnavailable
        return self.tables

    async def position(self) -> ReadPosition:
        return self._reach().position

    async def look(self) -> StoreLook:
        tables = self._reach()
        kept = sorted(tables.events.values(), key=lambda row: int(row[0]))
        made: dict[str, set[object]] = {"incidents": set(), "migrations": set(), "exposures": set()}
        for event in map(projection.recorded, kept):
            for part, rows in projection.history([event]).items():
                if part.startswith("append "):
                    made[part.removeprefix("append ")].update(row[0] for row in rows)
        lost = tuple(name for name, keys in made.items() if keys - {key[0] for key in tables.rows[name]})
        return StoreLook(lost, kept[0][0] if kept else 0, kept[-1][0] if kept else 0)

    async def load(self) -> Snapshot | None:
        return self._newest(lambda kept: True)

    async def snapshot_before(self, seq: int) -> Snapshot | None:
        return self._newest(lambda kept: kept.reach <= seq)

    async def snapshot_at(self, when: datetime) -> Snapshot | None:
        return self._newest(lambda kept: kept.at <= when)

    def _newest(self, fits: Callable[[_Kept], bool]) -> Snapshot | None:
        for kept in reversed(self._reach().snapshots):
            if OLDEST <= kept.deciders_version <= DECIDERS_VERSION and fits(kept):
                return Snapshot(fleet_codec.decode(kept.fleet), kept.position, dict(kept.sources))
        return None

    async def project(self, events: Sequence[Recorded], shown: Fleet, settled: Snapshot, after: int) -> None:
        tables = self._reach()
        if tables.position.seq != after:
            raise AnotherProjector
        for name in projection.STATE:
            tables.rows[name].clear()
        for name, rows in projection.changes(None, shown).items():
            for row in rows:
                tables.rows[name][row[: projection.KEYS.get(name, 1)]] = row
        self._remember(projection.history(events))
        for row in projection.event_rows(events):
            tables.events.setdefault(row[2], row)
        last = events[-1]
        tables.position = ReadPosition(last.seq, last.id, last.at, settled.position, DECIDERS_VERSION)
        self._keep(events, settled)

    def _remember(self, history: Mapping[str, Sequence[projection.Row]]) -> None:
        rows = self.tables.rows
        for part, found in history.items():
            verb, _, name = part.partition(" ")
            for row in found:
                if verb == "append":
                    rows[name].setdefault(row[:1], row)
                elif known := rows[name].get(row[:1]):
                    rows[name][row[:1]] = (*known[:5], *row[1:])

    def _keep(self, events: Sequence[Recorded], settled: Snapshot) -> None:
        ours = (one.reach for one in self.tables.snapshots if one.deciders_version == DECIDERS_VERSION)
        newest = max(ours, default=0)
        position = settled.position
        decision = next(
            (e for e in events if e.seq == position.decided and isinstance(e.fact, Decision)), None
        )
        if decision is None or not fleet_codec.snapshot_due(position.decided, newest, self._snapshot_every):
            return
        fleet = fleet_codec.encode(settled.fleet)
        kept = _Kept(position.decided, decision.at, position, dict(settled.sources), fleet, DECIDERS_VERSION)
        self.tables.snapshots.append(kept)

    async def read_status(self) -> RowsRead:
        reading = self._all()
        rows = {name: found for name, found in reading.rows.items() if name in projection.STATE}
        rows["incidents"] = [row for row in reading.rows["incidents"] if row["closed_at"] is None]
        return RowsRead(reading.position, rows)

    async def ended_incidents(self, limit: int) -> Sequence[Mapping[str, Any]]:
        ended = [row for row in self._all().rows["incidents"] if row["closed_at"] is not None]
        return sorted(ended, key=lambda row: row["closed_at"], reverse=True)[:limit]

    def _all(self) -> RowsRead:
        tables = self._reach()
        rows = {
            name: [dict(zip(projection.COLUMNS[name], row, strict=True)) for row in rows.values()]
            for name, rows in tables.rows.items()
        }
        return RowsRead(tables.position, rows)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator["MemoryFrozen"]:
        """Yield a view of the store as of now, which later changes of the store do not affect."""
        events = sorted(self._reach().events.values(), key=lambda row: int(row[0]))
        yield MemoryFrozen(self._all(), events)

    async def read_planning(self, after: int, since: datetime, limit: int) -> PlanningRead:
        found = self._all()
        kept = sorted(map(projection.recorded, self.tables.events.values()), key=lambda event: event.seq)
        events = [e for e in kept if isinstance(e.fact, PLANNED_BY) and e.seq > after and e.at >= since]
        latest = {(type(e.fact), getattr(e.fact, "model", "")): e for e in kept if isinstance(e.fact, LATEST)}
        by_place = sorted(latest.values(), key=lambda event: event.seq)
        return PlanningRead(found.position, found.rows["workers"], events[:limit], by_place)

    async def locate(self, reference: str) -> int | None:
        number = reference.removeprefix("decision:")
        by_number = number != reference and number.isdigit()
        for row in self._reach().events.values():
            if (row[6] == int(number)) if by_number else (row[2] == reference):
                return int(row[0])
        return None

    async def select(
        self,
        *,
        after: int = 0,
        since: datetime | None = None,
        worker: str | None = None,
        incident: str | None = None,
        request: str | None = None,
    ) -> AsyncIterator[Sequence[Recorded]]:
        rows = sorted(self._reach().events.values(), key=lambda row: int(row[0]))
        events = [projection.recorded(row) for row in rows if row[0] > after]
        if found := [
            event
            for event in events
            if projection.matches(event, since=since, worker=worker, incident=incident, request=request)
        ]:
            yield found

    async def beside(self) -> "MemoryStore":
        return MemoryStore(snapshot_every=self._snapshot_every)

    async def discard(self, fresh: "MemoryStore") -> None:
        """Do nothing, because the memory of `fresh` is freed when no object refers to it."""

    async def swap(self, fresh: "MemoryStore", catch_up: CatchUp, *, carry: bool) -> None:
        await catch_up(self._reach().position)
        if carry:
            self._carry(fresh.tables)
        for name in ("position", "rows", "events", "snapshots"):
            setattr(self.tables, name, getattr(fresh.tables, name))

    def _carry(self, fresh: MemoryTables) -> None:
        first = min((int(row[0]) for row in fresh.events.values()), default=0)
        fresh.events |= {id: row for id, row in self.tables.events.items() if int(row[0]) < first}
        for name in set(projection.COLUMNS) - set(projection.STATE):
            fresh.rows[name] = self.tables.rows[name] | fresh.rows[name]

    async def close(self) -> None:
        """Do nothing, because there is no connection to close."""


class MemoryFrozen:
    """A view of the store as of one instant."""

    def __init__(self, reading: RowsRead, events: Sequence[projection.Row]) -> None:
        self.reading = reading
        self._events = events

    async def locate(self, id: str) -> int | None:
        """Return the stream sequence of the event with this ce-id; None if the store does not have the event."""
        return next((int(row[0]) for row in self._events if row[2] == id), None)

    async def events(self, after: int) -> AsyncIterator[Sequence[projection.Row]]:
        """Yield the rows of `fleet_events` with a stream sequence above `after`, in one batch."""
        if found := [row for row in self._events if row[0] > after]:
            yield found
