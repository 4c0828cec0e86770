"""What lies in a KV block of the simulated engine?

    a block    [token][filler], zeros where no token is yet
    a token    the hash of the whole prefix up to it and of the rank, over and over

So a byte that was lost, doubled, altered or put into another place, block, rank or request shows, as do tokens that
differ anywhere before it. Nothing of this is stored: it is made where a block leaves, and again where it arrived.
"""

from collections.abc import Iterable, Mapping, Sequence

import xxhash

from workers.engines.simulated import language
from workers.engines.simulated.language import TOKEN_BYTES
from workers.engines.simulated.sequence import EngineShape

_DIGEST_BYTES = 16


class Contents:
    """The tokens of one sequence, and the bytes of its blocks. Both grow with it."""

    def __init__(self, shape: EngineShape, tokens: Sequence[int]) -> None:
        """Begin with these tokens."""
        self.tokens: list[int] = []
        self._shape = shape
        self._token_bytes = shape.kv_block_bytes // shape.block_tokens
        self._hash = language.open_sequence(shape.model, ())
        self._prefixes: list[bytes] = []  # of each token, with it
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Go on with these tokens."""
        for token in tokens:
            self._add(token)

    def grow(self, length: int, unusual: Mapping[int, int]) -> None:
        """Say on until there are so many tokens: at each position its plain one, or what `unusual` has there."""
        for place in range(len(self.tokens), length):
            token = unusual.get(place)
            self._add(language.plain_token(self._hash.intdigest()) if token is None else token)

    def block(self, rank: int, index: int, computed: int) -> bytes:
        """Return a block of one rank, when the KV of the first `computed` tokens is there."""
        first, size = index * self._shape.block_tokens, self._shape.block_tokens
        times = -(-self._token_bytes // _DIGEST_BYTES)
        held = [
            (xxhash.xxh3_128_digest(prefix, seed=rank) * times)[: self._token_bytes]
            for prefix in self._prefixes[first : min(first + size, computed)]
        ]
        return b"".join(held).ljust(self._shape.kv_block_bytes, b"\0")

    def _add(self, token: int) -> None:
        self._hash.update(TOKEN_BYTES[token])
        self._prefixes.append(self._hash.digest())
        self.tokens.append(token)
