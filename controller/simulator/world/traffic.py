"""Simulated requests, the counts of their outcomes, and the load that simulated clients generate."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from controller.frontend.request.state import Move, RequestState
from controller.router.endpoints import Endpoint
from controller.simulator.world.kernel import EPOCH, MINUTE, Kernel
from controller.simulator.world.scenario import Scenario
from events.observations import TrafficReported

FOREVER = 1 << 60
LONGER = 4.0  # in a crowd answers take this many times longer, so that few requests make a crowd
ANSWER_S = LONGER * 4.5  # average duration of answers in a crowd, in seconds
PROMPT, OUTPUT = 600, 150  # tokens of each reported request


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request, from its arrival to its end. Times are in microseconds of virtual time.

    Only the request's state machine changes `state`.
    """

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
        """The worker instance to which the request was last sent."""
        return self.endpoint.instance


@dataclass(slots=True)
class ClientTally:
    """Counts of requests by the outcome that their clients saw."""

    requests: int = 0
    served: int = 0
    migrated: int = 0
    rejected: int = 0
    lost: int = 0
    unserved: int = 0  # no worker was reachable
    altered: int = 0  # served by a worker that was corrupt when it was routed


class SimulatedDemand:
    """The load of a scenario's clients.

    Only a few of the reported requests are simulated, so each simulated request represents many.
    """

    def __init__(self, scenario: Scenario, kernel: Kernel) -> None:
        self._scenario, self._kernel = scenario, kernel
        self._suppressed_until = 0

    def suppress_reports(self, until: int) -> None:
        """Suppress all traffic reports until time `until`, in microseconds."""
        self._suppressed_until = until

    def per_second(self, now: int) -> float:
        """Return the requests per second that arrive at one frontend at time `now`."""
        scenario, crowd = self._scenario, self._scenario.crowd
        if crowd is None:
            return scenario.requests_per_second
        return crowd.times.at(now) * scenario.workers * crowd.batch / ANSWER_S / scenario.frontends

    def traffic_reports(self, frontend: str, minute: int) -> Iterator[TrafficReported]:
        """Yield a frontend's traffic report of each model for a minute, which is numbered from the beginning.

        The reported requests are the frontend's share of the load, with a random deviation of up to 10 %.
        """
        scenario, planning = self._scenario, self._scenario.planning
        if planning is None or self._kernel.now < self._suppressed_until:
            return
        for model in scenario.models:
            part = planning.load.at(minute * MINUTE) / scenario.frontends
            requests = round(part * self._kernel.chance(f"{frontend} {model} {minute}").uniform(0.9, 1.1))
            yield TrafficReported(
                frontend=frontend, model=model, minute=EPOCH + timedelta(minutes=minute), requests=requests,
                prompt_tokens=PROMPT * requests, prompt_tokens_squared=PROMPT * PROMPT * requests,
                output_tokens=OUTPUT * requests, late=0, rejected=0,
            )  # fmt: skip
