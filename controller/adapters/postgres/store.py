"""The state store in Postgres: the fleet's rows, all events, snapshots of the fold, and the position.

A batch is written only if the store's position is exactly its start. So each event is projected once, however often a
projector is killed and even if two projectors run.

The projector's connection does not wait for the disk (`synchronous_commit = off`). What a crash loses, rows and position alike,
is projected again from the journal. A transaction is still whole or absent.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import asyncpg
import structlog

from controller.adapters.postgres.audit_helper import AuditHelper, HelperPolicy
from controller.adapters.postgres.link import SCHEMA, WRITES, Connection, Link
from controller.adapters.postgres.reader import RowReader, read_position
from controller.deciders.fleet import Fleet
from controller.ports import CatchUp, ReadPosition, Snapshot, StoreLook
from events.errors import HoldfastError
from events.fact import Recorded

if TYPE_CHECKING:
    from controller.adapters.postgres.writer import Writer

DROPS_MAX = 8  # attempts; Postgres takes a second to detect each deadlock
DROP_WAIT_S = 0.05
SNAPSHOT_EVERY = 5_000  # events: the most that time travel and a starting process must fold

log = structlog.get_logger(__name__)


class PostgresStore(RowReader):
    """One process's access to the state store."""

    def __init__(
        self,
        url: str,
        *,
        schema: str = SCHEMA,
        snapshot_every: int = SNAPSHOT_EVERY,
        helped: bool = False,
        help_policy: HelperPolicy = HelperPolicy(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(url, schema)
        self._snapshot_every = snapshot_every
        self._help_policy = help_policy
        self._helper = AuditHelper(url, schema, help_policy) if helped and help_policy.possible() else None
        self._link = Link(url, schema, {"synchronous_commit": "off", "application_name": WRITES})
        self._writer: Writer | None = None

    async def project(self, events: Sequence[Recorded], shown: Fleet, settled: Snapshot, after: int) -> None:
        """Write the changes of a batch of events in one transaction. Raise AnotherProjector or StoreUnavailable."""
        helped = self._helper is not None and await self._helper.write(events)
        await self.prepare().project(events, shown, settled, after, audit=not helped)

    async def look(self) -> StoreLook:
        """Return the result of a quick check for losses, and check that all rows of the fleet's state are present."""
        await self.complete()
        if self._writer is not None:
            await self._writer.recount()
        return await super().look()

    def prepare(self) -> "Writer":
        """Load the modules that `project` needs before the first events arrive.

        This imports SQLAlchemy, which takes 0.2 s: only a projecting process should wait for that.
        """
        if self._writer is None:
            from controller.adapters.postgres.writer import Writer

            self._writer = Writer(self._link, self._snapshot_every)
        return self._writer

    # --- rebuilding in a second schema ------------------------------------------------------------------------------

    async def beside(self) -> "PostgresStore":
        """Create an empty store in a second schema; drop the leftovers of an interrupted rebuild."""
        from controller.adapters.postgres import migrate

        fresh = f"{self.schema}_next"
        async with self._reader.use() as connection:
            for leftover in (fresh, f"{self.schema}_old"):
                await _drop(connection, leftover)
        await migrate.upgrade(self.url, schema=fresh)
        async with self._reader.use() as connection:
            await migrate.copy_grants(connection, self.schema, fresh)
        return PostgresStore(
            self.url,
            schema=fresh,
            snapshot_every=self._snapshot_every,
            helped=True,
            help_policy=self._help_policy,
        )

    async def discard(self, fresh: "PostgresStore") -> None:
        """Drop a store that `beside` created."""
        await fresh.close()
        async with self._reader.use() as connection:
            await _drop(connection, fresh.schema)

    async def swap(self, fresh: "PostgresStore", catch_up: CatchUp, *, carry: bool) -> None:
        """Rename the fresh schema to this one's name, in one transaction; `carry`: copy the history that the journal has dropped.

        A running projector waits meanwhile, readers do not. So the position stays fixed while the fresh store catches up. The
        projector then finds the new tables under the old name.
        """
        old = f"{self.schema}_old"
        async with self._reader.use() as connection, connection.transaction():
            there = await connection.fetchval("SELECT to_regnamespace($1)", f'"{self.schema}"') is not None
            if whole := await connection.fetchval("SELECT to_regclass('projection')") is not None:
                await connection.execute("LOCK TABLE projection IN EXCLUSIVE MODE")
            await catch_up(await read_position(connection) if whole else ReadPosition())
            await fresh.complete()
            await fresh.close()
            if carry and whole:
                await _carry(connection, self.schema, fresh.schema)
            if there:
                await connection.execute(f'ALTER SCHEMA "{self.schema}" RENAME TO "{old}"')
            await connection.execute(f'ALTER SCHEMA "{fresh.schema}" RENAME TO "{self.schema}"')
        try:
            async with self._reader.use() as connection:
                await _drop(connection, old)
        except HoldfastError as error:  # the swap is done, and the next `beside` drops the leftovers
            log.warning("old_projection_not_dropped", schema=old, why=str(error))

    @property
    def helper_pid(self) -> int | None:
        """Process id of the helper that writes this store's audit table; None: there is none (yet)."""
        return self._helper.pid if self._helper is not None else None

    async def complete(self) -> None:
        """Return once everything projected is in the tables. Raise AuditFailed."""
        if self._helper is not None:
            await self._helper.flush()

    async def close(self) -> None:
        """Close the connections to the database."""
        if self._helper is not None:
            await self._helper.close()
        await self._link.close()
        await super().close()


async def _carry(connection: Connection, old: str, fresh: str) -> None:
    """Copy kept rows of events before the fresh schema's first one, and incidents that it does not have."""
    first = f'(SELECT coalesce(min(seq), 0) FROM "{fresh}".fleet_events)'
    for table in ("migrations", "exposures", "fleet_events"):
        await connection.execute(
            f'INSERT INTO "{fresh}".{table} SELECT * FROM "{old}".{table} WHERE seq < {first} ON CONFLICT DO NOTHING'
        )
    await connection.execute(
        f'INSERT INTO "{fresh}".incidents SELECT * FROM "{old}".incidents ON CONFLICT DO NOTHING'
    )


async def _drop(connection: Connection, schema: str) -> None:
    """Drop a schema, although statements that began before a swap may hold some of its tables and wait for others."""
    for attempt in range(1, DROPS_MAX + 1):
        try:
            await connection.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')
            return
        except asyncpg.TransactionRollbackError:  # we lost a deadlock
            if attempt == DROPS_MAX:
                raise
            await asyncio.sleep(DROP_WAIT_S * attempt)
