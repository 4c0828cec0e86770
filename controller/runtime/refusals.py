"""Why is an operator refused?"""

from events.errors import HoldfastError


class UnknownWorker(HoldfastError):
    """There is no worker of that name; `holdfast status` lists them."""


class NotPossible(HoldfastError):
    """What was asked for cannot be done to this worker now."""


class Unanswered(NotPossible):
    """The worker does not answer."""


class ChaosRefused(HoldfastError):
    """Rehearsed faults are refused: this fleet was not started with --chaos."""
