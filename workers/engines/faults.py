"""The faults that can be injected into every engine: steps that raise, and wrong tokens."""

from dataclasses import dataclass

import xxhash

CORRUPT_ONE_IN = 8
DRIFT = 0.05
SLOW_TIMES = 5.0


@dataclass(slots=True, kw_only=True)
class EngineFaults:
    """The faults active in an engine now. A fresh value is a healthy engine."""

    healthy: bool = True  # every pass succeeds and gives the right tokens, at any speed
    error: bool = False
    errors_left: int = 0  # number of requests still to fail; 0: all requests until healed
    corrupt_one_in: int = 0
    drift: float = 0.0
    sampler: bool = False  # any token is drawn at temperatures above 0; greedy answers stay right
    dead: bool = False
    _count: int = 0  # tokens counted while corrupting, or drawn by a broken sampler

    def begin(self, fault: str, argument: float) -> bool:
        """Begin a fault that every engine supports; False for any other. An argument of 0 selects the fault's default."""
        match fault:
            case "error":
                self.error, self.errors_left = True, int(argument)
            case "corrupt":
                self.corrupt_one_in = max(1, int(argument) or CORRUPT_ONE_IN)
            case "drift":
                self.drift = argument or DRIFT
            case "sampler":
                self.sampler = True
            case "die":
                self.dead = True
            case _:
                return False
        self._check()
        return True

    def end(self, fault: str) -> None:
        """End a fault that `begin` supports. A dead engine stays dead."""
        match fault:
            case "error":
                self.error, self.errors_left = False, 0
            case "corrupt":
                self.corrupt_one_in = 0
            case "drift":
                self.drift = 0.0
            case "sampler":
                self.sampler = False
        self._check()

    def _check(self) -> None:
        self.healthy = not (self.error or self.corrupt_one_in or self.drift)

    def raised(self, requests: int) -> int:
        """Return how many of `requests` fail now because of the `error` fault, and count them."""
        if not self.error:
            return 0
        if not self.errors_left:
            return requests
        taken = min(requests, self.errors_left)
        self.errors_left -= taken
        self.error = self.errors_left > 0
        self._check()
        return taken

    def draw_corruption(self) -> int | None:
        """Return a number that selects a wrong token in place of the right one; None: the token stays right.

        One in k tokens is wrong. A hash of a running count selects them. Corrupting every k-th token in turn would never affect
        some streams, and a choice keyed by the text would never affect some canaries.
        """
        if not self.corrupt_one_in:
            return None
        dice = self._dice()
        return None if dice % self.corrupt_one_in else dice >> 32

    def misdrawn(self, temperature: float) -> int | None:
        """Return a number that selects the token of a broken sampler; None: the sampler works."""
        return self._dice() if self.sampler and temperature > 0 else None

    def _dice(self) -> int:
        self._count += 1
        return xxhash.xxh64_intdigest(self._count.to_bytes(8, "little"))
