"""Runs the device watch alone (`holdfast worker --watch-only`), on the host of the GPUs.

    the worker's heartbeats ──▶ its current instance ─┐
    the device watch ──▶ the last state of each fault ─┴──▶ facts about that instance

The watched worker runs in front of the server that uses these GPUs, usually on another host. The watch has no engine and no
request plane, does not register and sends no heartbeat. The end of the watch therefore does not affect the state of any worker.

Facts belong to a worker instance. When the watched worker starts a new instance, the watch therefore reports the last state of
every fault again, including faults that are over.
"""

import asyncio
from collections import deque
from functools import partial

import structlog

from events import subjects
from events.errors import BadSetting, HoldfastError
from events.journal.port import JournalReports
from events.nats.bus import Body, Bus
from events.nats.connection import when_connected
from events.process import presence
from workers.config.settings import WorkerSettings
from workers.devices.faults import FaultChange
from workers.devices.mapping import family, parse
from workers.devices.report import fact, listen
from workers.devices.watch import DeviceWatch, Memory, WatchPolicy

START_S_MAX = 10.0  # the driver's own startup; later calls wait no longer
PAST_MAX = 16  # former instances that are remembered, so that a late heartbeat of one is not taken for a new instance

log = structlog.get_logger(__name__)


class WatchOff(HoldfastError):
    """There is nothing to watch."""


class WatchedWorker:
    """Reports the faults of one worker's GPUs on behalf of that worker."""

    def __init__(self, worker: str, journal: JournalReports) -> None:
        self.instance = ""  # unknown until the first heartbeat
        self._worker = worker
        self._journal = journal
        self._past: deque[str] = deque(maxlen=PAST_MAX)
        self._last: dict[tuple[str, str], FaultChange] = {}  # by device and class

    def changed(self, device: str, change: FaultChange) -> None:
        """Remember a fault change of `device`, and report the change if the worker's instance is known."""
        self._last[device, change.fault_class] = change
        if self.instance:
            self._observe(device, change)

    def on_beat(self, subject: str, body: Body) -> None:
        """Handle a heartbeat of the worker. If it is from a new instance, report the last state of every fault again."""
        instance = str(body.get("instance") or "")
        if not instance or instance == self.instance or instance in self._past:
            return
        self._past.append(self.instance)
        self.instance = instance
        log.info("watch_follows", worker=self._worker, instance=instance)
        for (device, _), change in self._last.items():
            self._observe(device, change)

    def _observe(self, device: str, change: FaultChange) -> None:
        self._journal.observe(fact(self._worker, self.instance, device, change))


def device_watch(settings: WorkerSettings, policy: WatchPolicy | None = None) -> DeviceWatch:
    """Return the device watch for the configured GPUs, or for the GPUs that the process `engine_pid` uses.

    Raise BadSetting if the process `engine_pid` does not exist.
    """
    memory = Memory(settings.data, f"{settings.name}-watch")
    if settings.engine_pid is None:
        return DeviceWatch(parse(settings.gpus), policy, memory=memory)
    if not family(settings.engine_pid):
        raise BadSetting(f"engine_pid = {settings.engine_pid}: there is no such process")
    return DeviceWatch((), policy, users=partial(family, settings.engine_pid), memory=memory)


async def run_watch(
    settings: WorkerSettings,
    journal: JournalReports,
    bus: Bus,
    stop: asyncio.Event,
    policy: WatchPolicy | None = None,
) -> None:
    """Watch the GPUs of the configured worker until `stop` is set.

    Raise BadSetting, UnknownGpus or WatchOff if the watch cannot start. If the watch fails later, raise its error.
    """
    watch, deputy = device_watch(settings, policy), WatchedWorker(settings.name, journal)
    await asyncio.to_thread(watch.start, START_S_MAX)
    if watch.off:
        raise WatchOff(f"{WatchOff.__doc__} {watch.off}")
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    listen(watch, deputy.changed, failed.set_exception)
    subscribe = partial(bus.subscribe, subjects.beat(settings.name), deputy.on_beat)
    subscribing = asyncio.ensure_future(when_connected(subscribe))
    stopped = asyncio.ensure_future(stop.wait())
    path = presence.announce(settings.data, "watch", f"{settings.name}-watch", "")
    log.info("watch_ready", worker=settings.name)
    try:
        await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
    finally:
        watch.stop()
        presence.withdraw(path)
        for task in (subscribing, stopped):
            task.cancel()
