"""Writes the rows of `fleet_events`, which depend on the events only, not on the fold."""

from collections.abc import Sequence

import asyncpg

from controller.adapters.postgres.link import Connection
from controller.read_model import rows as projection
from events.errors import HoldfastError

_INSERT = (
    f"INSERT INTO fleet_events ({', '.join(projection.EVENT_COLUMNS)}) "
    f"VALUES ({', '.join(f'${n}' for n, _ in enumerate(projection.EVENT_COLUMNS, 1))}) ON CONFLICT (id) DO NOTHING"
)


class Repeated(HoldfastError):
    """An event is in the batch twice, or in the table already."""


async def copy(connection: Connection, rows: Sequence[projection.Row]) -> None:
    """Append all rows or none. Raise Repeated."""
    try:
        await connection.copy_records_to_table("fleet_events", records=rows, columns=projection.EVENT_COLUMNS)
    except asyncpg.UniqueViolationError as error:
        raise Repeated from error


async def record(connection: Connection, rows: Sequence[projection.Row]) -> None:
    """Append the rows that are not in the table yet."""
    try:
        await copy(connection, rows)
    except Repeated:
        await connection.executemany(_INSERT, rows)
