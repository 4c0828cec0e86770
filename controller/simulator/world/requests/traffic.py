"""What clients ask for and what they get: requests on their way, and the tally of what became of them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from controller.deciders.breaker import Breaker
from controller.router.endpoints import Endpoint, Key
from controller.simulator.world.machines import Machine
from controller.simulator.world.replica import Replica
from controller.simulator.world.seams import Stored
from events.observations import TrafficReported


class RequestSender(Protocol):
    """Who sends a request to a worker: a frontend, and what it knows of the fleet."""

    name: str
    replica: Replica

    def best_waiting(self, model: str) -> int | None:
        """Return the best tier of which anybody waits for a worker, 0 being the best; None: nobody waits here."""
        ...


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request that wants a worker. Microseconds of virtual time."""

    request: str
    model: str
    tier: str
    rank: int  # of its tier: 0 is the best
    since: int
    latest: int  # sent later, its answer begins too late
    let_in: bool = False  # it was sent once, and its worker had no room
    attempt: int = 1
    tokens: int = 0
    avoid: tuple[Key, ...] = ()


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request on its way, at one worker."""

    request: str
    model: str
    endpoint: Endpoint
    routed_under: int
    sent: int  # the last move of the frontend's own breakers when it was sent
    attempt: int = 1
    tokens: int = 0
    avoid: tuple[Key, ...] = ()
    refused: bool = False  # its worker had no room, and that was taken for a failure
    waited: WaitingRequest | None = None  # as what it has come, where requests may have to wait

    @property
    def worker(self) -> str:
        """Where it is."""
        return self.endpoint.worker

    @property
    def instance(self) -> str:
        """In which process."""
        return self.endpoint.instance


@dataclass(slots=True)
class ClientTally:
    """What clients saw, for the summary."""

    requests: int = 0
    served: int = 0
    migrated: int = 0
    rejected: int = 0
    lost: int = 0
    unserved: int = 0  # no worker could be reached
    altered: int = 0  # served by a worker that was corrupt when it was routed


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTraffic:
    """What a frontend has to do, and whom it tells."""

    per_second: Callable[[int], float]  # now
    machines: Mapping[str, Machine]
    models: tuple[str, ...]
    tally: ClientTally
    routed: Callable[[RequestSender, SimulatedRequest], None]
    judged: Callable[
        [RequestSender, SimulatedRequest, Breaker, Breaker], None
    ]  # own breaker before and after an outcome
    stored: Callable[[], Stored | None]
    told: Callable[[str, int], Iterable[TrafficReported]]  # of a minute, by its number
