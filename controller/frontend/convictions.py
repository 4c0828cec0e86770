"""What is done when a canary convicts a worker: everyone whom it has fed since is named, and those in the air act."""

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime

import structlog

from controller.frontend.exposure import Exposures, Stint
from controller.router.table import Key, Seat
from events.fact import Recorded
from events.observations import CanaryFailed, ExposureUnknown, FrontendObservation, WorkerJoined

log = structlog.get_logger(__name__)
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)  # a life that began before anything that this frontend has read


class Convictions:
    """Which canary has failed on which life of a worker, and since when that life could be wrong."""

    def __init__(self, exposures: Exposures, now: Callable[[], datetime]) -> None:
        self._exposures = exposures
        self._now = now
        self._joined_at: dict[Key, datetime] = {}
        self._canary: dict[Key, str] = {}

    def note(self, recorded: Recorded) -> Key | None:
        """Remember what a later conviction needs to know; return the life that this fact convicts, if it does."""
        match recorded.fact:
            case WorkerJoined() as fact:
                self._joined_at[(fact.worker, fact.instance)] = recorded.at
            case CanaryFailed() as fact if fact.confirmed or fact.reason == "non_finite":
                self._canary[(fact.worker, fact.instance)] = fact.canary
                if fact.golden != "none" or fact.reason == "non_finite":
                    return fact.worker, fact.instance
        return None

    def convict(self, seat: Seat, passes: Mapping[str, datetime]) -> list[FrontendObservation]:
        """Return the facts about everyone exposed since the canary that failed was last sent and passed."""
        canary, since = self._since(seat.key, passes)
        log.warning("worker_convicted", worker=seat.worker, canary=canary, flights=len(seat.flights))

        def act(stint: Stint, first: int) -> str:
            assert stint.flight is not None
            return stint.flight.expose(first, on_source=stint.flight.seat is seat)

        return self._exposures.convict(seat.key, since, act, self._now())

    def missed(self, frontend: str, seat: Seat, passes: Mapping[str, datetime]) -> ExposureUnknown:
        """Return what is to be said of a worker that was convicted before this frontend could act: whom its
        predecessors served is not known any more."""
        _, since = self._since(seat.key, passes)
        why = "it was convicted before this frontend had read the journal"
        return ExposureUnknown(
            frontend=frontend,
            worker=seat.worker,
            instance=seat.instance,
            since=since,
            until=max(since, self._now()),
            why=why,
        )

    def _since(self, key: Key, passes: Mapping[str, datetime]) -> tuple[str, datetime]:
        """Return the canary that failed, and since when this life could be wrong."""
        canary = self._canary.get(key, "")
        return canary, passes.get(canary) or self._joined_at.get(key) or LONG_AGO

    def keep(self, keys: Collection[Key]) -> None:
        """Forget lives of workers that are gone."""
        self._joined_at = {key: at for key, at in self._joined_at.items() if key in keys}
        self._canary = {key: canary for key, canary in self._canary.items() if key in keys}
