"""What are the blocks of a request called, and which requests are alike? Hashed once for each size of block, however often it is
routed.

Requests of one prompt share it: the choices of `n`, and every attempt. Behind the prompt an answer grows, so a request that
moves is looked for with all of its output.
"""

import json
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from events.blocks import SEED, follow, local_hashes, sequence_hashes

SKETCH_MASK = 2**64 - 1
SKETCHED = 16  # tokens of a prompt that its sketch looks at, about


class BlockNames:
    """The sequence hashes of one prompt."""

    __slots__ = ("_by_size", "_prompt", "_seed", "sketch")

    def __init__(self, prompt: list[int], seed: int = SEED) -> None:
        """Name the blocks of `prompt`. `seed` keeps apart what may not be shared (`events.blocks.seed`)."""
        self._prompt = prompt
        self._seed = seed
        self._by_size: dict[int, list[int]] = {}
        # Equal for equal prompts, nearly always different for others, in every process, and in a microsecond however long it is.
        self.sketch = hash((len(prompt), *prompt[:: len(prompt) // SKETCHED or 1], *prompt[-1:]))

    def of(self, block_tokens: int, output: Sequence[int] = ()) -> list[int]:
        """Return the names of the full blocks of the prompt and the output after it, for blocks of this size."""
        names = self._by_size.get(block_tokens)
        if names is None:
            names = sequence_hashes(local_hashes(self._prompt, block_tokens, self._seed))
            self._by_size[block_tokens] = names
        tail = len(self._prompt) - len(names) * block_tokens + len(output)
        return names if tail < block_tokens else self._go_on(names, block_tokens, output)

    def _go_on(self, names: list[int], block_tokens: int, output: Sequence[int]) -> list[int]:
        names = list(names)
        rest = [*self._prompt[len(names) * block_tokens :], *output]
        for own in local_hashes(rest, block_tokens, self._seed):
            names.append(follow(names[-1], own) if names else own)
        return names


def fingerprint(sketch: int, model: str, prompt: Sequence[int], guided: dict[str, Any] | None) -> str:
    """Return 32 hexadecimal digits that are the same for requests of the same prompt and form, whoever sends them: the sketch,
    and 64 bits of BLAKE2b. Nothing of the text can be read from them, but who guesses the whole prompt can find out that he
    is right."""
    exact = blake2b(json.dumps([model, guided], sort_keys=True, default=str).encode(), digest_size=8)
    exact.update(array("Q", prompt).tobytes())
    return f"{sketch & SKETCH_MASK:016x}{exact.hexdigest()}"


def sketch_of(fingerprint: str) -> int:
    """Return the sketch in a fingerprint. Raise ValueError if it is none."""
    if len(fingerprint) != 32:
        raise ValueError("a fingerprint has 32 digits")
    found = int(fingerprint[:16], 16)
    return found - SKETCH_MASK - 1 if found >> 63 else found
