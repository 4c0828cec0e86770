"""Compares the rows of the state store with the expected rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from controller.deciders.fleet import Fleet
from controller.read_model import rows as projection
from controller.read_model.rows import Row

FoundRows = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class RowDifference:
    """One difference between stored and expected rows: a different value, a missing row or a superfluous row."""

    where: str  # table, column and key of the difference
    expected: object  # the expected value or row; None: no row is expected
    found: object  # the stored value or row; None: the row is missing

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, found {self.found}"


def differs_from(fleet: Fleet, rows: Mapping[str, FoundRows]) -> Iterator[RowDifference]:
    """Yield the differences between stored rows and the rows that follow from a fleet's state.

    `rows` maps each table to its stored rows.
    """
    for table, expected in projection.state(fleet).items():
        yield from differences(table, expected, rows[table])


def differences(
    table: str, expected: Sequence[Row], found: FoundRows, *, complete: bool = True
) -> Iterator[RowDifference]:
    """Yield the differences between the stored rows and the expected rows of a table.

    If `complete` is False, superfluous stored rows do not count as differences."""
    width, columns = projection.KEYS.get(table, 1), projection.COLUMNS[table]
    stored = {}
    for mapping in found:
        row = projection.comparable(table, tuple(mapping[column] for column in columns))
        stored[row[:width]] = row
    for row in expected:
        ours = projection.comparable(table, row)
        theirs = stored.pop(ours[:width], None)
        if ours != theirs:
            yield _difference(table, ours, theirs)
    if complete:
        for key, row in stored.items():
            yield RowDifference(f"{table}: row {_name(key)}", None, _named(table, row))


def _difference(table: str, ours: Row, theirs: Row | None) -> RowDifference:
    key = _name(ours[: projection.KEYS.get(table, 1)])
    if theirs is None:
        return RowDifference(f"{table}: row {key}", _named(table, ours), None)
    columns = projection.COLUMNS[table]
    n = next(n for n in range(len(columns)) if ours[n] != theirs[n])
    return RowDifference(f"{table}: {columns[n]} of {key}", plain(ours[n]), plain(theirs[n]))


def _name(key: Row) -> str:
    return "/".join(map(str, key))


def _named(table: str, row: Row) -> dict[str, object]:
    return {name: plain(value) for name, value in zip(projection.COLUMNS[table], row, strict=True)}


def first_difference(ours: object, theirs: object, path: str = "") -> tuple[str, object, object]:
    """Return the first difference of two JSON values.

    The result is the path of the difference, such as `.top_k[3]`, and the two values at that path.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            if key not in ours or key not in theirs or ours[key] != theirs[key]:
                return first_difference(ours.get(key), theirs.get(key), f"{path}.{key}")
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if one != other:
                return first_difference(one, other, f"{path}[{n}]")
    return path, ours, theirs


def plain(value: object) -> object:
    """Return a column's value unchanged if its type exists in JSON, else as text."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)
