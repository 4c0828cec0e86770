"""What the journal has done since the process began, for the metrics."""

from dataclasses import dataclass


@dataclass
class JournalCounters:
    """Plain counts; each only grows."""

    observed: int = 0
    acknowledged: int = 0
    retried: int = 0  # sent again
    refused: int = 0  # publications that the broker answered with an error
    dropped: int = 0  # facts that did not fit, or that the broker will never take
    renumbered: int = 0  # said again under a new number, having been overtaken
    inherited: int = 0  # facts that an earlier process had left
    batches: int = 0  # of observations
    appends: int = 0
    appends_fenced: int = 0
    appends_unknown: int = 0
    reads_resumed: int = 0  # consumers made anew
    spool_damaged: int = 0  # places in earlier processes' spools that could not be read
