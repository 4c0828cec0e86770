"""What workers and frontends have just said of themselves: heartbeats and link reports. Kept by nobody else.

Core NATS, so a beat that nobody heard is gone; whoever concludes something from silence must know that it was
listening (`Liveness`). `at` in here is our own monotonic clock at the time of hearing; a worker's clock is only ever
compared with ours to measure how far it is off.
"""

from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median

import structlog

from controller.ports import Clock
from events import subjects
from events.intrusion.reported_load import counts
from events.intrusion.send_budget import SubjectBudgets, TrafficLimit, traffic
from events.nats.bus import Body, Bus

SKEWS_KEPT = 9
NAMES_MAX = 100_000  # workers and frontends remembered; more than that is somebody's mistake

USUAL = traffic(
    per_s=20.0, burst=200.0, mb_per_s=0.25, mb_burst=1.0
)  # of one worker, which sends one a second

Life = tuple[str, str]  # worker, instance

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Heartbeat:
    """The last heartbeat of one instance of one worker."""

    at: float
    draining: bool
    load: Mapping[str, int]
    convicted: bool = False  # it knows that the fleet does not believe what it computes
    batch: float | None = None  # the share of its batch that it may fill; None: it does not know of that
    skews: deque[float] = field(default_factory=lambda: deque(maxlen=SKEWS_KEPT))

    @property
    def in_flight(self) -> int:
        """Requests in its engine, running and waiting."""
        return self.load.get("running", 0) + self.load.get("waiting", 0)

    @property
    def skew_s(self) -> float:
        """How far its clock is ahead of ours, seconds; the time on the wire makes it look a little behind."""
        return median(self.skews) if self.skews else 0.0


@dataclass(slots=True)
class FrontendLinks:
    """One frontend's last report of the workers that it is connected to."""

    at: float
    workers: Mapping[str, str]  # worker to instance


class Beats:
    """Hears heartbeats and link reports."""

    def __init__(self, clock: Clock, limit: TrafficLimit = USUAL) -> None:
        """`limit`: what one worker may publish."""
        self._clock = clock
        self._budgets = SubjectBudgets(limit, NAMES_MAX)
        self.flooded: Callable[[str], None] = lambda worker: None  # called with a sender of too much
        self.lives: dict[Life, Heartbeat] = {}
        self.frontends: dict[str, FrontendLinks] = {}
        self.bad = 0  # messages that made no sense

    async def start(self, bus: Bus) -> None:
        """Begin to hear what is said on the bus."""
        await bus.hear(subjects.BEATS, self.on_beat, self.admits)
        await bus.subscribe(subjects.LINKS, self.on_links)

    def admits(self, subject: str, size: int) -> bool:
        """Return whether a heartbeat is within its worker's budget, before it is decoded."""
        now = self._clock.monotonic()
        if self._budgets.admits(subject, size, now, lambda: self.flooded(subject.rpartition(".")[2])):
            return True
        self.bad += 1
        return False

    def fresh(self, worker: str, instance: str, within_s: float) -> Heartbeat | None:
        """Return this instance's last beat if it is not older than `within_s`."""
        beat = self.lives.get((worker, instance))
        return beat if beat is not None and self._clock.monotonic() - beat.at <= within_s else None

    def linked(self, worker: str, instance: str, within_s: float) -> bool:
        """Whether a frontend said within `within_s` that it has a live connection to this instance."""
        now = self._clock.monotonic()
        return any(
            now - links.at <= within_s and links.workers.get(worker) == instance
            for links in self.frontends.values()
        )

    def on_beat(self, subject: str, body: Body) -> None:
        """Take one heartbeat in."""
        try:
            worker, instance = str(body["worker"]), str(body["instance"])
            said = body.get("load")
            load = counts(said) if said else {}
            batch = None if body.get("batch") is None else float(body["batch"])
            if batch is not None and not 0 <= batch <= 1:
                raise ValueError(f"batch = {batch!r}")
            skew = (datetime.fromisoformat(body["at"]) - self._clock.now()).total_seconds()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return self._refuse(subject, error)
        if subject != subjects.beat(worker):  # on its own subject a worker can say what it likes, of itself
            return self._refuse(subject, f"it is about {worker}")
        life = (worker, instance)
        known = self.lives.get(life)
        if known is None and len(self.lives) >= NAMES_MAX:
            return self._refuse(subject, "too many workers")
        skews = known.skews if known is not None else deque(maxlen=SKEWS_KEPT)
        skews.append(skew)
        draining, convicted = bool(body.get("draining", False)), bool(body.get("convicted", False))
        self.lives[life] = Heartbeat(self._clock.monotonic(), draining, load, convicted, batch, skews)
        return None

    def on_links(self, subject: str, body: Body) -> None:
        """Take one link report in."""
        try:
            frontend = str(body["frontend"])
            workers = {str(name): str(instance) for name, instance in dict(body["workers"]).items()}
        except (KeyError, TypeError, ValueError) as error:
            return self._refuse(subject, error)
        if frontend not in self.frontends and len(self.frontends) >= NAMES_MAX:
            return self._refuse(subject, "too many frontends")
        self.frontends[frontend] = FrontendLinks(self._clock.monotonic(), workers)
        return None

    def forget(self, keep: Container[Life], older_than_s: float) -> None:
        """Drop what is old and no longer known."""
        now = self._clock.monotonic()
        for life in [k for k, beat in self.lives.items() if now - beat.at > older_than_s and k not in keep]:
            del self.lives[life]
        for name in [n for n, links in self.frontends.items() if now - links.at > older_than_s]:
            del self.frontends[name]

    def _refuse(self, subject: str, why: object) -> None:
        self.bad += 1
        log.debug("beat_refused", subject=subject, why=str(why))
