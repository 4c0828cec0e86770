"""The faults that can be injected into an engine: steps that raise or are slow, and wrong tokens."""

from dataclasses import dataclass, field

import xxhash

CORRUPT_ONE_IN = 8
DRIFT = 0.05
SLOW_TIMES = 5.0
KINDS = ("error", "corrupt", "drift", "sampler", "slow")  # those that can be healed


@dataclass(slots=True, kw_only=True)
class EngineFaults:
    """The faults active in an engine now, until healed or for a number of requests. A fresh value is a healthy engine."""

    healthy: bool = True  # every pass succeeds and gives the right tokens, at any speed
    error: bool = False
    errors_left: int = 0  # number of requests still to fail; 0: all requests until healed
    raising_rank: int = 0
    corrupt_one_in: int = 0
    drift: float = 0.0
    sampler: bool = False  # any token is drawn at temperatures above 0; greedy answers stay right
    slow: float = 1.0  # factor on a step's duration: the largest of any rank, as all wait for the slowest
    slowness: dict[int, float] = field(default_factory=dict)  # by rank
    dead: bool = False
    _count: int = 0  # tokens counted while corrupting, or drawn by a broken sampler

    def inject(self, fault: str, argument: float, rank: int = 0) -> bool:
        """Begin one fault, or `heal` all; False if it is unknown. An argument of 0 selects the fault's default."""
        match fault:
            case "error":
                self.error, self.errors_left, self.raising_rank = True, int(argument), rank
            case "corrupt":
                self.corrupt_one_in = max(1, int(argument) or CORRUPT_ONE_IN)
            case "drift":
                self.drift = argument or DRIFT
            case "sampler":
                self.sampler = True
            case "slow":
                self.slowness[rank] = max(1.0, argument or SLOW_TIMES)
            case "die":
                self.dead = True
            case "heal":
                for kind in KINDS:
                    self.heal(kind)
                self.slowness.clear()
            case _:
                return False
        self._update()
        return True

    def heal(self, fault: str, rank: int = 0) -> None:
        """End one fault. All faults except `slow` affect all ranks together. A dead engine stays dead."""
        match fault:
            case "error":
                self.error, self.errors_left = False, 0
            case "corrupt":
                self.corrupt_one_in = 0
            case "drift":
                self.drift = 0.0
            case "sampler":
                self.sampler = False
            case "slow":
                self.slowness.pop(rank, None)
        self._update()

    def _update(self) -> None:
        self.healthy = not (self.error or self.corrupt_one_in or self.drift)
        self.slow = max(self.slowness.values(), default=1.0)

    def raised(self, requests: int) -> int:
        """Return how many of `requests` fail now because of the `error` fault, and count them."""
        if not self.error:
            return 0
        if not self.errors_left:
            return requests
        taken = min(requests, self.errors_left)
        self.errors_left -= taken
        self.error = self.errors_left > 0
        self._update()
        return taken

    def altered(self, token: int, first: int, count: int) -> int:
        """Return the token as the faulty engine outputs it: one in k is another of the `count` tokens from `first` on.

        A hash of a running count selects them. Corrupting every k-th token in turn would never affect some streams, and a choice
        keyed by the text would never affect some canaries.
        """
        if not self.corrupt_one_in or (dice := self._dice()) % self.corrupt_one_in:
            return token
        return first + (token - first + 1 + (dice >> 32) % (count - 1)) % count

    def drawn(self, token: int, temperature: float, first: int, count: int) -> int:
        """Return the token as the sampler draws it: while it is broken, any of the `count` tokens from `first` on."""
        return first + self._dice() % count if self.sampler and temperature > 0 else token

    def _dice(self) -> int:
        self._count += 1
        return xxhash.xxh64_intdigest(self._count.to_bytes(8, "little"))
