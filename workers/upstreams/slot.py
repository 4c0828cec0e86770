"""One upstream of a process: runs its worker, life after life, as the file of upstreams wants it.

    starting ──▶ serving ── removed, paused, changed ──▶ draining ──▶ gone, paused, or starting again
        ▲           └── its worker fails or is restarted ──▶ failed ── back-off ──┐
        └──────────────────────────────────────────────────────────────────────────┘

No error of one upstream reaches another: whatever its worker raises ends this life only. The next one starts after a back-off.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from events.errors import HoldfastError
from events.journal.counters import JournalCounters
from events.journal.nats import NatsJournal
from events.journal.port import JournalReports
from events.observations import WorkerLeft
from workers.config.upstreams import UpstreamEntry
from workers.engines.engine import EngineDead
from workers.exits import KILLED, RENEWED
from workers.upstreams.changes import needs_rejoin
from workers.upstreams.life import UpstreamLife
from workers.worker import InferenceWorker, report_start_failure
from workers.worker_group import BackOff

log = structlog.get_logger(__name__)


class BuildLife(Protocol):
    """Builds the next life of an upstream's worker."""

    async def __call__(self, entry: UpstreamEntry, instance: str, *, name_check_s: float) -> UpstreamLife: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamState:
    """One upstream as `holdfast upstream list` shows it."""

    name: str
    url: str
    zone: str
    weight: float
    state: str  # starting, waiting, serving, drained, draining, failed, paused
    since: float  # seconds since 1970
    instance: str
    model: str
    requests: int
    in_flight: int
    last_error: str


class UpstreamSlot:
    """The worker of one upstream. `run` serves until the upstream is removed."""

    def __init__(
        self,
        entry: UpstreamEntry,
        build: BuildLife,
        new_instance: Callable[[], str],
        hurried: asyncio.Event,
        *,
        name_check_s: float = 0.0,
        back_off: BackOff | None = None,
        count: Callable[[JournalCounters], None] = lambda counters: None,
    ) -> None:
        """Prepare to run the worker of `entry`.

        `new_instance` returns the id of the next life. Once `hurried` is set, draining workers end at once. Before its first
        life, the worker listens for `name_check_s` seconds whether its name is free. `count` is called with the counters of
        each life's journal when the life has ended.
        """
        self.name = entry.name
        self._entry = entry  # as last wanted, even after the removal
        self._removed = False
        self._build = build
        self._new_instance = new_instance
        self._hurried = hurried
        self._name_check_s = name_check_s
        self._back_off = back_off or BackOff()
        self._count = count
        self._life: UpstreamLife | None = None
        self._stop = asyncio.Event()  # ends the present life
        self._changed = asyncio.Event()  # ends a wait
        self._state, self._since = "starting", time.time()  # noqa: TID251 (shown to operators)
        self._error = ""
        self._requests = 0  # of former lives

    @property
    def worker(self) -> InferenceWorker | None:
        """The worker of the present life; None between two lives."""
        return None if self._life is None else self._life.worker

    @property
    def journal(self) -> JournalReports | None:
        """The journal of the present life; None between two lives."""
        return None if self._life is None else self._life.links.journal

    def want(self, entry: UpstreamEntry | None) -> None:
        """Run the worker by this entry from now on. None: drain, leave and end `run`."""
        self._removed = entry is None
        self._entry = self._entry if entry is None else entry
        self._changed.set()
        if self._removed or self._entry.pause:
            self._end_life()
        elif self._life is not None and not self._stop.is_set():
            if needs_rejoin(self._life.entry, self._entry):
                self._end_life()
            else:
                self._life.adjust(self._entry)

    def fail(self, error: EngineDead) -> None:
        """End the present life because of an error of the whole process."""
        if (worker := self.worker) is not None:
            worker.fail(error)

    def _end_life(self) -> None:
        self._stop.set()
        if self._life is not None:
            self._enter("draining")

    async def run(self) -> None:
        """Run the worker until the upstream is removed."""
        structlog.contextvars.bind_contextvars(worker=self.name)
        loop, back_off, wait_s = asyncio.get_running_loop(), self._back_off, self._back_off.wait_s_min
        while not self._removed:
            self._changed.clear()
            self._stop = asyncio.Event()
            if self._entry.pause:
                self._enter("paused")
                await self._changed.wait()
                continue
            began = loop.time()
            failed = await self._live(self._entry)
            if self._stop.is_set():
                continue  # as wanted
            settled = loop.time() - began > back_off.settled_s or not failed
            wait_s = back_off.wait_s_min if settled else wait_s
            if failed:
                self._enter("failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            wait_s = min(2 * wait_s, back_off.wait_s_max)

    async def _live(self, entry: UpstreamEntry) -> bool:
        """Run one life. Return whether it failed."""
        self._enter("starting")
        try:
            life = await self._build(entry, self._new_instance(), name_check_s=self._name_check_s)
        except (HoldfastError, OSError) as error:
            self._note(str(error))
            return True
        except Exception as error:  # a bug: it must not end the other upstreams
            log.exception("upstream_broke")
            self._note(f"unexpected error: {type(error).__name__}, see the log")
            return True
        self._life = life
        try:
            return await self._run_worker(life)
        finally:
            self._life = None
            self._requests += life.worker.server.counters.requests
            await life.links.close()
            if isinstance(life.links.journal, NatsJournal):
                self._count(life.links.journal.counters)

    async def _run_worker(self, life: UpstreamLife) -> bool:
        worker = life.worker
        if self._entry is not life.entry:  # changed while the life was built
            self.want(None if self._removed else self._entry)
        try:
            code = await worker.run(self._stop, self._hurried)
        except HoldfastError as error:
            report_start_failure(worker, error)
            self._note(str(error))
            return True
        except Exception as error:  # a bug: it must not end the other upstreams
            log.exception("upstream_broke")
            self._note(f"unexpected error: {type(error).__name__}, see the log")
            return True
        self._name_check_s = 0.0
        if code == KILLED:
            config, journal = worker.config, life.links.journal
            journal.observe(
                WorkerLeft(worker=config.name, instance=config.instance, mode="immediate", exit=KILLED)
            )
        if worker.failure:
            self._note(worker.failure)
        return code not in (0, RENEWED)

    def _enter(self, state: str) -> None:
        if state != self._state:
            self._state, self._since = state, time.time()  # noqa: TID251 (shown to operators)

    def _note(self, error: str) -> None:
        if error != self._error:
            log.warning("upstream_failed", url=self._entry.url, reason=error)
        self._error = error

    def report(self) -> UpstreamState:
        """Return the present state for operators."""
        worker, awaits = self.worker, None
        if worker is not None and self._state in ("starting", "waiting", "serving", "drained"):
            awaits = worker.engine.awaits()
            if worker.serving.is_set():
                self._enter("drained" if worker.server.drain.draining else "serving")
            else:
                self._enter("waiting" if awaits is not None else "starting")
        return UpstreamState(
            name=self.name,
            url=self._entry.url,
            zone=self._entry.zone,
            weight=self._entry.weight,
            state=self._state,
            since=self._since,
            instance="" if worker is None else worker.config.instance,
            model="" if worker is None else worker.engine.identity.model,
            requests=self._requests + (0 if worker is None else worker.server.counters.requests),
            in_flight=0 if worker is None else worker.server.in_flight,
            last_error=awaits.reason if awaits is not None else self._error,
        )
