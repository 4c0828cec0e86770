"""Puts a projection aside that no journal can make again: what is in it is all that is left of a history."""

from controller.adapters.postgres.link import Link
from controller.adapters.postgres.schema import SCHEMA


async def rename(url: str, name: str) -> None:
    """Give the schema another name. Raise StoreUnavailable or StoreRefused."""
    link = Link(url)
    try:
        async with link.use() as connection:
            await connection.execute(f'ALTER SCHEMA "{SCHEMA}" RENAME TO "{name}"')
    finally:
        await link.close()
