"""Tracks which KV cache blocks are free, held by requests, or kept for requests with the same prefix.

    free ── take ──▶ held by one ── name ──▶ held, by any number ── last release ──▶ idle ── evicted ──▶ free
      ▲                  │                       ▲                                     │
      └──── release ─────┘                       └────────────── share ────────────────┘

A full computed block gets a name, which is the hash of its prefix (`events.blocks`), and then never changes again. An idle block
has a name, but no request holds it. If no block is free, the block that has been idle longest is evicted. When a request releases
its blocks, its later blocks are evicted before its earlier ones. Changes of names are reported by KV events. The tokens of blocks
are compared in addition to the names, because a prompt could be crafted to have the same hash as another.
"""

from collections.abc import Sequence

from events.kv import Cleared, KvEvent, Removed, Stored


class Blocks:
    """The KV blocks of one engine. The lowest free block is taken first, so that blocks in use stay close together."""

    def __init__(self, count: int, tokens: int) -> None:
        self.count = count
        self.tokens = tokens
        self.empty = list(range(count - 1, -1, -1))  # the lowest block last
        self.holders = [0] * count  # for each block, the number of requests that hold it
        self.idle: dict[int, None] = {}  # blocks with a name that no request holds, the next to evict first
        self.named: dict[int, int] = {}  # name -> block
        self.names: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its name and its tokens
        self._events: list[KvEvent] = []

    @property
    def free(self) -> int:
        """Number of blocks that can be taken: free and idle ones."""
        return len(self.empty) + len(self.idle)

    @property
    def used(self) -> int:
        """Number of blocks that requests hold."""
        return self.count - self.free

    def needed(self, tokens: int) -> int:
        """Return the number of blocks that are needed for this many tokens."""
        return -(-tokens // self.tokens)

    def take(self) -> int:
        """Allocate a block for one request and return the block. The caller must clear its contents.

        If no block is free, an idle block is evicted. At least one block must be free or idle.
        """
        if self.empty:
            block = self.empty.pop()
        else:
            block = next(iter(self.idle))
            del self.idle[block]
            self._forget(block)
        self.holders[block] = 1
        return block

    def give_back(self, blocks: list[int]) -> None:
        """Release the blocks of one request, and empty the list `blocks`."""
        for block in reversed(blocks):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                if block in self.names:
                    self.idle[block] = None
                else:
                    self.empty.append(block)
        self.empty.sort(reverse=True)
        blocks.clear()

    # --- shared prefixes

    def find(self, names: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return the blocks of the longest cached prefix of `tokens`. `names` are the names of the full blocks of `tokens`."""
        found: list[int] = []
        for place, name in enumerate(names):
            block = self.named.get(name)
            first = place * self.tokens
            if block is None or self.names[block][1] != tuple(tokens[first : first + self.tokens]):
                break
            found.append(block)
        return found

    def unheld(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks no request holds. The count `free` includes such blocks."""
        return sum(not self.holders[block] for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Record that one more request holds these blocks, which must have names."""
        for block in blocks:
            self.holders[block] += 1
            self.idle.pop(block, None)

    def name(self, block: int, name: int, parent: int | None, tokens: Sequence[int]) -> None:
        """Give a full block its name, so that other requests can find the block.

        `parent` is the name of the block before, or None for the first block, and `tokens` are the block's tokens. If another
        block already has this name, or no block has the parent's name, the block stays private to its request.
        """
        if name in self.named or (parent is not None and parent not in self.named):
            return
        self.named[name], self.names[block] = block, (name, tuple(tokens))
        last = self._events[-1] if self._events else None
        if isinstance(last, Stored) and last.blocks[-1] == parent:
            last.blocks.append(name)
        else:
            self._events.append(Stored([name], parent))

    def forget_names(self) -> None:
        """Remove the names of all blocks, so that no request finds them later. Idle blocks become free."""
        if not self.named and not self._events:
            return
        self.named.clear()
        self.names.clear()
        self.empty += self.idle
        self.empty.sort(reverse=True)
        self.idle.clear()
        self._events = [Cleared()]

    def take_events(self) -> list[KvEvent]:
        """Return the KV events since the last call. They report which blocks have got or lost a name."""
        events, self._events = self._events, []
        return events

    def _forget(self, block: int) -> None:
        name, _ = self.names.pop(block)
        del self.named[name]
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed):
            last.blocks.append(name)
        else:
            self._events.append(Removed([name]))
