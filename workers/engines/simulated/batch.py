"""Who decodes, and when does anything about them change?

Everybody in the batch says one token in each pass, so nobody's tokens are counted one by one: a sequence's length follows
from the pass that it came in with. Whoever has to be looked at again (its answer ends, its block is full) is in a
calendar, by pass. Until the next entry all passes are alike.
"""

from heapq import heappop, heappush

from workers.engines.simulated.sequence import SimulatedSequence


class DecodeBatch:
    """The sequences that decode, in the order in which they came."""

    def __init__(self, block_tokens: int) -> None:
        self.passes = 0  # that have ended
        self._block_tokens = block_tokens
        self.sequences: dict[int, SimulatedSequence] = {}
        self._calendar: dict[int, list[SimulatedSequence]] = {}
        self._next: list[int] = []  # a heap of the calendar's passes
        self._offset = 0  # the sum of their lengths is this and one for each of them and pass

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def tokens(self) -> int:
        """How many tokens all of them have, prompts and all."""
        return self._offset + self.passes * len(self.sequences)

    def lengths(self) -> list[int]:
        """Return how many tokens each of them has."""
        return [one.length for one in self.sequences.values()]

    def enter(self, sequence: SimulatedSequence) -> None:
        """Let a sequence say a token in each pass from now on."""
        sequence.since, sequence.batch = self.passes, self
        self.sequences[sequence.key] = sequence
        self._offset += sequence.start - self.passes
        self.look(sequence)

    def look(self, sequence: SimulatedSequence) -> None:
        """Have a sequence looked at when its answer ends or it needs another block."""
        size, length = self._block_tokens, sequence.start + self.passes - sequence.since
        left, room = sequence.end - length, size - (length - 1) % size
        sequence.last = left <= room
        due = sequence.due = self.passes + (left if left <= room else room)
        found = self._calendar.get(due)
        if found is None:
            self._calendar[due] = [sequence]
            heappush(self._next, due)
        else:
            found.append(sequence)

    def leave(self, key: int) -> SimulatedSequence:
        """Take a sequence out."""
        sequence = self.sequences.pop(key)
        self._offset -= sequence.start - sequence.since
        sequence.start += self.passes - sequence.since
        sequence.batch = None
        waited_for = self._calendar.get(sequence.due)
        if waited_for and sequence in waited_for:
            waited_for.remove(sequence)
        return sequence

    def due(self) -> list[SimulatedSequence]:
        """Return whom the present pass makes due, in the order in which they were entered into the calendar."""
        if self.passes + 1 not in self._calendar:
            return []
        heappop(self._next)
        return self._calendar.pop(self.passes + 1)

    def ahead(self) -> int:
        """Return how many passes will end before anybody is due; 0 if nobody decodes."""
        while self._next:
            if self._calendar[self._next[0]]:
                return self._next[0] - self.passes - 1
            del self._calendar[heappop(self._next)]
        return 0
