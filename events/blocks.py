"""Computes the hashes that name blocks of prompt tokens.

    local hash      L[i] = XXH3-64 of the token ids of block i (each unsigned, 4 bytes, little endian), seed 1337
    sequence hash   names block i together with all blocks before it: S[0] = L[0], and
                    S[i] = XXH3-64 of the 16 bytes of S[i-1] and L[i] (8 bytes each, little endian), seed 1337

NVIDIA Dynamo's router uses the same hashes, so that Holdfast and Dynamo give a block the same name. Only full blocks have a
hash. A LoRA adapter or a cache namespace changes the seed of the local hashes, so that adapters and namespaces share no blocks.
"""

import sys
from array import array
from collections.abc import Sequence
from itertools import accumulate
from struct import Struct

from xxhash import xxh3_64_intdigest

SEED = 1337
_SKETCHED = 16  # approximate number of tokens that the sketch of a prompt samples
_TYPE = next(code for code in "IL" if array(code).itemsize == 4)  # of a token id
_pair = Struct("<QQ").pack


def seed(*, lora: str = "", namespace: str = "") -> int:
    """Return the seed of the local hashes for a LoRA adapter and a cache namespace. If both are empty, the seed is 1337."""
    if not lora and not namespace:
        return SEED
    names = (namespace.encode(), lora.encode())
    return xxh3_64_intdigest(b"".join(len(name).to_bytes(4, "little") + name for name in names), SEED)


def local_hashes(tokens: Sequence[int], block_tokens: int, seed: int = SEED) -> list[int]:
    """Return the local hash of each full block of `tokens`; an incomplete last block is ignored. Raise ValueError for a
    block size below 1, OverflowError for an invalid token id."""
    if block_tokens < 1:
        raise ValueError(f"a block has at least one token, not {block_tokens}")
    try:
        words = array(_TYPE, tokens)
    except (OverflowError, TypeError) as error:
        raise OverflowError(f"a token is a whole number from 0 to 2**32 - 1: {error}") from error
    if sys.byteorder == "big":
        words.byteswap()
    packed, size = words.tobytes(), block_tokens * words.itemsize
    return [xxh3_64_intdigest(packed[at : at + size], seed) for at in range(0, len(packed) - size + 1, size)]


def local_hash(packed: bytes, seed: int = SEED) -> int:
    """Return the local hash of one full block. `packed` holds its token ids, 4 bytes each, little endian."""
    return xxh3_64_intdigest(packed, seed)


def sequence_hashes(local: Sequence[int]) -> list[int]:
    """Return the sequence hash of each block of a prompt, given the local hashes of all its blocks in order."""
    return list(accumulate(local, follow))


def follow(parent: int, local: int) -> int:
    """Return the sequence hash of a block, given the sequence hash of the block before (`parent`) and its own local hash."""
    return xxh3_64_intdigest(_pair(parent, local), SEED)


class BlockNames:
    """Computes the sequence hashes of one prompt once per block size, and caches them for later routing of the same prompt.

    All choices (`n`) and all attempts of a completion use the same object, because they have the same prompt. A migrated request
    already has output, and its hashes cover the prompt followed by that output.
    """

    __slots__ = ("_by_size", "_prompt", "_seed", "sketch")

    def __init__(self, prompt: list[int], seed: int = SEED) -> None:
        """Store the prompt. `seed` is the result of the function `seed` for the request's adapter and namespace."""
        self._prompt = prompt
        self._seed = seed
        self._by_size: dict[int, list[int]] = {}
        # A short hash of the prompt, equal in every process and nearly always unique. Takes 1 µs at any length.
        self.sketch = hash((len(prompt), *prompt[:: len(prompt) // _SKETCHED or 1], *prompt[-1:]))

    def of(self, block_tokens: int, output: Sequence[int] = ()) -> list[int]:
        """Return the sequence hashes of the prompt followed by `output`, for full blocks of `block_tokens` tokens."""
        names = self._by_size.get(block_tokens)
        if names is None:
            names = sequence_hashes(local_hashes(self._prompt, block_tokens, self._seed))
            self._by_size[block_tokens] = names
        tail = len(self._prompt) - len(names) * block_tokens + len(output)
        return names if tail < block_tokens else self._extend(names, block_tokens, output)

    def _extend(self, names: list[int], block_tokens: int, output: Sequence[int]) -> list[int]:
        names = list(names)
        rest = [*self._prompt[len(names) * block_tokens :], *output]
        for own in local_hashes(rest, block_tokens, self._seed):
            names.append(follow(names[-1], own) if names else own)
        return names
