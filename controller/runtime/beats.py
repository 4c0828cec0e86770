"""Stores the last heartbeat of each worker instance and the last link report of each frontend.

A link report lists the workers that a frontend is connected to. Both kinds of message are sent over core NATS, which does not
keep messages. A heartbeat that is sent while this process is not connected is lost. So a silence counts only if this process was
connected throughout (`Liveness` checks this). `Heartbeat.at` and `FrontendLinks.at` are the monotonic times at which this process
received the messages. A worker's clock is compared with the clock of this process only to measure the skew.
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
NAMES_MAX = 100_000  # worker instances stored, and frontends; more names can only come from a faulty sender

Life = tuple[str, str]  # worker, instance

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Heartbeat:
    """The last heartbeat of one instance of one worker."""

    at: float
    draining: bool
    load: Mapping[str, int]
    convicted: bool = False  # whether the worker knows that it was convicted
    # share of its batch size that the worker may fill; None: its release cannot limit it
    batch: float | None = None
    skews: deque[float] = field(default_factory=lambda: deque(maxlen=SKEWS_KEPT))

    @property
    def in_flight(self) -> int:
        """Number of running and waiting requests in the instance's engine."""
        return self.load.get("running", 0) + self.load.get("waiting", 0)

    @property
    def skew_s(self) -> float:
        """Seconds by which the worker's clock is ahead of this process's clock: the median over the last heartbeats.

        Negative if the worker's clock is behind. The transit time of a heartbeat makes the worker's clock appear slightly behind.
        0 if no heartbeat was received.
        """
        return median(self.skews) if self.skews else 0.0


@dataclass(slots=True)
class FrontendLinks:
    """One frontend's last report of the workers that it is connected to."""

    at: float
    workers: Mapping[str, str]  # worker name to instance id


class Beats:
    """Receives and stores the last heartbeat of each worker instance and the last link report of each frontend."""

    def __init__(self, clock: Clock, limit: TrafficLimit = HEARTBEATS) -> None:
        """Start without heartbeats and link reports. `limit` is the heartbeat traffic that one worker may publish."""
        self._clock = clock
        self._budgets = SubjectBudgets(limit, NAMES_MAX)
        self.flooded: Callable[[str], None] = lambda worker: None  # called if a worker exceeds its budget
        self.lives: dict[Life, Heartbeat] = {}
        self.frontends: dict[str, FrontendLinks] = {}
        self.bad = 0  # number of rejected messages

    async def start(self, bus: Bus) -> None:
        """Subscribe to heartbeats and link reports."""
        await bus.subscribe_notices(subjects.BEATS, self.on_beat, self.admits)
        await bus.subscribe(subjects.LINKS, self.on_links)

    def admits(self, subject: str, size: int) -> bool:
        """Charge a heartbeat of `size` bytes to its worker's budget, and return whether the budget allows it.

        Called before the heartbeat is decoded.
        """
        now = self._clock.monotonic()
        if self._budgets.admits(subject, size, now, lambda: self.flooded(subject.rpartition(".")[2])):
            return True
        self.bad += 1
        return False

    def fresh(self, worker: str, instance: str, within_s: float) -> Heartbeat | None:
        """Return this instance's last heartbeat; None if none was received within the last `within_s` seconds."""
        beat = self.lives.get((worker, instance))
        return beat if beat is not None and self._clock.monotonic() - beat.at <= within_s else None

    def linked(self, worker: str, instance: str, within_s: float) -> bool:
        """Return whether any frontend reports a connection to this instance.

        Only each frontend's last report counts, and only if it is at most `within_s` seconds old.
        """
        now = self._clock.monotonic()
        return any(
            now - links.at <= within_s and links.workers.get(worker) == instance
            for links in self.frontends.values()
        )

    def on_beat(self, subject: str, body: Body) -> None:
        """Store one heartbeat.

        Reject and count a heartbeat that is malformed, that is sent under another worker's subject, or that comes from a new
        instance when NAMES_MAX instances are stored.
        """
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
        """Store one link report.

        Reject and count a report that is malformed, or that comes from a new frontend when NAMES_MAX frontends are stored.
        """
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
        """Drop heartbeats and link reports older than `older_than_s`, except the heartbeats of the instances in `keep`."""
        now = self._clock.monotonic()
        for life in [k for k, beat in self.lives.items() if now - beat.at > older_than_s and k not in keep]:
            del self.lives[life]
        for name in [n for n, links in self.frontends.items() if now - links.at > older_than_s]:
            del self.frontends[name]

    def _refuse(self, subject: str, why: object) -> None:
        self.bad += 1
        log.debug("beat_refused", subject=subject, why=str(why))
