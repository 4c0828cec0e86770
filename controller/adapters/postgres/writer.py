"""Writes batches of events to the state store. A batch is one transaction, usually of one statement."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache

import asyncpg
import structlog

from controller.adapters.postgres.audit_helper import Repeated, copy
from controller.adapters.postgres.link import Connection, Link
from controller.deciders.fleet import DECIDERS_VERSION, Fleet
from controller.ports import AnotherProjector, Snapshot, StoreAhead
from controller.read_model import rows as projection
from controller.read_model import snapshot as fleet_codec
from events import codec
from events.fact import Decision, Recorded

Rows = Sequence[projection.Row]
COLUMNS: Mapping[str, tuple[str, ...]] = {
    **projection.COLUMNS,
    "fleet_events": projection.EVENT_COLUMNS,
    "snapshots": (
        "reach", "at", "through", "decided", "number", "deciders_version", "codec_version", "fleet", "sources",
    ),
}  # fmt: skip
"""The columns of each table, in order. The migrations create the tables, and a test compares the two."""
_TYPES = {
    "bigint": (
        "decided", "first", "last", "number", "opened_by", "pid", "reach", "seq", "source_number", "through", "tokens",
    ),
    "integer": ("attempt", "codec_version", "deciders_version", "failures", "trials_failed"),
    "smallint": ("health_value", "level", "position_value"),
    "double precision": ("capacity_rps", "gap_ms", "ratio", "weight"),
    "boolean": ("agreed", "exact", "finished", "routable", "spare"),
    "timestamp with time zone": (
        "at", "closed_at", "deadline", "drain_deadline", "opened_at", "retry_at", "said_at", "since", "until",
    ),
    "jsonb": ("body", "golden", "joined", "knobs", "last_canary", "sources"),
    "bytea": ("fleet",),
}  # fmt: skip
TYPE_OF = {column: kind for kind, columns in _TYPES.items() for column in columns}
"""The type of each column that is not text. A column has the same type in all tables."""
_STILL = "EXISTS (SELECT FROM moved)"
_MOVE = """moved AS (UPDATE projection SET shown_seq = $2, shown_id = $3, shown_at = $4, through = $5, decided = $6,
    number = $7, deciders_version = $8, written_at = clock_timestamp()
    WHERE name = 'fleet' AND shown_seq = $1 RETURNING 1)"""
_MOVE_PARAMETERS = 8


def build(move: Sequence[object], writes: Mapping[str, Rows]) -> tuple[str, list[object]]:
    """Return the single statement of a transaction, and its parameters.

    `move` has the expected position and the new one. `writes` maps a part of the statement ("workers", "delete goldens" …) to its
    rows. If the store is not at the expected position, the statement changes nothing and returns 0:

        WITH moved AS (UPDATE projection … WHERE shown_seq = <the expected position> RETURNING 1),
             …     AS (INSERT … SELECT … FROM unnest($n, …) WHERE EXISTS (SELECT FROM moved) ON CONFLICT …)
        SELECT count(*) FROM moved

    Several statements in one transaction would take three times as long. Each batch needs different parts, so the text is
    assembled from parts. asyncpg keeps a prepared statement for each combination.
    """
    parts = tuple(part for part, rows in writes.items() if rows)
    parameters: list[object] = list(move)
    for part in parts:
        parameters.extend(list(column) for column in zip(*writes[part], strict=True))
    return _text(parts), parameters


@cache
def _text(parts: tuple[str, ...]) -> str:
    place, pieces = _MOVE_PARAMETERS, [_MOVE]
    for part in parts:
        verb, _, table = part.rpartition(" ")
        names = _names(verb, table)
        arrays = ", ".join(f"${place + n}::{TYPE_OF.get(c, 'text')}[]" for n, c in enumerate(names, start=1))
        place += len(names)
        pieces.append(f"{part.replace(' ', '_')}_ AS ({_PARTS.get(verb, _upsert)(table, names, arrays)})")
    return f"WITH {', '.join(pieces)} SELECT count(*) FROM moved"


def _names(verb: str, table: str) -> tuple[str, ...]:
    if verb == "close":
        return ("incident", "closed_at", "outcome")
    return _keys(table) if verb == "delete" else COLUMNS[table]


def _keys(table: str) -> tuple[str, ...]:
    return COLUMNS[table][: projection.KEYS.get(table, 1)]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _insert(table: str, names: tuple[str, ...], arrays: str, on_conflict: str) -> str:
    return (
        f"INSERT INTO {table} ({_quoted(names)}) SELECT * FROM unnest({arrays}) WHERE {_STILL} "
        f"ON CONFLICT {on_conflict}"
    )


def _upsert(table: str, names: tuple[str, ...], arrays: str) -> str:
    keys = _keys(table)
    changes = ", ".join(f'"{n}" = excluded."{n}"' for n in names if n not in keys)
    return _insert(table, names, arrays, f"({_quoted(keys)}) DO UPDATE SET {changes}")


def _append(table: str, names: tuple[str, ...], arrays: str) -> str:
    """Return an INSERT that skips rows that the table already has, so that a repeated event is stored once.

    `names` are the columns, and `arrays` is the SQL text of the parameters: one array per column.
    """
    unique = {"snapshots": "reach", "incidents": "incident"}.get(table, "id")
    return _insert(table, names, arrays, f"({unique}) DO NOTHING")


def _delete(table: str, names: tuple[str, ...], arrays: str) -> str:
    return f"DELETE FROM {table} WHERE ({_quoted(names)}) IN (SELECT * FROM unnest({arrays})) AND {_STILL}"


def _close(table: str, names: tuple[str, ...], arrays: str) -> str:
    return (
        f"UPDATE {table} SET closed_at = v.closed_at, outcome = v.outcome "
        f"FROM unnest({arrays}) AS v({_quoted(names)}) WHERE {table}.incident = v.incident AND {_STILL}"
    )


_PARTS = {"append": _append, "delete": _delete, "close": _close}


_COUNT = f"SELECT {', '.join(f'(SELECT count(*) FROM {name}) AS {name}' for name in projection.STATE)}"
_KEPT = "SELECT coalesce(max(reach), 0) FROM snapshots WHERE deciders_version = $1 AND codec_version = $2"
COPY_FROM = 512  # number of events from which COPY is faster than a statement with arrays

log = structlog.get_logger(__name__)


class Writer:
    """Writes batches of events to the store. The writer remembers the fleet that it wrote last, and writes only changed rows."""

    def __init__(self, link: Link, snapshot_every: int) -> None:
        self._link = link
        self._snapshot_every = snapshot_every
        self._kept: int | None = None  # last stream sequence in the newest snapshot; None: unknown
        # stream sequence and time of the last decision; None: not known yet
        self._decided: tuple[int, datetime] | None = None
        # the fleet that the rows show; None: unknown, so that all rows are written
        self._written: Fleet | None = None

    async def project(
        self, events: Sequence[Recorded], shown: Fleet, settled: Snapshot, after: int, *, audit: bool
    ) -> None:
        """Write the changed rows after a batch of events, and the new position.

        `shown` is the fleet after the batch, and `settled` the state after the last decision. If `audit` is false, the rows of
        `fleet_events` are not written, because the helper process writes them. Raise AnotherProjector, and write nothing, if the
        store is not at the stream sequence `after`.
        """
        last, position, before = events[-1], settled.position, self._written
        move = (after, last.seq, last.id, last.at, position.through, position.decided, position.number)
        writes: dict[str, Rows] = {**projection.changes(before, shown), **projection.history(events)}
        self._written = None  # unknown until the write has succeeded
        snapshot = writes["append snapshots"] = await self._due(events, settled)
        rows = projection.event_rows(events) if audit else []
        await self._write((*move, DECIDERS_VERSION), writes, rows, before is None)
        self._written = shown
        if snapshot:
            self._kept = position.decided

    async def recount(self) -> None:
        """Compare the number of stored rows of the fleet's state with the expected number.

        If the numbers differ, for example after a change of the database by hand, write all rows of the fleet's state with the
        next batch.
        """
        async with self._link.use() as connection:
            if self._written is None:
                return
            expected = {name: len(rows) for name, rows in projection.state(self._written).items()}
            found = dict(await connection.fetchrow(_COUNT))
            if found != expected:
                log.warning("rows_lost", found=found, expected=expected)
                self._written = None

    async def _due(self, events: Sequence[Recorded], settled: Snapshot) -> Rows:
        """Return one row with a snapshot if a snapshot is due; otherwise no row."""
        last = next((e for e in reversed(events) if isinstance(e.fact, Decision)), None)
        self._decided = (last.seq, last.at) if last else self._decided
        if self._kept is None:
            async with self._link.use() as connection:
                self._kept = await connection.fetchval(_KEPT, DECIDERS_VERSION, fleet_codec.VERSION)
        position = settled.position
        if not fleet_codec.snapshot_due(position.decided, self._kept or 0, self._snapshot_every):
            return ()
        if self._decided is None or self._decided[0] != position.decided:
            return ()  # the decision was read before this process started, so its time is unknown
        fleet, sources = fleet_codec.encode(settled.fleet), codec.to_json(settled.sources)
        row = (position.decided, self._decided[1], position.through, position.decided, position.number)
        return [(*row, DECIDERS_VERSION, fleet_codec.VERSION, fleet, sources)]

    async def _write(
        self, move: Sequence[object], writes: Mapping[str, Rows], audit: Rows, whole: bool
    ) -> None:
        everything = {**writes, "append fleet_events": audit}
        if len(audit) >= COPY_FROM:
            try:
                return await self._transaction(move, writes, whole, audit)
            except Repeated:
                # unlike COPY, this skips existing rows
                return await self._transaction(move, everything, whole)
        if whole:
            return await self._transaction(move, everything, whole)
        async with self._link.use() as connection:
            await _move(connection, move, everything)

    async def _transaction(
        self, move: Sequence[object], writes: Mapping[str, Rows], whole: bool, copied: Rows = ()
    ) -> None:
        async with self._link.use() as connection, connection.transaction():
            if whole:
                for name in projection.STATE:
                    await connection.execute(f"DELETE FROM {name}")
            await _move(connection, move, writes)
            if copied:
                await copy(connection, copied)


async def _move(connection: Connection, move: Sequence[object], writes: Mapping[str, Rows]) -> None:
    text, parameters = build(move, writes)
    try:
        moved = await connection.fetchval(text, *parameters)
    except asyncpg.UniqueViolationError as error:
        raise StoreAhead(
            f"fleet_events holds another event in this batch's place: {error}. {StoreAhead.__doc__}"
        ) from error
    if not moved:
        raise AnotherProjector(f"the projection is not at {move[0]}. {AnotherProjector.__doc__}")
