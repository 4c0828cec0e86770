"""Which prompts end the engine's process? So that it can be rehearsed what a request does that crashes a real engine."""

import os
import signal
from collections.abc import Sequence

from events.errors import UsageError
from workers.engines.simulated.language import VOCABULARY


class BadFatal(UsageError):
    """It is not said which tokens shall end the simulated engine's process."""


def read_fatal(text: str) -> tuple[int, ...]:
    """Return the token ids of a list with commas. Raise BadFatal."""
    try:
        tokens = tuple(int(one) for one in text.split(","))
    except ValueError:
        raise BadFatal(
            f"fatal_tokens = {text}: expected token ids with commas between them, such as 7,7,7"
        ) from None
    if not all(0 <= token < VOCABULARY for token in tokens):
        raise BadFatal(f"fatal_tokens = {text}: token ids go from 0 to {VOCABULARY - 1}")
    return tokens


def contains(tokens: Sequence[int], wanted: tuple[int, ...]) -> bool:
    """Say whether `wanted` stands somewhere in `tokens`, in a row."""
    size, first = len(wanted), wanted[0]
    return any(
        tokens[place] == first and tuple(tokens[place : place + size]) == wanted
        for place in range(len(tokens) - size + 1)
    )


def crash() -> None:
    """End this process as a failed assertion in a kernel does: without a word, by SIGABRT."""
    os.kill(os.getpid(), signal.SIGABRT)
