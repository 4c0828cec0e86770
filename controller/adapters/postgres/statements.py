"""Builds the single statement of a transaction: it moves the position and writes all changed rows.

If the position is not the expected one, nothing changes.
    WITH moved AS (UPDATE projection … WHERE shown_seq = <the expected position> RETURNING 1),
         …     AS (INSERT … SELECT … FROM unnest($n, …) WHERE EXISTS (SELECT FROM moved) ON CONFLICT …)
    SELECT count(*) FROM moved

Several statements in one transaction would take three times as long. Each batch needs different parts, so the
text is assembled from parts; asyncpg keeps each combination prepared.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql

from controller.adapters.postgres import tables

STATE = tuple(table.name for table in tables.STATE)
Rows = Sequence[tuple[Any, ...]]
_dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
_STILL = "EXISTS (SELECT FROM moved)"
_MOVE = """moved AS (UPDATE projection SET shown_seq = $2, shown_id = $3, shown_at = $4, through = $5, decided = $6,
    number = $7, deciders_version = $8, written_at = clock_timestamp()
    WHERE name = 'fleet' AND shown_seq = $1 RETURNING 1)"""
_MOVE_PARAMETERS = 8


def columns(table: Table) -> tuple[str, ...]:
    """Return a table's column names, in order."""
    return tuple(column.name for column in table.columns)


def build(move: Sequence[Any], writes: Mapping[str, Rows]) -> tuple[str, list[Any]]:
    """Return the statement and its parameters. `writes` maps a part ("workers", "delete goldens" …) to its rows."""
    parts = tuple(part for part, rows in writes.items() if rows)
    parameters: list[Any] = list(move)
    for part in parts:
        parameters.extend(list(column) for column in zip(*writes[part], strict=True))
    return _text(parts), parameters


@cache
def _text(parts: tuple[str, ...]) -> str:
    place, pieces = _MOVE_PARAMETERS, [_MOVE]
    for part in parts:
        verb, _, name = part.rpartition(" ")
        table = tables.metadata.tables[name]
        names = _names(verb, table)
        arrays = ", ".join(f"${place + n}::{_array(table, c)}" for n, c in enumerate(names, start=1))
        place += len(names)
        pieces.append(f"{part.replace(' ', '_')}_ AS ({_PARTS.get(verb, _upsert)(table, names, arrays)})")
    return f"WITH {', '.join(pieces)} SELECT count(*) FROM moved"


def _names(verb: str, table: Table) -> tuple[str, ...]:
    if verb == "delete":
        return tuple(column.name for column in table.primary_key)
    if verb == "close":
        return ("incident", "closed_at", "outcome")
    return columns(table)


def _array(table: Table, column: str) -> str:
    return f"{table.c[column].type.compile(_dialect)}[]"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _upsert(table: Table, names: tuple[str, ...], arrays: str) -> str:
    keys = [column.name for column in table.primary_key]
    changes = ", ".join(f'"{n}" = excluded."{n}"' for n in names if n not in keys)
    return (
        f"INSERT INTO {table.name} ({_quoted(names)}) SELECT * FROM unnest({arrays}) WHERE {_STILL} "
        f"ON CONFLICT ({_quoted(keys)}) DO UPDATE SET {changes}"
    )


def _append(table: Table, names: tuple[str, ...], arrays: str) -> str:
    """Return an insert that stores a repeated event (the same ce-id) once."""
    unique = "reach" if table is tables.snapshots else "incident" if table is tables.incidents else "id"
    return (
        f"INSERT INTO {table.name} ({_quoted(names)}) SELECT * FROM unnest({arrays}) WHERE {_STILL} "
        f"ON CONFLICT ({unique}) DO NOTHING"
    )


def _delete(table: Table, names: tuple[str, ...], arrays: str) -> str:
    return (
        f"DELETE FROM {table.name} WHERE ({_quoted(names)}) IN (SELECT * FROM unnest({arrays})) AND {_STILL}"
    )


def _close(table: Table, names: tuple[str, ...], arrays: str) -> str:
    return (
        f"UPDATE {table.name} SET closed_at = v.closed_at, outcome = v.outcome "
        f"FROM unnest({arrays}) AS v({_quoted(names)}) WHERE {table.name}.incident = v.incident AND {_STILL}"
    )


_PARTS = {"append": _append, "delete": _delete, "close": _close}
