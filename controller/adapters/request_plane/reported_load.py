"""How much does one worker have to do, and how much of it is not ours?"""

from collections import Counter
from collections.abc import Collection, Sequence

from events.wire import Beat, Load


class ReportedLoad:
    """What a worker's last beat said of its load, and what of that others have."""

    __slots__ = ("by_rank", "external", "external_by_rank", "ranks", "total")

    def __init__(self) -> None:
        self.total = Load()
        self.by_rank: Sequence[Load] = ()  # the same of each DP rank, once it has said it
        self.external = Load()  # of it, what is not ours
        self.external_by_rank: Sequence[Load] = ()  # the same of each DP rank, where it says so
        self.ranks: dict[int, int] = {}  # of our streams and reservations that are not at rank 0

    def place(self, stream: int, rank: int) -> None:
        """Note to which rank, other than 0, a request goes."""
        self.ranks[stream] = rank

    def take(self, beat: Beat, own: int, streams: Collection[int], reserved: Collection[int]) -> None:
        """Take a beat, when `own` requests of ours are open there: `streams`; forget where those went that have ended."""
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
    """Return what others have at a worker, when `own` of its requests are ours; canaries are nobody's. Tokens are taken to be
    spread evenly."""
    whole = load.running + load.waiting - load.canaries
    others = max(0, whole - own)
    tokens = load.active_tokens * others // whole if whole > 0 else 0
    return Load(running=others, active_tokens=tokens, closed_s=load.closed_s)
