"""Defines the base class of every error that Holdfast raises itself.

Each interface (port) defines the two or three errors that it may raise. The docstring of an error class is the default message of
the error, which states what failed and what to do.
"""

import os

# with a stream sequence: quarantines an event at which every reader stops
QUARANTINE = "holdfast journal quarantine"


class HoldfastError(Exception):
    """Holdfast could not do what was requested."""

    def __str__(self) -> str:
        text = super().__str__() or self.__doc__ or ""
        return " ".join(text.split())  # docstrings are wrapped; a message is one line


class Finding(HoldfastError):
    """Something is not as it must be, and an operator can repair it: exit code 3."""


class UsageError(HoldfastError):
    """What was requested is not valid. A command ends with exit code 2, and trying again would not help."""


class BadSetting(UsageError):
    """A setting has an invalid value, or does not exist."""


def os_reason(error: OSError) -> str:
    """Return the operating system's text for an error, such as `Connection refused`, without the number and path that Python
    adds."""
    number = error.errno or 0  # name resolution errors have numbers below 0, which strerror does not know
    return (os.strerror(number) if number > 0 else error.strerror) or str(error) or type(error).__name__
