"""The one base of every error that Holdfast raises on purpose.

Beside each port stand the two or three errors that it may raise. Each docstring is the error's message when no
other is given: it says what was wrong and what to do.
"""

import os

QUARANTINE = "holdfast journal quarantine"  # and a sequence: the way past an event at which everybody stops


class HoldfastError(Exception):
    """Holdfast could not do what was asked."""

    def __str__(self) -> str:
        text = super().__str__() or self.__doc__ or ""
        return " ".join(text.split())  # docstrings are wrapped; a message is one line


class Finding(HoldfastError):
    """Something is not as it must be, and somebody can mend it: exit code 3."""


class UsageError(HoldfastError):
    """What was asked for makes no sense. A command ends with exit code 2, and trying again would not help."""


class BadSetting(UsageError):
    """A setting has a value that makes no sense, or there is no such setting."""


def os_reason(error: OSError) -> str:
    """Return an operating system's error in its own words, without what Python adds: `Connection refused`."""
    number = error.errno or 0  # name resolution has numbers of its own, below 0
    return (os.strerror(number) if number > 0 else error.strerror) or str(error) or type(error).__name__
