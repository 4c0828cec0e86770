"""Simulated requests in flight, the tally of their outcomes, and the load of a simulation's clients."""

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


class SimulatedDemand:
    """The load of a scenario's clients. Few of the reported requests are simulated: each stands for many."""

    def __init__(self, scenario: Scenario, kernel: Kernel) -> None:
        self._scenario, self._kernel = scenario, kernel
        self._suppressed_until = 0

    def suppress_reports(self, until: int) -> None:
        """Suppress all traffic reports until a time."""
        self._suppressed_until = until

    def per_second(self, now: int) -> float:
        """Return the requests per second of one frontend."""
        scenario, crowd = self._scenario, self._scenario.crowd
        if crowd is None:
            return scenario.requests_per_second
        return crowd.times.at(now) * scenario.workers * crowd.batch / ANSWER_S / scenario.frontends

    def traffic_reports(self, frontend: str, minute: int) -> Iterator[TrafficReported]:
        """Yield a frontend's reports for a minute (a number from the beginning): its share of the load, ± 10 %."""
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
