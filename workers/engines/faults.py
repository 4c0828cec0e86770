"""What can be wrong with every engine that plays faults for rehearsals: steps that raise, tokens that are others."""

from dataclasses import dataclass

import xxhash

CORRUPT_ONE_IN = 8
DRIFT = 0.05
SLOW_TIMES = 5.0


@dataclass(slots=True, kw_only=True)
class EngineFaults:
    """What is wrong with an engine right now. A fresh value is a healthy engine."""

    healthy: bool = True  # every pass succeeds and gives the right tokens, however slowly
    error: bool = False
    errors_left: int = 0  # 0: until healed
    corrupt_one_in: int = 0
    drift: float = 0.0
    sampler: bool = False  # any token is drawn at temperatures above 0; greedy answers are right
    dead: bool = False
    _said: int = 0  # tokens said while corrupting, or drawn by a broken sampler

    def begin(self, fault: str, argument: float) -> bool:
        """Begin a fault that every engine has; False if it is none of these. An argument of 0 takes the fault's default."""
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
        """End such a fault. A dead engine stays dead."""
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
        """Return how many of `requests` the raising engine takes down now, and count them."""
        if not self.error:
            return 0
        if not self.errors_left:
            return requests
        taken = min(requests, self.errors_left)
        self.errors_left -= taken
        self.error = self.errors_left > 0
        self._check()
        return taken

    def struck(self) -> int | None:
        """Return a number that chooses which wrong token is said in place of this one; None: it is said as it is.

        One in k is struck. Which ones is a hash of a running count, not of the sequence: a fault that struck every k-th token
        in turn would spare whole streams for ever, and one keyed by the text would spare whole canaries.
        """
        if not self.corrupt_one_in:
            return None
        dice = self._dice()
        return None if dice % self.corrupt_one_in else dice >> 32

    def misdrawn(self, temperature: float) -> int | None:
        """Return a number that chooses which token a broken sampler draws; None: the sampler draws as it should."""
        return self._dice() if self.sampler and temperature > 0 else None

    def _dice(self) -> int:
        self._said += 1
        return xxhash.xxh64_intdigest(self._said.to_bytes(8, "little"))
