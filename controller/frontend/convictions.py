"""What is done when a canary convicts a worker: everyone whom it has fed since is named, and those in the air act."""

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime

import structlog

from controller.frontend.exposure import Exposures, Stint
from controller.router.table import Key, Seat
from events.fact import Recorded
from events.observations import CanaryFailed, FrontendObservation, WorkerJoined

log = structlog.get_logger(__name__)
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)  # a life that began before anything that this frontend has read


class Convictions:
    """Which canary has failed on which life of a worker, and since when that life could be wrong."""

    def __init__(self, exposures: Exposures, now: Callable[[], datetime]) -> None:
        self._exposures = exposures
        self._now = now
        self._joined_at: dict[Key, datetime] = {}
        self._canary: dict[Key, str] = {}

    def note(self, recorded: Recorded) -> None:
        """Remember what a later conviction needs to know."""
        match recorded.fact:
            case WorkerJoined() as fact:
                self._joined_at[(fact.worker, fact.instance)] = recorded.at
            case CanaryFailed() as fact if fact.confirmed or fact.reason == "non_finite":
                self._canary[(fact.worker, fact.instance)] = fact.canary

    def convict(self, seat: Seat, passes: Mapping[str, datetime]) -> list[FrontendObservation]:
        """Return the facts about everyone exposed since the canary that failed was last sent and passed."""
        canary = self._canary.get(seat.key, "")
        since = passes.get(canary) or self._joined_at.get(seat.key) or LONG_AGO
        log.warning("worker_convicted", worker=seat.worker, canary=canary, flights=len(seat.flights))

        def act(stint: Stint, first: int) -> str:
            assert stint.flight is not None
            return stint.flight.expose(first, on_source=stint.flight.seat is seat)

        return self._exposures.convict(seat.key, since, act, self._now())

    def keep(self, keys: Collection[Key]) -> None:
        """Forget lives of workers that are gone."""
        self._joined_at = {key: at for key, at in self._joined_at.items() if key in keys}
        self._canary = {key: canary for key, canary in self._canary.items() if key in keys}
