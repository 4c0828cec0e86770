"""Faults of the simulated engine, for rehearsals. They last until healed, or for a number of requests."""

from dataclasses import dataclass, field

from workers.engines.faults import SLOW_TIMES, EngineFaults
from workers.engines.simulated.language import FIRST, SPAN


@dataclass(slots=True, kw_only=True)
class SimulatedFaults(EngineFaults):
    """The faults active in the simulated engine now."""

    slow: float = 1.0  # factor on a step's duration: the largest of any rank, as all wait for the slowest
    slowness: dict[int, float] = field(default_factory=dict)  # by rank
    raising_rank: int = 0

    def inject(self, fault: str, argument: float, rank: int = 0) -> bool:
        """Begin one fault, or `heal` all; False if it is unknown. An argument of 0 selects the fault's default."""
        match fault:
            case "slow":
                self.slowness[rank] = max(1.0, argument or SLOW_TIMES)
            case "heal":
                for one in ("error", "corrupt", "drift", "sampler"):
                    self.end(one)
                self.slowness.clear()
            case _:
                if fault == "error":
                    self.raising_rank = rank
                return self.begin(fault, argument)
        self._slow_down()
        return True

    def heal(self, fault: str, rank: int = 0) -> None:
        """End one fault. All faults except `slow` affect the TP ranks together. A dead engine stays dead."""
        if fault == "slow":
            self.slowness.pop(rank, None)
            self._slow_down()
        else:
            self.end(fault)

    def _slow_down(self) -> None:
        self.slow = max(self.slowness.values(), default=1.0)

    def altered(self, token: int) -> int:
        """Return the token as the faulty engine outputs it: one in k is wrong."""
        drawn = self.draw_corruption()
        return token if drawn is None else FIRST + (token - FIRST + 1 + drawn % (SPAN - 1)) % SPAN

    def drawn(self, token: int, temperature: float) -> int:
        """Return the token as the sampler draws it: a random one while the sampler is broken."""
        drawn = self.misdrawn(temperature)
        return token if drawn is None else FIRST + drawn % SPAN
