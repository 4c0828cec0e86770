"""The load of a simulation: requests per frontend, and the traffic reports that planners receive."""

from collections.abc import Iterator
from datetime import timedelta

from controller.simulator.world.kernel import EPOCH, MINUTE, Kernel
from controller.simulator.world.requests.request_driver import ANSWER_S
from controller.simulator.world.scenario import Scenario
from events.observations import TrafficReported

PROMPT, OUTPUT = 600, 150  # tokens of each reported request


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
