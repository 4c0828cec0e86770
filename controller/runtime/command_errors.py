"""Errors that refuse an operator's command."""

from events.errors import HoldfastError


class UnknownWorker(HoldfastError):
    """There is no worker of that name; `holdfast status` lists the workers."""


class NotPossible(HoldfastError):
    """The command cannot be applied to this worker now."""


class Unanswered(NotPossible):
    """The worker does not answer."""


class ChaosRefused(HoldfastError):
    """Fault injection is off: this fleet was not started with --chaos."""
