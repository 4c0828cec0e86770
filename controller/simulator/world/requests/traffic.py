"""Simulated requests in flight, their senders, and the tally of their outcomes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from controller.frontend.health.local_breakers import LocalBreakers
from controller.frontend.request.state import Move, RequestState
from controller.router.endpoints import Endpoint, EndpointTable
from controller.simulator.world.machines import Machine
from controller.simulator.world.outbox import SimulatedOutbox
from controller.simulator.world.replica import Replica
from controller.simulator.world.seams import Stored
from controller.simulator.world.surroundings import Surroundings
from events.observations import TrafficReported

FOREVER = 1 << 60


class RequestSender(Protocol):
    """A process that sends requests to workers (a frontend), and its view of the fleet."""

    name: str
    replica: Replica
    traffic: "SimulatedTraffic"
    surroundings: Surroundings
    table: EndpointTable
    breakers: LocalBreakers
    outbox: SimulatedOutbox

    def best_waiting(self, model: str) -> int | None:
        """Return the best tier among the queued requests, 0 being the best; None if none is queued."""
        ...


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request, from its arrival to its end. Its state belongs to the request machine. Times are microseconds."""

    request: str
    model: str
    state: RequestState
    tier: str
    rank: int  # rank of the request's tier: 0 is the best
    since: int  # arrival time
    latest: int = FOREVER  # the latest time to send the request
    waits: bool = False  # the request has been queued since its last move
    sent_times: int = 0

    # State at the worker.
    endpoint: Endpoint = field(init=False)
    routed_under: int = 0
    sent: int = 0  # the last move of the frontend's own breakers at the time of sending
    attempt: int = 1
    reported: Move | None = None  # the last move that was reported

    @property
    def worker(self) -> str:
        """The worker to which the request was last sent."""
        return self.endpoint.worker

    @property
    def instance(self) -> str:
        """The instance to which the request was last sent."""
        return self.endpoint.instance


@dataclass(slots=True)
class ClientTally:
    """The outcomes that clients saw, for the summary."""

    requests: int = 0
    served: int = 0
    migrated: int = 0
    rejected: int = 0
    lost: int = 0
    unserved: int = 0  # no worker was reachable
    altered: int = 0  # served by a worker that was corrupt when it was routed


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTraffic:
    """The load of a frontend, and the observers of its requests."""

    per_second: Callable[[int], float]  # by time
    machines: Mapping[str, Machine]
    models: tuple[str, ...]
    tally: ClientTally
    stepped: Callable[..., None]  # request, event, effects
    stored: Callable[[], Stored | None]
    traffic_reports: Callable[
        [str, int], Iterable[TrafficReported]
    ]  # traffic reports of a minute, by the number of the minute
    refused: set[tuple[str, int, str]] = field(
        default_factory=set
    )  # request, attempt, instance that had no room
