"""Tracks which KV cache blocks are free, held, or kept for prompts with the same prefix.

    free ── take ──▶ held by one ── name ──▶ held, by any number ── last release ──▶ idle ── evicted ──▶ free
      ▲                  │                       ▲                                     │
      └──── release ─────┘                       └────────────── share ────────────────┘

A full computed block gets the name of its prefix (`events.blocks`), and then never changes again. If no other block is free,
idle blocks are reused, the one released longest ago first; the end of a prompt goes before its beginning. Changes of names are
announced. A name is a hash, and a prompt could be crafted to match another's, so the tokens are compared, too.

No torch, no clock, no thread.
"""

from collections.abc import Sequence

from events.kv import Cleared, KvEvent, Removed, Stored


class Blocks:
    """The blocks of one engine. The lowest free block is taken first, so that blocks in use stay close together."""

    def __init__(self, count: int, tokens: int) -> None:
        self.count = count
        self.tokens = tokens
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._idle: dict[int, None] = {}  # blocks with a name and no holder, in the order of their reuse
        self._named: dict[int, int] = {}  # name -> block
        self._names: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its name and its tokens
        self._events: list[KvEvent] = []

    @property
    def free(self) -> int:
        """Number of blocks that can be taken."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of blocks with a holder."""
        return self.count - self.free

    @property
    def takeable(self) -> list[int]:
        """The blocks that can be taken."""
        return [*self._free, *self._idle]

    @property
    def holders(self) -> list[int]:
        """Number of holders of each block."""
        return list(self._holders)

    @property
    def named(self) -> dict[int, int]:
        """The blocks that have a name, as a map from name to block."""
        return dict(self._named)

    def name_of(self, block: int) -> int | None:
        """Return a block's name; None if it has none."""
        found = self._names.get(block)
        return None if found is None else found[0]

    def needed(self, tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return -(-tokens // self.tokens)

    def take(self) -> int:
        """Return a block without other holders; the caller must clear its contents."""
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            self._forget(block)
        self._holders[block] = 1
        return block

    def give_back(self, blocks: list[int]) -> None:
        """Release the blocks of one request."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._names:
                    self._idle[block] = None
                else:
                    self._free.append(block)
        self._free.sort(reverse=True)
        blocks.clear()

    # --- shared prefixes

    def find(self, names: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return the blocks of the longest cached prefix of `tokens`."""
        found: list[int] = []
        for place, name in enumerate(names):
            block = self._named.get(name)
            first = place * self.tokens
            if block is None or self._names[block][1] != tuple(tokens[first : first + self.tokens]):
                break
            found.append(block)
        return found

    def unheld(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks have no holder, so that `free` counts them."""
        return sum(not self._holders[block] for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Add a holder to blocks with a name."""
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def name(self, block: int, name: int, parent: int | None, tokens: Sequence[int]) -> None:
        """Give a full block its name, so that other requests can find it.

        If another block has the name, or no block has the name of its parent, the block stays private to its request.
        """
        if name in self._named or (parent is not None and parent not in self._named):
            return
        self._named[name], self._names[block] = block, (name, tuple(tokens))
        last = self._events[-1] if self._events else None
        if isinstance(last, Stored) and last.blocks[-1] == parent:
            last.blocks.append(name)
        else:
            self._events.append(Stored([name], parent))

    def forget_names(self) -> None:
        """Remove the names of all blocks, so that no other request finds them."""
        if not self._named and not self._events:
            return
        self._named.clear()
        self._names.clear()
        self._free += self._idle
        self._free.sort(reverse=True)
        self._idle.clear()
        self._events = [Cleared()]

    def take_events(self) -> list[KvEvent]:
        """Return the changes of names since the last call."""
        events, self._events = self._events, []
        return events

    def _forget(self, block: int) -> None:
        name, _ = self._names.pop(block)
        del self._named[name]
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed):
            last.blocks.append(name)
        else:
            self._events.append(Removed([name]))
