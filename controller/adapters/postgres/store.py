"""The state store in Postgres: rows of the fleet's state, all events, snapshots and a position.

The position is that of the last projected event on the journal. A batch of events is written only if the position is exactly the
start of the batch. So each event is projected once, even if a projector is killed or two projectors run.

The projector's connection does not wait for the disk (`synchronous_commit = off`). A crash may lose the last transactions, but
each transaction is lost as a whole, with its rows and its position. Their events are then projected again from the journal.
"""

import asyncio
from collections.abc import Sequence

import asyncpg
import structlog

from controller.adapters.postgres.audit_helper import AuditHelper, HelperPolicy
from controller.adapters.postgres.link import SCHEMA, WRITES, Connection, Link
from controller.adapters.postgres.reader import RowReader, read_position
from controller.adapters.postgres.writer import Writer
from controller.deciders.fleet import Fleet
from controller.ports import CatchUp, ReadPosition, Snapshot, StoreLook
from events.errors import HoldfastError
from events.fact import Recorded

DROPS_MAX = 8  # attempts to drop a schema; Postgres takes a second to detect a deadlock
DROP_WAIT_S = 0.05
SNAPSHOT_EVERY = 5_000  # events between snapshots, which a starting process or time travel must fold at most

log = structlog.get_logger(__name__)


class PostgresStore(RowReader):
    """The access of one process to the state store: reads, projects, and rebuilds in a second schema."""

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
        self._writer = Writer(self._link, snapshot_every)

    async def project(self, events: Sequence[Recorded], shown: Fleet, settled: Snapshot, after: int) -> None:
        """Write the changes of a batch of events in one transaction.

        If a helper process writes the audit rows, it does so in its own transactions. `shown` is the fleet after the batch, and
        `settled` the state after the last decision. Raise AnotherProjector if the store is not at the stream sequence `after`,
        and StoreUnavailable if the database cannot be reached.
        """
        helped = self._helper is not None and await self._helper.write(events)
        await self._writer.project(events, shown, settled, after, audit=not helped)

    async def look(self) -> StoreLook:
        """Check the store for lost rows and return the result. The next batch writes missing rows of the fleet's state again."""
        await self.complete()
        await self._writer.recount()
        return await super().look()

    # --- rebuilding in a second schema ------------------------------------------------------------------------------

    async def beside(self) -> "PostgresStore":
        """Create and return an empty store in a second schema. Drop the schemas that an interrupted rebuild has left."""
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
        """Replace this store's schema by the schema of `fresh`, in one transaction.

        A running projector waits for the transaction, so the position stays fixed while `catch_up` brings the fresh store up to
        this position. Readers do not wait. Afterwards the projector finds the new tables under the old name. If `carry` is true,
        history that the journal no longer has is copied to the fresh store.
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
        except HoldfastError as error:  # the swap has succeeded, and the next `beside` drops the old schema
            log.warning("old_projection_not_dropped", schema=old, why=str(error))

    @property
    def helper_pid(self) -> int | None:
        """The pid of the helper process that writes this store's audit table; None if no helper runs."""
        return self._helper.pid if self._helper is not None else None

    async def complete(self) -> None:
        """Wait until the helper process has written the audit rows of all projected events.

        Raise AuditFailed if the helper has ended or hangs.
        """
        if self._helper is not None:
            await self._helper.flush()

    async def close(self) -> None:
        """End the helper process and close the connections to the database."""
        if self._helper is not None:
            await self._helper.close()
        await self._link.close()
        await super().close()


async def _carry(connection: Connection, old: str, fresh: str) -> None:
    """Copy the history that the schema `fresh` lacks from the schema `old`.

    Two kinds of rows are copied: those of events before the first event of `fresh`, and those of incidents that `fresh` lacks.
    """
    first = f'(SELECT coalesce(min(seq), 0) FROM "{fresh}".fleet_events)'
    for table in ("migrations", "exposures", "fleet_events"):
        await connection.execute(
            f'INSERT INTO "{fresh}".{table} SELECT * FROM "{old}".{table} WHERE seq < {first} ON CONFLICT DO NOTHING'
        )
    await connection.execute(
        f'INSERT INTO "{fresh}".incidents SELECT * FROM "{old}".incidents ON CONFLICT DO NOTHING'
    )


async def _drop(connection: Connection, schema: str) -> None:
    """Drop a schema. Statements that began before a swap may still use its tables: after a deadlock, try again."""
    for attempt in range(1, DROPS_MAX + 1):
        try:
            await connection.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')
            return
        except asyncpg.TransactionRollbackError:  # Postgres resolved a deadlock by cancelling this statement
            if attempt == DROPS_MAX:
                raise
            await asyncio.sleep(DROP_WAIT_S * attempt)
