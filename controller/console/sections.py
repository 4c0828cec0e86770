"""What is shown, as plain values, and what has changed of it.

    sections = {"workers": {"w0": row, …}, "models": {…}, …}        all of it: a snapshot
    changes  = {"workers": {"w0": row, "w7": None}}                 what is new, and what is gone

A page that applies changes to what it has must come to what the next snapshot would say: a property test holds it.
"""

from collections.abc import Mapping
from typing import Any

Sections = Mapping[str, Mapping[str, Any]]
"""By section, then by key; a row compares by value and is never None."""
Changes = dict[str, dict[str, Any]]


def changes(before: Sections, after: Sections) -> Changes:
    """Return what of `after` is new or other than before, and None for each key that is gone. Both have the same sections."""
    found: Changes = {}
    for section, rows in after.items():
        known = before[section]
        if rows is known:
            continue
        new = {key: row for key, row in rows.items() if (old := known.get(key)) is not row and old != row}
        new |= {key: None for key in known if key not in rows}
        if new:
            found[section] = new
    return found


def applied(before: Sections, new: Changes) -> Sections:
    """Return what a page has after changes: what console.js does with them."""
    found = {section: dict(rows) for section, rows in before.items()}
    for section, rows in new.items():
        for key, row in rows.items():
            if row is None:
                found[section].pop(key, None)
            else:
                found[section][key] = row
    return found
