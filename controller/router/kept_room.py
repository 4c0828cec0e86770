"""Room at a worker that is kept for requests which were admitted and not sent yet."""

from dataclasses import dataclass


@dataclass(slots=True)
class KeptRoom:
    """The requests that room is kept for, and what they will take as far as that is known."""

    requests: int = 0
    tokens: int = 0  # of their prompts, that have to be read
    blocks: float = 0.0  # of the KV cache
