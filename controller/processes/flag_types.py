"""Argument types of numeric command-line flags, with their limits."""

import argparse
from collections.abc import Mapping
from typing import Any, TypeAlias

Options: TypeAlias = Mapping[str, Any]
"""The arguments of a flag in `add_argument`."""


def option(text: str, **more: Any) -> Options:
    """Return the keyword arguments of `add_argument` for a flag with this help text."""
    return {"help": text, **more}


def port(text: str) -> int:
    """Parse a port number. Raise ArgumentTypeError."""
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)


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
    """Parse a number of at least 0. Raise ArgumentTypeError."""
    return _number(text, 0, True)


def positive(text: str) -> float:
    """Parse a number above 0. Raise ArgumentTypeError."""
    return _number(text, 0, False)
