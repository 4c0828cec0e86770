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
        self.external = Load()  # load by other clients' requests
        self.external_by_rank: Sequence[Load] = ()  # the same per DP rank, if reported
        self.ranks: dict[int, int] = {}  # by stream or reservation of ours: its rank, if not 0

    def place(self, stream: int, rank: int) -> None:
        """Record the rank of a request, if it is not 0."""
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
    """Return a load without `own` requests of ours; canaries do not count. All requests are assumed to have equally many
    tokens."""
    whole = load.running + load.waiting - load.canaries
    others = max(0, whole - own)
    tokens = load.active_tokens * others // whole if whole > 0 else 0
    return Load(running=others, active_tokens=tokens, closed_s=load.closed_s)
