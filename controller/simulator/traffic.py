"""What clients ask for and what they get: requests in the air, and the tally of what became of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from controller.deciders.breaker import Breaker
from controller.router.table import Key, Seat
from controller.simulator.machines import Machine
from controller.simulator.seams import Stored

if TYPE_CHECKING:
    from controller.simulator.frontends import Frontend


@dataclass(slots=True, eq=False)
class Flight:
    """A request in the air, on one worker."""

    request: str
    model: str
    seat: Seat
    routed_under: int
    sent: int  # the last move of the frontend's own breakers when it was sent
    attempt: int = 1
    tokens: int = 0
    avoid: tuple[Key, ...] = ()

    @property
    def worker(self) -> str:
        """Where it is."""
        return self.seat.worker

    @property
    def instance(self) -> str:
        """In which process."""
        return self.seat.instance


@dataclass(slots=True)
class Tally:
    """What clients saw, for the summary."""

    requests: int = 0
    served: int = 0
    migrated: int = 0
    rejected: int = 0
    lost: int = 0
    unserved: int = 0  # no worker could be reached
    altered: int = 0  # served by a worker that was corrupt when it was routed


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a frontend has to do, and whom it tells."""

    per_second: float
    machines: Mapping[str, Machine]
    models: tuple[str, ...]
    tally: Tally
    routed: Callable[["Frontend", Flight], None]
    judged: Callable[["Frontend", Flight, Breaker, Breaker], None]  # own breaker before and after an outcome
    stored: Callable[[], Stored | None]
