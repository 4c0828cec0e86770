"""The KV cache's blocks: which are free, who holds which, and which are kept for prompts that begin alike.

    free ── take ──▶ held by one ── name ──▶ held, by any number ── the last lets go ──▶ idle ── evicted ──▶ free
      ▲                  │                       ▲                                        │
      └──── let go ──────┘                       └───────────── share ────────────────────┘

A full block that has been computed gets the name of its prefix (`events.blocks`), and from then on changes no more. Idle blocks
are taken when nothing else is free, the one that was let go of longest ago first; of one prompt, its end before its beginning.
What becomes of names is announced. A name is a hash, and one could be made to fit another prompt: the tokens are compared, too.

No torch, no clock, no thread.
"""

from collections.abc import Sequence

from events.kv import Cleared, KvEvent, Removed, Stored


class Blocks:
    """The blocks of one engine. Of those that are free the lowest goes first, so that those in use stay close together."""

    def __init__(self, count: int, tokens: int) -> None:
        self.count = count
        self.tokens = tokens
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._idle: dict[
            int, None
        ] = {}  # those with a name that nobody holds, in the order in which they are taken
        self._named: dict[int, int] = {}  # the block that has a name
        self._names: dict[int, tuple[int, tuple[int, ...]]] = {}  # a block's name, and its tokens
        self._events: list[KvEvent] = []

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.count - self.free

    @property
    def takeable(self) -> list[int]:
        """The blocks that can be taken."""
        return [*self._free, *self._idle]

    @property
    def holders(self) -> list[int]:
        """How many hold each block."""
        return list(self._holders)

    @property
    def named(self) -> dict[int, int]:
        """The block that has a name, by name."""
        return dict(self._named)

    def name_of(self, block: int) -> int | None:
        """Return a block's name; None if it has none."""
        found = self._names.get(block)
        return None if found is None else found[0]

    def needed(self, tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return -(-tokens // self.tokens)

    def take(self) -> int:
        """Return a block that nobody else has; what is in it must be cleared."""
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            self._forget(block)
        self._holders[block] = 1
        return block

    def give_back(self, blocks: list[int]) -> None:
        """Let go of the blocks of one request."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._names:
                    self._idle[block] = None
                else:
                    self._free.append(block)
        self._free.sort(reverse=True)
        blocks.clear()

    # --- prompts that begin alike

    def find(self, names: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return the blocks of the longest beginning of `tokens` that is here."""
        found: list[int] = []
        for place, name in enumerate(names):
            block = self._named.get(name)
            first = place * self.tokens
            if block is None or self._names[block][1] != tuple(tokens[first : first + self.tokens]):
                break
            found.append(block)
        return found

    def unheld(self, blocks: Sequence[int]) -> int:
        """Return how many of these nobody holds: `free` counts them."""
        return sum(not self._holders[block] for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Hold blocks with a name once more."""
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def name(self, block: int, name: int, parent: int | None, tokens: Sequence[int]) -> None:
        """Let a full block be found. Where another has the name, or none has that of the prefix before it, it stays its
        request's own."""
        if name in self._named or (parent is not None and parent not in self._named):
            return
        self._named[name], self._names[block] = block, (name, tuple(tokens))
        last = self._events[-1] if self._events else None
        if isinstance(last, Stored) and last.blocks[-1] == parent:
            last.blocks.append(name)
        else:
            self._events.append(Stored([name], parent))

    def forget_names(self) -> None:
        """Let nothing that is here now be found any more."""
        if not self._named and not self._events:
            return
        self._named.clear()
        self._names.clear()
        self._free += self._idle
        self._free.sort(reverse=True)
        self._idle.clear()
        self._events = [Cleared()]

    def take_events(self) -> list[KvEvent]:
        """Return what has become of names since this was last asked."""
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
