"""Reads rows, snapshots and events from the state store in Postgres.

The module imports the database driver but not SQLAlchemy, so that a frontend starts quickly.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Unpack

import asyncpg
import msgspec
import structlog

from controller.adapters.postgres.link import SCHEMA, Connection, Link, connected
from controller.deciders.fleet import DECIDERS_VERSION, OLDEST
from controller.ports import LATEST, PLANNED_BY, PlanningRead, ReadPosition, RowsRead, Snapshot, StoreLook
from controller.read_model import rows as projection
from controller.read_model import snapshot as fleet_codec
from controller.read_model.worker_names import PATHS, SUBJECT
from events.fact import Fact, Recorded
from events.order import Last, Position

_ROWS_OF = {  # for each table of history: the event kinds that create its rows, and the column that identifies a row
    "incidents": (("incident_opened",), "incident"),
    "migrations": (("request_migrated",), "id"),
    "exposures": (("request_exposed", "exposure_unknown"), "id"),
}


def _lacks(table: str) -> str:
    """Return an SQL condition that is true if `table` lacks a row that it must have.

    For each kind of event that adds rows to the table, the rows of the first and the last event must exist.
    """
    kinds, key = _ROWS_OF[table]
    ends = " UNION ALL ".join(
        f"(SELECT {key} FROM fleet_events WHERE kind = '{kind}' ORDER BY seq {order} LIMIT 1)"
        for kind in kinds
        for order in ("ASC", "DESC")
    )
    return (
        f"EXISTS (SELECT FROM ({ends}) AS e WHERE NOT EXISTS (SELECT FROM {table} t WHERE t.{key} = e.{key}))"
    )


_LOOK = f"""SELECT NOT EXISTS (SELECT FROM projection WHERE name = 'fleet') AS projection,
    {", ".join(f"{_lacks(table)} AS {table}" for table in _ROWS_OF)},
    (SELECT coalesce(min(seq), 0) FROM fleet_events) AS first, (SELECT coalesce(max(seq), 0) FROM fleet_events) AS last"""


SELECT_BATCH = 1_000
log = structlog.get_logger(__name__)

_PLACE = "SELECT * FROM projection WHERE name = 'fleet'"
# Snapshots since OLDEST can be read, because later deciders versions have only added fields to the state.
_SNAPSHOT = f"SELECT * FROM snapshots WHERE deciders_version BETWEEN {OLDEST} AND $1 AND codec_version = $2"
_EVENTS = f"SELECT {', '.join(projection.EVENT_COLUMNS)} FROM fleet_events"
_PLANNED_BY = f"{_EVENTS} WHERE kind = ANY($1) AND seq > $2 AND at >= $3 ORDER BY seq LIMIT $4"
_LATEST = f"{_EVENTS} WHERE seq IN (SELECT max(seq) FROM fleet_events WHERE kind = ANY($1) GROUP BY kind, model) ORDER BY seq"
_INCIDENTS = ", ".join(f"'{kind}'" for kind in projection.INCIDENT_KINDS)
_NAMED = "jsonb_path_exists(body, '$.{path} ? (@ == $name)', jsonb_build_object('name', ${{0}}::text))"
_CONCERNS = (
    " OR ".join(  # equals `projection.concerns`, a part of `projection.matches`
        [
            f"(worker = ${{0}}::text OR kind IN ({_INCIDENTS}) AND body->>'subject' = '{SUBJECT}' || ${{0}}::text",
            *(
                f"kind = '{kind.kind()}' AND {_NAMED.format(path='.'.join(path))}"
                for kind, paths in PATHS.items()
                for path in paths
                if path != (projection.worker_column(kind),)
            ),
        ]
    )
    + ")"
)
_sources = msgspec.json.Decoder(dict[str, Last]).decode
_ENDED = "SELECT * FROM incidents WHERE closed_at IS NOT NULL ORDER BY closed_at DESC LIMIT $1"
_DECIDED_AT = "SELECT number, at FROM fleet_events WHERE number = ANY($1) AND number > 0"
_OPEN = "SELECT * FROM incidents WHERE closed_at IS NULL"


class RowReader:
    """Reads the rows, snapshots and events of one state store."""

    def __init__(self, url: str, schema: str = SCHEMA) -> None:
        self.url, self.schema = url, schema
        self._reader = Link(url, schema)

    async def position(self) -> ReadPosition:
        """Return the journal position up to which the rows are current."""
        async with self._reader.use() as connection:
            return await read_position(connection)

    async def look(self) -> StoreLook:
        """Check the store for lost rows with a few queries that use the database's indexes, and return the result.

        A table of history must have the rows of the oldest and the newest stored event of each kind that it records. A
        truncated table, or a table from an older backup, lacks one of the two rows. This check does not find rows that are
        missing in between, but `holdfast replay verify` does.
        """
        async with self._reader.use() as connection:
            row = await connection.fetchrow(_LOOK)
        lost = tuple(table for table in ("projection", *_ROWS_OF) if row[table])
        return StoreLook(lost, row["first"], row["last"])

    async def load(self) -> Snapshot | None:
        """Return the newest snapshot that this version's deciders can read; None if there is none."""
        return await self._newest("")

    async def snapshot_before(self, seq: int) -> Snapshot | None:
        """Return the newest snapshot that includes no event after the stream sequence `seq`; None if there is none."""
        return await self._newest(" AND reach <= $3", seq)

    async def snapshot_at(self, when: datetime) -> Snapshot | None:
        """Return the newest snapshot that includes no event later than the time `when`; None if there is none."""
        return await self._newest(" AND at <= $3", when)

    async def _newest(self, condition: str, *arguments: object) -> Snapshot | None:
        query = f"{_SNAPSHOT}{condition} ORDER BY reach DESC LIMIT 1"
        async with self._reader.use() as connection:
            row = await connection.fetchrow(query, DECIDERS_VERSION, fleet_codec.VERSION, *arguments)
        if row is None:
            return None
        try:
            fleet, sources = fleet_codec.decode(row["fleet"]), _sources(row["sources"])
        except (fleet_codec.BadSnapshot, msgspec.MsgspecError) as error:
            log.error("snapshot_not_used", reach=row["reach"], why=str(error))
            return None
        position = Position(row["through"], row["decided"], row["number"])
        return Snapshot(fleet, position, sources)

    async def read_status(self) -> RowsRead:
        """Return the rows of the fleet's present state and the open incidents, as of one instant."""
        async with self._reader.use() as connection, _frozen(connection):
            return await _reading(connection, {**_all(projection.STATE), "incidents": _OPEN})

    async def decided_at(self, numbers: Sequence[int]) -> Mapping[int, datetime]:
        """Return the times at which the journal stored these decisions, by decision number.

        Decisions that the store does not have are left out. Raise StoreUnavailable if the database cannot be reached.
        """
        async with self._reader.use() as connection:
            rows = await connection.fetch(_DECIDED_AT, [*numbers])
        return {row["number"]: row["at"] for row in rows}

    async def ended_incidents(self, limit: int) -> Sequence[Mapping[str, Any]]:
        """Return the rows of the `limit` incidents that ended last, latest first.

        Raise StoreUnavailable if the database cannot be reached.
        """
        async with self._reader.use() as connection:
            return [dict(row) for row in await connection.fetch(_ENDED, limit)]

    @asynccontextmanager
    async def reading(self) -> AsyncIterator["PostgresSnapshot"]:
        """Yield a view of rows, position and events as of one instant, in a REPEATABLE READ transaction."""
        async with connected(self.url, self.schema) as connection, _frozen(connection):
            yield PostgresSnapshot(await _reading(connection, _all(projection.COLUMNS)), connection)

    async def read_planning(self, after: int, since: datetime, limit: int) -> PlanningRead:
        """Return the planner's input as of one instant.

        The input contains the workers, at most `limit` events of the kinds PLANNED_BY, and the latest event of each model for
        each of the kinds LATEST. The events of the kinds PLANNED_BY have a stream sequence above `after` and are not older
        than `since`. The latest events may be older.
        """
        async with self._reader.use() as connection, _frozen(connection):
            read = await _reading(connection, {"workers": "SELECT * FROM workers"})
            events = await connection.fetch(_PLANNED_BY, _kinds(PLANNED_BY), after, since, limit)
            latest = await connection.fetch(_LATEST, _kinds(LATEST))
        recorded = projection.recorded
        return PlanningRead(
            read.position, read.rows["workers"], [*map(recorded, events)], [*map(recorded, latest)]
        )

    async def locate(self, reference: str) -> int | None:
        """Return the stream sequence of an event, given its CloudEvents id or `decision:N`; None if it is not stored."""
        number = reference.removeprefix("decision:")
        by_number = number != reference and number.isdigit()
        column, key = ("number", int(number)) if by_number else ("id", reference)
        async with self._reader.use() as connection:
            found: int | None = await connection.fetchval(
                f"SELECT seq FROM fleet_events WHERE {column} = $1", key
            )
            return found

    async def select(self, **wanted: Unpack[projection.EventFilter]) -> AsyncIterator[Sequence[Recorded]]:
        """Yield the events that match all given conditions, in order, in lists of up to 1,000 events."""
        tests = {
            _CONCERNS: wanted.get("worker"),
            "incident = ${0}": wanted.get("incident"),
            "at >= ${0}": wanted.get("since"),
            "request = ${0}": wanted.get("request"),
        }
        after = wanted.get("after", 0)
        given = [(test, value) for test, value in tests.items() if value is not None]
        where = "".join(f" AND {test.format(n)}" for n, (test, _) in enumerate(given, start=2))
        query = f"{_EVENTS} WHERE seq > $1{where} ORDER BY seq LIMIT {SELECT_BATCH}"
        while True:
            async with self._reader.use() as connection:
                rows = await connection.fetch(query, after, *(value for _, value in given))
            if rows:
                yield [projection.recorded(row) for row in rows]
            if len(rows) < SELECT_BATCH:
                return
            after = rows[-1]["seq"]

    async def close(self) -> None:
        """Close the connection to the database."""
        await self._reader.close()


class PostgresSnapshot:
    """A view of the store as of one instant, valid while its transaction is open."""

    def __init__(self, reading: RowsRead, connection: Connection) -> None:
        self.reading = reading
        self._connection = connection

    async def locate(self, id: str) -> int | None:
        """Return the stream sequence of the event with this CloudEvents id; None if the store does not have the event."""
        found: int | None = await self._connection.fetchval("SELECT seq FROM fleet_events WHERE id = $1", id)
        return found

    async def events(self, after: int) -> AsyncIterator[Sequence[projection.Row]]:
        """Yield the rows of `fleet_events` with a stream sequence above `after`, in order, in lists of up to 1,000 rows."""
        query = f"{_EVENTS} WHERE seq > $1 ORDER BY seq LIMIT {SELECT_BATCH}"
        while rows := await self._connection.fetch(query, after):
            yield rows
            after = rows[-1]["seq"]


def _frozen(connection: Connection) -> asyncpg.transaction.Transaction:
    return connection.transaction(isolation="repeatable_read", readonly=True)


async def read_position(connection: Connection) -> ReadPosition:
    """Return the journal position up to which the rows are current, as this connection's transaction sees it."""
    row = await connection.fetchrow(_PLACE)
    if row is None:
        return ReadPosition()
    position = Position(row["through"], row["decided"], row["number"])
    return ReadPosition(row["shown_seq"], row["shown_id"], row["shown_at"], position, row["deciders_version"])


def _kinds(facts: Iterable[type[Fact]]) -> list[str]:
    return [fact.kind() for fact in facts]


def _all(tables: Iterable[str]) -> dict[str, str]:
    return {name: f"SELECT * FROM {name}" for name in tables}


async def _reading(connection: Connection, queries: Mapping[str, str]) -> RowsRead:
    position = await read_position(connection)
    rows = {name: [dict(row) for row in await connection.fetch(query)] for name, query in queries.items()}
    return RowsRead(position, rows)
