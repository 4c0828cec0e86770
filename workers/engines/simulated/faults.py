"""Faults that the simulated engine plays for rehearsals. They last until healed, or for as many requests as asked."""

from dataclasses import dataclass, field

import xxhash

from workers.engines.simulated.language import FIRST, SPAN

CORRUPT_ONE_IN = 8
DRIFT = 0.05
SLOW_TIMES = 5.0


@dataclass(slots=True)
class SimulatedFaults:
    """What is wrong with the engine right now. A fresh value is a healthy engine."""

    error: bool = False
    errors_left: int = 0  # 0: until healed
    corrupt_one_in: int = 0
    drift: float = 0.0
    slowness: dict[int, float] = field(default_factory=dict)  # by rank
    raising_rank: int = 0
    dead: bool = False
    _said: int = 0  # tokens said while corrupting

    @property
    def healthy(self) -> bool:
        """Whether every pass goes through and gives the right tokens, however slowly."""
        return not (self.error or self.corrupt_one_in or self.drift)

    @property
    def slow(self) -> float:
        """How many times longer a step takes: all ranks wait for the slowest."""
        return max(self.slowness.values()) if self.slowness else 1.0

    def inject(self, fault: str, argument: float, rank: int = 0) -> bool:
        """Begin one fault, or `heal` all; False if there is no such fault. An argument of 0 takes the fault's default."""
        match fault:
            case "error":
                self.error, self.errors_left, self.raising_rank = True, int(argument), rank
            case "corrupt":
                self.corrupt_one_in = max(1, int(argument) or CORRUPT_ONE_IN)
            case "drift":
                self.drift = argument or DRIFT
            case "slow":
                self.slowness[rank] = max(1.0, argument or SLOW_TIMES)
            case "die":
                self.dead = True
            case "heal":
                self.error, self.errors_left, self.corrupt_one_in = False, 0, 0
                self.drift = 0.0
                self.slowness.clear()
            case _:
                return False
        return True

    def heal(self, fault: str, rank: int = 0) -> None:
        """End one fault. All but `slow` strike the ranks that compute together as one. Who is dead stays so."""
        match fault:
            case "error":
                self.error, self.errors_left = False, 0
            case "corrupt":
                self.corrupt_one_in = 0
            case "drift":
                self.drift = 0.0
            case "slow":
                self.slowness.pop(rank, None)

    def raised(self, requests: int) -> int:
        """Return how many of `requests` the raising engine takes down now, and count them."""
        if not self.error:
            return 0
        if not self.errors_left:
            return requests
        taken = min(requests, self.errors_left)
        self.errors_left -= taken
        self.error = self.errors_left > 0
        return taken

    def altered(self, token: int) -> int:
        """Return the token as the sick engine says it: one in k is another one.

        Which ones is a hash of a running count, not of the sequence: a fault that struck every k-th token in turn would
        spare whole streams for ever, and one keyed by the text would spare whole canaries.
        """
        if not self.corrupt_one_in:
            return token
        self._said += 1
        dice = xxhash.xxh64_intdigest(self._said.to_bytes(8, "little"))
        if dice % self.corrupt_one_in:
            return token
        return FIRST + (token - FIRST + 1 + (dice >> 32) % (SPAN - 1)) % SPAN
