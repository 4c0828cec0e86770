"""Room at a worker that is kept for requests which were admitted and not sent yet."""

from dataclasses import dataclass


@dataclass(slots=True)
class KeptRoom:
    """What requests that room is kept for will take."""

    tokens: int = 0  # of their prompts, that have to be read
    blocks: float = 0.0  # of the KV cache
