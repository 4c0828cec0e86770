"""Renames the schema of a projection to preserve it: its journal is lost, so it cannot be rebuilt."""

from controller.adapters.postgres.link import Link
from controller.adapters.postgres.schema import SCHEMA


async def rename(url: str, name: str) -> None:
    """Rename the schema. Raise StoreUnavailable or StoreRefused."""
    link = Link(url)
    try:
        async with link.use() as connection:
            await connection.execute(f'ALTER SCHEMA "{SCHEMA}" RENAME TO "{name}"')
    finally:
        await link.close()
