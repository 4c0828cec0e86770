"""A rebuilt projection replaces the old one at one instant, whatever happens to the old one then."""

import asyncpg
import pytest
from store_databases import execute

from controller.adapters.postgres import link as pg_link
from controller.adapters.postgres.store import PostgresStore
from controller.ports import ReadPosition

pytestmark = pytest.mark.servers
SCHEMAS = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'holdfast%' ORDER BY 1"


async def nothing_to_catch_up_with(position: ReadPosition) -> None:
    """Do nothing: the fresh projection has the old one's position."""


async def test_a_swap_succeeds_while_the_old_schema_is_still_read(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pg_link, "COMMAND_S", 0.5)
    store = PostgresStore(database_url)
    fresh = await store.beside()
    reader = await asyncpg.connect(database_url)
    try:
        async with reader.transaction():
            await reader.fetch("SELECT * FROM holdfast.snapshots")  # a slow report
            await store.swap(fresh, nothing_to_catch_up_with, carry=False)
            assert [row[0] for row in await execute(database_url, SCHEMAS)] == ["holdfast", "holdfast_old"]
            assert await store.position() == ReadPosition()
        await (await store.beside()).close()
        assert [row[0] for row in await execute(database_url, SCHEMAS)] == ["holdfast", "holdfast_next"]
    finally:
        await reader.close()
        await store.close()
