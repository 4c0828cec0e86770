"""The last heartbeats of workers and link reports of frontends. No other component stores them.

They travel over core NATS, so a beat without a listener is lost. Any conclusion from silence must therefore prove that the
observer was listening (`Liveness`). `at` is our own monotonic clock at reception. A worker's clock is compared with ours only to
measure its skew.
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
from events.intrusion.send_budget import HEARTBEATS, SubjectBudgets, TrafficLimit
from events.nats.bus import Body, Bus

SKEWS_KEPT = 9
NAMES_MAX = 100_000  # workers and frontends stored; more must be a fault of a sender

Life = tuple[str, str]  # worker, instance

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Heartbeat:
    """The last heartbeat of one instance of one worker."""

    at: float
    draining: bool
    load: Mapping[str, int]
    convicted: bool = False  # the worker was notified of its conviction
    batch: float | None = None  # the share of its batch that it may fill; None: not supported
    skews: deque[float] = field(default_factory=lambda: deque(maxlen=SKEWS_KEPT))

    @property
    def in_flight(self) -> int:
        """Requests in its engine, running and waiting."""
        return self.load.get("running", 0) + self.load.get("waiting", 0)

    @property
    def skew_s(self) -> float:
        """Offset of its clock from ours, seconds (positive: ahead); the transit time makes it appear slightly behind."""
        return median(self.skews) if self.skews else 0.0


@dataclass(slots=True)
class FrontendLinks:
    """One frontend's last report of the workers that it is connected to."""

    at: float
    workers: Mapping[str, str]  # worker to instance


class Beats:
    """Receives heartbeats and link reports."""

    def __init__(self, clock: Clock, limit: TrafficLimit = HEARTBEATS) -> None:
        """`limit`: the traffic that one worker may publish."""
        self._clock = clock
        self._budgets = SubjectBudgets(limit, NAMES_MAX)
        self.flooded: Callable[[str], None] = lambda worker: None  # called with a flooding worker
        self.lives: dict[Life, Heartbeat] = {}
        self.frontends: dict[str, FrontendLinks] = {}
        self.bad = 0  # messages that were rejected

    async def start(self, bus: Bus) -> None:
        """Subscribe to heartbeats and link reports."""
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
        """Return this instance's last beat if it is at most `within_s` old, else None."""
        beat = self.lives.get((worker, instance))
        return beat if beat is not None and self._clock.monotonic() - beat.at <= within_s else None

    def linked(self, worker: str, instance: str, within_s: float) -> bool:
        """Return whether a frontend reported within `within_s` a live connection to this instance."""
        now = self._clock.monotonic()
        return any(
            now - links.at <= within_s and links.workers.get(worker) == instance
            for links in self.frontends.values()
        )

    def on_beat(self, subject: str, body: Body) -> None:
        """Store one heartbeat."""
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
        if subject != subjects.beat(worker):  # a worker may publish only about itself
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
        """Store one link report."""
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
        """Drop old entries of unknown instances and frontends."""
        now = self._clock.monotonic()
        for life in [k for k, beat in self.lives.items() if now - beat.at > older_than_s and k not in keep]:
            del self.lives[life]
        for name in [n for n, links in self.frontends.items() if now - links.at > older_than_s]:
            del self.frontends[name]

    def _refuse(self, subject: str, why: object) -> None:
        self.bad += 1
        log.debug("beat_refused", subject=subject, why=str(why))
