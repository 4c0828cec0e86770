"""The collector of cycles, kept calm: what lives at the start of a process lives to its end.

A full pass over everything that is alive takes tens of milliseconds, during which nothing else happens; events,
states and requests leave no cycles behind, so it is enough to look rarely.
"""

import gc

COLLECT_AT = (20_000, 20, 50)
COLLECT_HISTORY_AT = (500_000, 20, 50)  # while a whole journal is read


def calm(collect_at: tuple[int, int, int] = COLLECT_AT) -> None:
    """Set what lives now aside, and look at the rest rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*collect_at)
