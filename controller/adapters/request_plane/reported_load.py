"""The load that a worker reports, and the part of it that other clients cause."""

from collections import Counter
from collections.abc import Collection, Sequence

from events.wire import Beat, Load


class ReportedLoad:
    """The load in a worker's last beat, and the part of it that other clients cause."""

    __slots__ = ("by_rank", "external", "external_by_rank", "ranks", "total")

    def __init__(self) -> None:
        self.total = Load()
        self.by_rank: Sequence[Load] = ()  # per DP rank, once reported
        self.external = Load()  # the part of other clients
        self.external_by_rank: Sequence[Load] = ()  # the same per DP rank, if reported
        self.ranks: dict[int, int] = {}  # of our streams and reservations on a rank other than 0

    def place(self, stream: int, rank: int) -> None:
        """Record the rank, other than 0, of a request."""
        self.ranks[stream] = rank

    def take(self, beat: Beat, own: int, streams: Collection[int], reserved: Collection[int]) -> None:
        """Record a beat while `own` requests of ours are open (`streams`); drop the ranks of streams that have ended."""
        self.total = beat.load
        self.by_rank = beat.ranks or (beat.load,)
        self.external = without(beat.load, own)
        if not (beat.ranks or self.ranks):
            self.external_by_rank = ()
            return
        self.ranks = {n: rank for n, rank in self.ranks.items() if n in streams or n in reserved}
        ours = Counter(self.ranks.get(stream, 0) for stream in streams)
        self.external_by_rank = [without(load, ours[rank]) for rank, load in enumerate(beat.ranks)]


def without(load: Load, own: int) -> Load:
    """Return the part of a load that is not due to `own` requests; canaries do not count. Tokens are assumed to be spread
    evenly."""
    whole = load.running + load.waiting - load.canaries
    others = max(0, whole - own)
    tokens = load.active_tokens * others // whole if whole > 0 else 0
    return Load(running=others, active_tokens=tokens, closed_s=load.closed_s)
