"""Argument types of numeric command-line flags, with their limits."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Options: TypeAlias = Mapping[str, Any]
"""The arguments of a flag in `add_argument`."""


def option(text: str, **more: Any) -> Options:
    """Return the keyword arguments of `add_argument` for a flag with this help text."""
    return {"help": text, **more}


def port(text: str) -> int:
    """Parse a port number. Raise ArgumentTypeError if `text` is not a number from 1 to 65535."""
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)


def count_to(most: int) -> Callable[[str], int]:
    """Return a function that parses a number from 1 to `most`, and raises ArgumentTypeError for any other text."""

    def count(text: str) -> int:
        if not text.isdigit() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {most}")
        return int(text)

    return count


def _number(text: str, least: float, inclusive: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (value >= least if inclusive else value > least) or value == float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number {'of at least' if inclusive else 'above'} {least:g}"
        )
    return value


def not_negative(text: str) -> float:
    """Parse a number of at least 0. Raise ArgumentTypeError for any other text."""
    return _number(text, 0, True)


def positive(text: str) -> float:
    """Parse a number above 0. Raise ArgumentTypeError for any other text."""
    return _number(text, 0, False)
