"""How much comes: how many requests each frontend gets, and what it tells planners of each minute."""

from collections.abc import Iterator
from datetime import timedelta

from controller.simulator.world.kernel import EPOCH, MINUTE, Kernel
from controller.simulator.world.requests.underway import ANSWER_S
from controller.simulator.world.scenario import Scenario
from events.observations import TrafficReported

PROMPT, OUTPUT = 600, 150  # tokens of a request that is told of


class SimulatedDemand:
    """What a scenario's clients ask for. Of what frontends tell few are played: each stands for many."""

    def __init__(self, scenario: Scenario, kernel: Kernel) -> None:
        self._scenario, self._kernel = scenario, kernel
        self._untold_until = 0

    def keep_quiet(self, until: int) -> None:
        """Let nobody tell of anything until then."""
        self._untold_until = until

    def per_second(self, now: int) -> float:
        """Return how many requests one frontend gets in a second."""
        scenario, crowd = self._scenario, self._scenario.crowd
        if crowd is None:
            return scenario.requests_per_second
        return crowd.times.at(now) * scenario.workers * crowd.batch / ANSWER_S / scenario.frontends

    def told(self, frontend: str, minute: int) -> Iterator[TrafficReported]:
        """Yield what a frontend tells of a minute, by its number since the beginning: its part of the load, more or less."""
        scenario, planning = self._scenario, self._scenario.planning
        if planning is None or self._kernel.now < self._untold_until:
            return
        for model in scenario.models:
            part = planning.load.at(minute * MINUTE) / scenario.frontends
            requests = round(part * self._kernel.chance(f"{frontend} {model} {minute}").uniform(0.9, 1.1))
            yield TrafficReported(
                frontend=frontend, model=model, minute=EPOCH + timedelta(minutes=minute), requests=requests,
                prompt_tokens=PROMPT * requests, prompt_tokens_squared=PROMPT * PROMPT * requests,
                output_tokens=OUTPUT * requests, late=0, rejected=0,
            )  # fmt: skip
