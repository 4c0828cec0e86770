"""Garbage collector settings: objects alive at startup are frozen, full passes are rare.

A full pass over all live objects takes tens of milliseconds, during which nothing else runs. Events, states and requests leave
no reference cycles, so rare passes suffice.
"""

import gc

COLLECT_AT = (20_000, 20, 50)
COLLECT_HISTORY_AT = (500_000, 20, 50)  # while reading a whole journal


def freeze_and_tune(collect_at: tuple[int, int, int] = COLLECT_AT) -> None:
    """Freeze all objects that are alive now, and collect the rest rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*collect_at)
