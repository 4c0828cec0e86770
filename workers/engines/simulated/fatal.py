"""Prompts that crash the engine's process, to rehearse a request that crashes a real engine."""

import os
import signal
from collections.abc import Sequence

from events.errors import UsageError
from workers.engines.simulated.language import VOCABULARY


class BadFatal(UsageError):
    """The setting does not name the tokens that end the simulated engine's process."""


def read_fatal(text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of token ids. Raise BadFatal."""
    try:
        tokens = tuple(int(one) for one in text.split(","))
    except ValueError:
        raise BadFatal(
            f"fatal_tokens = {text}: expected token ids separated by commas, such as 7,7,7"
        ) from None
    if not all(0 <= token < VOCABULARY for token in tokens):
        raise BadFatal(f"fatal_tokens = {text}: token ids go from 0 to {VOCABULARY - 1}")
    return tokens


def contains(tokens: Sequence[int], wanted: tuple[int, ...]) -> bool:
    """Return whether `wanted` occurs in `tokens` as a consecutive run."""
    size, first = len(wanted), wanted[0]
    return any(
        tokens[place] == first and tuple(tokens[place : place + size]) == wanted
        for place in range(len(tokens) - size + 1)
    )


def crash() -> None:
    """End this process like a failed assertion in a kernel: silently, by SIGABRT."""
    os.kill(os.getpid(), signal.SIGABRT)
