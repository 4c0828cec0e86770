"""Detects losses without reading everything: a few index look-ups, whatever the history's length.

Each table of history must hold the oldest and the newest row that the kept events require. A truncated table, or one from an
older backup, lacks one of them. Rows missing from the middle are found by `holdfast replay verify`.
"""

from controller.adapters.postgres.link import Connection
from controller.ports import StoreLook

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
    """Return the result of a quick check."""
    row = await connection.fetchrow(_LOOK)
    lost = tuple(table for table in ("projection", *_ROWS_OF) if row[table])
    return StoreLook(lost, row["first"], row["last"])
