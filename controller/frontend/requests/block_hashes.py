"""What are the blocks of a request called? Hashed once for each size of block, however often it is routed.

Requests of one prompt share it: the choices of `n`, and every attempt. Behind the prompt an answer grows, so a request that
moves is looked for with all of its output.
"""

from collections.abc import Sequence

from events.blocks import SEED, follow, local_hashes, sequence_hashes


class BlockNames:
    """The sequence hashes of one prompt."""

    __slots__ = ("_by_size", "_prompt", "_seed")

    def __init__(self, prompt: list[int], seed: int = SEED) -> None:
        """Name the blocks of `prompt`. `seed` keeps apart what may not be shared (`events.blocks.seed`)."""
        self._prompt = prompt
        self._seed = seed
        self._by_size: dict[int, list[int]] = {}

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
