"""Read access to the state store. It imports only the driver, so that a frontend starts quickly."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

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

_ROWS_OF = {  # table: the event kinds that make its rows, and the common key of event row and table row
    "incidents": (("incident_opened",), "incident"),
    "migrations": (("request_migrated",), "id"),
    "exposures": (("request_exposed", "exposure_unknown"), "id"),
}


def _lacks(table: str) -> str:
    """Return an SQL condition: the row of the first or of the last event of some kind is missing."""
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


async def look(connection: Connection) -> StoreLook:
    """Return the result of a quick check for losses: a few index look-ups, whatever the history's length.

    Each table of history must hold the oldest and the newest row that the kept events require. A truncated table, or one from an
    older backup, lacks one of them. Rows missing from the middle are found by `holdfast replay verify`.
    """
    row = await connection.fetchrow(_LOOK)
    lost = tuple(table for table in ("projection", *_ROWS_OF) if row[table])
    return StoreLook(lost, row["first"], row["last"])


SELECT_BATCH = 1_000
log = structlog.get_logger(__name__)

_PLACE = "SELECT * FROM projection WHERE name = 'fleet'"
# States of one shape are folded alike by all deciders versions of this release: a version only adds fields.
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
    """Reads rows, snapshots and events."""

    def __init__(self, url: str, schema: str = SCHEMA) -> None:
        self.url, self.schema = url, schema
        self._reader = Link(url, schema)

    async def position(self) -> ReadPosition:
        """Return the position of the rows."""
        async with self._reader.use() as connection:
            return await read_position(connection)

    async def look(self) -> StoreLook:
        """Return the result of a quick check for losses."""
        async with self._reader.use() as connection:
            return await look(connection)

    async def load(self) -> Snapshot | None:
        """Return the newest snapshot that these deciders can read; None if there is none."""
        return await self._newest("")

    async def snapshot_before(self, seq: int) -> Snapshot | None:
        """Return the newest snapshot that contains nothing after `seq`."""
        return await self._newest(" AND reach <= $3", seq)

    async def snapshot_at(self, when: datetime) -> Snapshot | None:
        """Return the newest snapshot that contains nothing after `when`."""
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
        """Return when the journal stored these decisions, by number. Raise StoreUnavailable."""
        async with self._reader.use() as connection:
            rows = await connection.fetch(_DECIDED_AT, [*numbers])
        return {row["number"]: row["at"] for row in rows}

    async def ended_incidents(self, limit: int) -> Sequence[Mapping[str, Any]]:
        """Return the rows of the incidents that ended last, latest first, at most `limit`. Raise StoreUnavailable."""
        async with self._reader.use() as connection:
            return [dict(row) for row in await connection.fetch(_ENDED, limit)]

    @asynccontextmanager
    async def reading(self) -> AsyncIterator["PostgresSnapshot"]:
        """Hold one REPEATABLE READ transaction open: rows, position and events as of one instant."""
        async with connected(self.url, self.schema) as connection, _frozen(connection):
            yield PostgresSnapshot(await _reading(connection, _all(projection.COLUMNS)), connection)

    async def read_planning(self, after: int, since: datetime, limit: int) -> PlanningRead:
        """Return the planner's input, as of one instant."""
        async with self._reader.use() as connection, _frozen(connection):
            read = await _reading(connection, {"workers": "SELECT * FROM workers"})
            events = await connection.fetch(_PLANNED_BY, _kinds(PLANNED_BY), after, since, limit)
            latest = await connection.fetch(_LATEST, _kinds(LATEST))
        recorded = projection.recorded
        return PlanningRead(
            read.position, read.rows["workers"], [*map(recorded, events)], [*map(recorded, latest)]
        )

    async def locate(self, reference: str) -> int | None:
        """Return the sequence of an event, by ce-id or `decision:N`."""
        number = reference.removeprefix("decision:")
        by_number = number != reference and number.isdigit()
        column, key = ("number", int(number)) if by_number else ("id", reference)
        async with self._reader.use() as connection:
            found: int | None = await connection.fetchval(
                f"SELECT seq FROM fleet_events WHERE {column} = $1", key
            )
            return found

    async def select(
        self,
        *,
        after: int = 0,
        since: datetime | None = None,
        worker: str | None = None,
        incident: str | None = None,
        request: str | None = None,
    ) -> AsyncIterator[Sequence[Recorded]]:
        """Yield the matching events, in order, in batches."""
        tests = {
            _CONCERNS: worker,
            "incident = ${0}": incident,
            "at >= ${0}": since,
            "request = ${0}": request,
        }
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
    """The store as of one instant, as long as its transaction is open."""

    def __init__(self, reading: RowsRead, connection: Connection) -> None:
        self.reading = reading
        self._connection = connection

    async def locate(self, id: str) -> int | None:
        """Return the sequence under which an event is kept, by its ce-id; None if it is not."""
        found: int | None = await self._connection.fetchval("SELECT seq FROM fleet_events WHERE id = $1", id)
        return found

    async def events(self, after: int) -> AsyncIterator[Sequence[projection.Row]]:
        """Yield the rows of `fleet_events` above a sequence, in order, in batches."""
        query = f"{_EVENTS} WHERE seq > $1 ORDER BY seq LIMIT {SELECT_BATCH}"
        while rows := await self._connection.fetch(query, after):
            yield rows
            after = rows[-1]["seq"]


def _frozen(connection: Connection) -> asyncpg.transaction.Transaction:
    return connection.transaction(isolation="repeatable_read", readonly=True)


async def read_position(connection: Connection) -> ReadPosition:
    """Return the position of the rows, as this connection sees it."""
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
