"""Who waits to be admitted, and in which order? By priority, oldest first; canaries and those that were preempted go before."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from math import inf

from workers.engines.simulated.sequence import SimulatedSequence

BEFORE = -inf  # all priorities


class WaitingQueue:
    """The requests of one rank that are not admitted, or no longer."""

    def __init__(self) -> None:
        self._lines: dict[float, OrderedDict[int, SimulatedSequence]] = {
            BEFORE: OrderedDict()
        }  # by priority, the least first
        self._of: dict[int, OrderedDict[int, SimulatedSequence]] = {}  # by key

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: int) -> bool:
        return key in self._of

    def __iter__(self) -> Iterator[int]:
        """Go through their keys, the next one first."""
        return chain.from_iterable(self._lines.values())

    @property
    def first(self) -> SimulatedSequence:
        """Who is next. Somebody waits."""
        return next(line[next(iter(line))] for line in self._lines.values() if line)

    def add(self, sequence: SimulatedSequence) -> None:
        """Take a new request in."""
        if sequence.canary:  # what finds a sick worker must not wait for a hundred others
            self.put_back(sequence)
            return
        line = self._lines.get(sequence.priority)
        if line is None:
            line = self._lines[sequence.priority] = OrderedDict()
            self._lines = dict(sorted(self._lines.items()))
        line[sequence.key] = sequence
        self._of[sequence.key] = line

    def put_back(self, sequence: SimulatedSequence) -> None:
        """Take one in again that was preempted: it is next."""
        line = self._of[sequence.key] = self._lines[BEFORE]
        line[sequence.key] = sequence
        line.move_to_end(sequence.key, last=False)

    def remove(self, key: int) -> None:
        """Take one out. Unknown keys are ignored."""
        if (line := self._of.pop(key, None)) is not None:
            del line[key]

    def clear(self) -> None:
        """Forget all of them."""
        self._lines = {BEFORE: OrderedDict()}
        self._of.clear()

    def lengths(self) -> tuple[list[int], list[int]]:
        """Return the lengths in tokens of those that have said nothing yet, and of the preempted ones."""
        lengths: tuple[list[int], list[int]] = [], []
        for one in chain.from_iterable(line.values() for line in self._lines.values()):
            lengths[one.made > 0].append(one.length)
        return lengths
