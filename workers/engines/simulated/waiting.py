"""Who waits to be admitted, and in which order? Oldest first; canaries and those that were preempted go before."""

from collections import OrderedDict
from collections.abc import Iterator

from workers.engines.simulated.sequence import SimulatedSequence


class WaitingQueue:
    """The requests of one rank that are not admitted, or no longer."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, SimulatedSequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, key: int) -> bool:
        return key in self._sequences

    def __iter__(self) -> Iterator[int]:
        """Go through their keys, the next one first."""
        return iter(self._sequences)

    @property
    def first(self) -> SimulatedSequence:
        """Who is next. Somebody waits."""
        return next(iter(self._sequences.values()))

    def add(self, sequence: SimulatedSequence) -> None:
        """Take a new request in."""
        self._sequences[sequence.key] = sequence
        if sequence.canary:  # what finds a sick worker must not wait for a hundred others
            self._sequences.move_to_end(sequence.key, last=False)

    def put_back(self, sequence: SimulatedSequence) -> None:
        """Take one in again that was preempted: it is next."""
        self._sequences[sequence.key] = sequence
        self._sequences.move_to_end(sequence.key, last=False)

    def remove(self, key: int) -> None:
        """Take one out. Unknown keys are ignored."""
        self._sequences.pop(key, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._sequences.clear()

    def lengths(self) -> tuple[list[int], list[int]]:
        """Return the lengths in tokens of those that have said nothing yet, and of the preempted ones."""
        lengths: tuple[list[int], list[int]] = [], []
        for one in self._sequences.values():
            lengths[one.made > 0].append(one.length)
        return lengths
