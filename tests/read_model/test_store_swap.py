"""A rebuilt projection takes the old one's place at one instant; what then happens to the old one changes nothing."""

import asyncpg
import pytest
from store_databases import execute

from controller.adapters.postgres import link as pg_link
from controller.adapters.postgres.store import PostgresStore
from controller.ports import ReadPosition

pytestmark = pytest.mark.servers
SCHEMAS = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'holdfast%' ORDER BY 1"


async def nothing_to_catch_up_with(position: ReadPosition) -> None:
    """The fresh one is as far as the old one."""


async def test_a_swap_whose_old_schema_somebody_still_reads_has_succeeded(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pg_link, "COMMAND_S", 0.5)
    store = PostgresStore(database_url)
    fresh = await store.beside()
    reader = await asyncpg.connect(database_url)
    try:
        async with reader.transaction():
            await reader.fetch("SELECT * FROM holdfast.snapshots")  # a report that takes its time
            await store.swap(fresh, nothing_to_catch_up_with, carry=False)
            assert [row[0] for row in await execute(database_url, SCHEMAS)] == ["holdfast", "holdfast_old"]
            assert await store.position() == ReadPosition()
        await (await store.beside()).close()
        assert [row[0] for row in await execute(database_url, SCHEMAS)] == ["holdfast", "holdfast_next"]
    finally:
        await reader.close()
        await store.close()
