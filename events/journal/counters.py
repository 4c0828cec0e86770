"""What the journal has done since the process began, for the metrics."""

from dataclasses import dataclass


@dataclass
class JournalCounters:
    """Plain counts; each only grows."""

    observed: int = 0
    acknowledged: int = 0
    retried: int = 0  # sent again
    dropped: int = 0  # facts that did not fit, or that the broker will never take
    appends: int = 0
    appends_fenced: int = 0
    appends_unknown: int = 0
