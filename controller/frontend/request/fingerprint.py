"""Fingerprints of requests by model, prompt and output constraint. They are equal in all processes."""

import json
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

SKETCH_MASK = 2**64 - 1


def fingerprint(sketch: int, model: str, prompt: Sequence[int], guided: dict[str, Any] | None) -> str:
    """Return 32 hexadecimal digits that identify requests with the same model, prompt and output constraint, from any client.

    The first 16 digits are the prompt's `sketch`, the others are 64 bits of BLAKE2b. The prompt cannot be recovered from a
    fingerprint, but a guess of the whole prompt can be confirmed.
    """
    exact = blake2b(json.dumps([model, guided], sort_keys=True, default=str).encode(), digest_size=8)
    exact.update(array("Q", prompt).tobytes())
    return f"{sketch & SKETCH_MASK:016x}{exact.hexdigest()}"


def sketch_of(fingerprint: str) -> int:
    """Return the sketch in a fingerprint. Raise ValueError if the fingerprint is invalid."""
    if len(fingerprint) != 32:
        raise ValueError("a fingerprint has 32 digits")
    found = int(fingerprint[:16], 16)
    return found - SKETCH_MASK - 1 if found >> 63 else found
