"""The data of the console page as plain values, and the changes between two versions of it.

    sections = {"workers": {"w0": row, …}, "models": {…}, …}        everything: a snapshot
    changes  = {"workers": {"w0": row, "w7": None}}                 new, changed and removed rows

A page that applies changes must arrive at the content of the next snapshot. A property test checks this.
"""

from collections.abc import Mapping
from typing import Any

Sections = Mapping[str, Mapping[str, Any]]
"""By section, then by key. A row compares by value and is never None."""
Changes = dict[str, dict[str, Any]]


def changes(before: Sections, after: Sections) -> Changes:
    """Return the new and changed rows of `after`, and None for each removed key. Both have the same sections."""
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
    """Return the sections after changes, as console.js applies them."""
    found = {section: dict(rows) for section, rows in before.items()}
    for section, rows in new.items():
        for key, row in rows.items():
            if row is None:
                found[section].pop(key, None)
            else:
                found[section][key] = row
    return found
