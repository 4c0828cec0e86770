"""Tracks which KV cache blocks are free, held by requests, or kept for requests with the same prefix.

    free ── take ──▶ held by one ── name ──▶ held, by any number ── last release ──▶ idle ── evicted ──▶ free
      ▲                  │                       ▲                                     │
      └──── release ─────┘                       └────────────── share ────────────────┘

A full computed block gets a name, which is the hash of its prefix (`events.blocks`), and then never changes again. An idle block
has a name, but no request holds it. If no block is free, the block that has been idle longest is evicted. Of one released
request, later blocks are evicted before earlier ones. Changes of names are reported by KV events. The tokens of blocks are
compared in addition to the names, because a prompt could be crafted to have the same hash as another.
"""

from collections.abc import Sequence

from events.kv import Cleared, KvEvent, Removed, Stored


class Blocks:
    """The KV blocks of one engine. The lowest free block is taken first, so that blocks in use stay close together."""

    def __init__(self, count: int, tokens: int) -> None:
        self.count = count
        self.tokens = tokens
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._idle: dict[int, None] = {}  # blocks with a name that no request holds, the next to evict first
        self._named: dict[int, int] = {}  # name -> block
        self._names: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its name and its tokens
        self._events: list[KvEvent] = []

    @property
    def free(self) -> int:
        """Number of blocks that can be taken: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of blocks that requests hold."""
        return self.count - self.free

    @property
    def takeable(self) -> list[int]:
        """The blocks that can be taken: the free ones, then the idle ones."""
        return [*self._free, *self._idle]

    @property
    def holders(self) -> list[int]:
        """For each block, the number of requests that hold it."""
        return list(self._holders)

    @property
    def named(self) -> dict[int, int]:
        """The blocks that have a name, as a map from name to block."""
        return dict(self._named)

    def name_of(self, block: int) -> int | None:
        """Return the name of a block, or None if the block has no name."""
        found = self._names.get(block)
        return None if found is None else found[0]

    def needed(self, tokens: int) -> int:
        """Return the number of blocks that are needed for this many tokens."""
        return -(-tokens // self.tokens)

    def take(self) -> int:
        """Allocate a block for one request and return the block. The caller must clear its contents.

        If no block is free, an idle block is evicted. At least one block must be free or idle.
        """
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            self._forget(block)
        self._holders[block] = 1
        return block

    def give_back(self, blocks: list[int]) -> None:
        """Release the blocks of one request, and empty the list `blocks`."""
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
        """Return the blocks of the longest cached prefix of `tokens`. `names` are the names of its full blocks."""
        found: list[int] = []
        for place, name in enumerate(names):
            block = self._named.get(name)
            first = place * self.tokens
            if block is None or self._names[block][1] != tuple(tokens[first : first + self.tokens]):
                break
            found.append(block)
        return found

    def unheld(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks no request holds. `free` counts these blocks."""
        return sum(not self._holders[block] for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Record that one more request holds these blocks, which must have names."""
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def name(self, block: int, name: int, parent: int | None, tokens: Sequence[int]) -> None:
        """Give a full block its name, so that other requests can find the block.

        `parent` is the name of the block before, or None for the first block, and `tokens` are the block's tokens. If another
        block already has this name, or no block has the parent's name, the block stays private to its request.
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
        """Remove the names of all blocks, so that no request finds them later. Idle blocks become free."""
        if not self._named and not self._events:
            return
        self._named.clear()
        self._names.clear()
        self._free += self._idle
        self._free.sort(reverse=True)
        self._idle.clear()
        self._events = [Cleared()]

    def take_events(self) -> list[KvEvent]:
        """Return the KV events, which are the changes of names, since the last call."""
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
