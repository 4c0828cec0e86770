"""Simulated requests, the counts of their outcomes, and the load that simulated clients generate."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from controller.frontend.admission.queue import QueuedRequest
from controller.frontend.request.state import Move, RequestState
from controller.router.endpoints import Endpoint, Key
from controller.simulator.world.kernel import EPOCH, MINUTE, Kernel
from controller.simulator.world.machines import Machine
from controller.simulator.world.scenario import Scenario
from events.observations import TrafficReported

FOREVER = 1 << 60
LONGER = 4.0  # in a crowd answers take this many times longer, so that few requests make a crowd
ANSWER_S = LONGER * 4.5  # average duration of answers in a crowd, in seconds
PROMPT, OUTPUT = 600, 150  # tokens of each reported request


@dataclass(slots=True, eq=False)
class SimulatedStream:
    """The tokens that one worker generates for one request."""

    machine: Machine
    key: Key
    position: int  # index of the stream's next token
    wrong: bool  # the worker computes from wrong tokens, or from the KV cache of a corrupt worker
    after: "SimulatedStream | None" = None  # the stream that this one took over, with the KV cache
    open: bool = True  # the frontend reads the tokens of this stream
    decodes: bool = True
    silent_s: int = 0

    @property
    def sources(self) -> set[Key]:
        """The workers on which the stream's tokens depend.

        These are the worker that generates the tokens, and the workers that computed the stream's KV cache.
        """
        return {self.key} | (self.after.sources if self.after is not None else set())

    def tokens(self, count: int) -> list[int]:
        """Generate and return the stream's next `count` tokens."""
        self.wrong = self.wrong or bool(self.machine.condition.corrupt)
        first, self.position = self.position, self.position + count
        return [-1 - n if self.wrong else n for n in range(first, self.position)]


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
    queued: QueuedRequest | None = None  # its entry in the queue
    sent_times: int = 0

    # State at the worker.
    endpoint: Endpoint = field(init=False)
    routed_under: int = 0
    sent: int = 0  # the last move of the frontend's own breakers at the time of sending
    attempt: int = 1
    reported: Move | None = None  # the last move that was reported

    # Only in a request that is simulated token by token.
    holds_back: int = 0  # number of newest tokens that are held back from the client
    finished: bool = False  # the answer is complete
    poisonous: bool = False  # every engine fails on this request
    accepted: list[int] = field(default_factory=list)
    givers: list[Key] = field(default_factory=list)  # the worker of each accepted token
    shown: list[int] = field(default_factory=list)  # the tokens that the client has received
    # The last stream belongs to the current attempt.
    streams: list[SimulatedStream] = field(default_factory=list)
    target: SimulatedStream | None = None  # the target's stream during a KV transfer
    target_at: Endpoint = field(init=False)
    asked_at: int = 0  # tokens accepted when the transfer was requested
    failed_at: set[Key] = field(default_factory=set)  # workers on which the prompt made the engine fail

    @property
    def worker(self) -> str:
        """The worker to which the request was last sent."""
        return self.endpoint.worker

    @property
    def instance(self) -> str:
        """The worker instance to which the request was last sent."""
        return self.endpoint.instance

    @property
    def stream(self) -> SimulatedStream:
        """The stream of the current or last attempt."""
        return self.streams[-1]

    def finish(self) -> None:
        """Complete the answer, and send the client all accepted tokens."""
        self.finished = True
        self.show(0)

    def show(self, holds_back: int) -> None:
        """Send the client the accepted tokens except the last `holds_back`."""
        self.shown += self.accepted[len(self.shown) : max(0, len(self.accepted) - holds_back)]


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
        """Yield a frontend's traffic report of each model for a minute. The run's first minute is number 0.

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
