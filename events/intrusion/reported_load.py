"""Checks the load that a worker reports against bounds that no engine exceeds.

An impossible value from one worker would affect the requests of other workers. For example, a full worker reports the number of
seconds after which it will accept requests again, and a frontend uses the minimum over all workers. A report of −10⁹ s would
always be that minimum. With NaN, every comparison is false.
"""

from collections.abc import Mapping
from math import isfinite

from events.wire import Beat, Load

COUNT_MAX = 1 << 40  # requests, blocks or tokens
CLOSED_S_MAX = 86_400.0  # the longest Retry-After
AGE_MS_MAX = 1e10  # age of the current engine step
_COUNTS = tuple(name for name in Load.__struct_fields__ if name not in ("closed_s", "weight"))


def impossible_beat(beat: Beat) -> str:
    """Return the first impossible value of a heartbeat on the request plane as `name = value`. Return an empty string if all
    values are possible."""
    if not (isfinite(beat.step_age_ms) and 0 <= beat.step_age_ms <= AGE_MS_MAX):
        return f"step_age_ms = {beat.step_age_ms!r}"
    if not 0 <= beat.prefill_tokens <= COUNT_MAX:
        return f"prefill_tokens = {beat.prefill_tokens!r}"
    return next(filter(None, map(impossible_load, (beat.load, *beat.ranks))), "")


def impossible_load(load: Load) -> str:
    """Return the first impossible value of a load as `name = value`. Return an empty string if all values are possible."""
    for name in _COUNTS:
        if not 0 <= (count := getattr(load, name)) <= COUNT_MAX:
            return f"{name} = {count!r}"
    if not (isfinite(load.closed_s) and 0 <= load.closed_s <= CLOSED_S_MAX):
        return f"closed_s = {load.closed_s!r}"
    if not 0 <= load.weight <= 1:
        return f"weight = {load.weight!r}"
    return ""


def counts(said: Mapping[str, object]) -> dict[str, int]:
    """Return the counts of `Load` that a worker states in its heartbeat on the message bus, by name.

    `said` is the load in the decoded heartbeat. Names that `Load` does not have are omitted. Raise ValueError for an impossible
    count.
    """
    found: dict[str, int] = {}
    for name in _COUNTS:
        count = said.get(name, 0)
        if not (isinstance(count, int) and 0 <= count <= COUNT_MAX):
            raise ValueError(f"{name} = {count!r}"[:80])
        if name in said:
            found[name] = count
    return found
