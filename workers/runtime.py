"""Builds and runs the workers of one process from the process's settings.

At startup, the process waits at most 0.5 s for the broker. A worker that cannot reach the broker still serves, and its facts
are spooled until the broker accepts them.
"""

import asyncio
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import structlog
from msgspec.structs import replace

from events.codec import new_id
from events.errors import HoldfastError
from events.fleet_key import FleetKey
from events.journal.counters import ObservedJournal
from events.journal.nats import NatsJournal
from events.json_types import Json
from events.process import descriptors, presence
from workers import keeper
from workers.assembly import kv_publisher, worker_configs
from workers.config.settings import WorkerConfig, WorkerSettings
from workers.control.commands import Devices
from workers.engines.build import build_engine
from workers.exits import FAILED, LINGER_S, RENEWED, exit_within
from workers.fleet_links import FleetLinks, connect_fleet
from workers.shutdown import Stop, broken, budget_s
from workers.worker import InferenceWorker, WorkerDeadlines, report_start_failure
from workers.worker_group import Many

DESCRIPTORS_EACH = 4  # per worker: a port, the controller's connection, and the connections of two frontends
DESCRIPTORS_SPARE = 64
START_SPARE_S = 60.0  # beyond the engine's own deadline, because the engine's error carries the reason
SERVING_S = 0.5  # how long to wait for one worker before checking again which ones are not serving yet
KEEPER_S = 2.0  # how often the keeper is checked
_PR_SET_PDEATHSIG = 1

log = structlog.get_logger(__name__)


class Alone:
    """Runs a process with a single worker. The process ends when the worker ends."""

    def __init__(
        self, worker: InferenceWorker, stop: Stop, make: Callable[[WorkerConfig], InferenceWorker]
    ) -> None:
        """Build the runner of `worker`.

        When the identity of the worker's engine has changed, `make` builds the worker's next instance.
        """
        self.workers = [worker]
        self._stop = stop
        self._make = make

    async def run(self) -> int:
        """Serve until a stop is requested or the worker fails, and return the exit code."""
        while True:
            try:
                code = await self.workers[0].run(self._stop.wanted, self._stop.hurried)
            except HoldfastError as error:
                report_start_failure(self.workers[0], error)
                return FAILED
            if code != RENEWED:
                return code
            if self._stop.wanted.is_set():
                return 0
            self.workers[0] = self._make(replace(self.workers[0].config, instance=new_id(), name_check_s=0.0))

    def stopping(self) -> bool:
        """Return False while the worker serves, and True at all other times, such as before its first start is complete.

        If the result is True, /health reports that the process is shutting down.
        """
        return not self.workers[0].serving.is_set()

    def fail(self, error: Exception) -> None:
        """End the worker because a callback of the event loop raised `error`."""
        self.workers[0].fail(broken("a callback of the event loop", error))


class Workers(Protocol):
    """Runs the workers of one process: `Alone`, `Many` or `UpstreamGroup`."""

    @property
    def workers(self) -> Sequence[InferenceWorker]:
        """The workers that run now."""

    async def run(self) -> int:
        """Run until the process stops, and return its exit code."""

    def stopping(self) -> bool:
        """Return whether the process is shutting down."""

    def fail(self, error: Exception) -> None:
        """End all workers after an error in a callback of the event loop."""


async def run_worker(settings: WorkerSettings, keeper_pid: int | None = None) -> int:
    """Run the workers of one process until a signal arrives or they end, and return the exit code.

    `keeper_pid` is the pid of the process's keeper; None if the process has no keeper.
    """
    if settings.die_with_parent:
        _die_with_parent()
    if settings.upstreams is not None:
        descriptors.allow()
    elif settings.count > 1:
        descriptors.allow(settings.count * DESCRIPTORS_EACH + DESCRIPTORS_SPARE)
    stop = Stop(settings.second_signal)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.signalled)
    instance = settings.instance or new_id()
    if settings.upstreams is not None:
        return await _run_upstreams(settings, settings.upstreams, instance, stop, keeper_pid)
    links = await connect_fleet(settings, instance)
    try:
        if settings.watch_only:
            return await _watch(settings, links, stop)
        await asyncio.to_thread(_sweep)
        workers = _workers(settings, instance, links, stop)
        asyncio.get_running_loop().set_exception_handler(lambda _, context: end_after(context, workers))
        journal = links.journal if isinstance(links.journal, NatsJournal) else None
        code = await _serve(settings, workers, keeper_pid, journal)
    finally:
        await links.close()
    return _end(code)


def _end(code: int) -> int:
    if code == 0:
        log.info("DistributedRuntime shutdown complete")
    exit_within(LINGER_S, code)
    return code


async def _run_upstreams(
    settings: WorkerSettings, file: Path, instance: str, stop: Stop, keeper_pid: int | None
) -> int:
    """Run one worker for each upstream that `file` lists, until a signal arrives, and return the exit code."""
    # imports PyYAML, which other workers do not need
    from workers.upstreams.group import UpstreamGroup
    from workers.upstreams.life import LifeFactory
    from workers.upstreams.watched_file import UpstreamsFile

    await asyncio.to_thread(_sweep)
    watched = UpstreamsFile(file, settings.data / "upstreams" / f"{settings.name}.yaml")
    await watched.first()
    grace_s = budget_s(settings.grace_s, settings.orchestrator_grace_s, settings.pre_stop)
    build = LifeFactory(settings, _fleet_key(settings)).build
    group = UpstreamGroup(watched, build, stop, instance, grace_s, settings.name_check_s)
    loop, reloads = asyncio.get_running_loop(), set[asyncio.Future[str]]()
    loop.set_exception_handler(lambda _, context: end_after(context, group))
    # the set keeps the tasks from being collected while they run
    loop.add_signal_handler(signal.SIGHUP, lambda: reloads.add(asyncio.ensure_future(group.reload())))
    journal = group.journals if settings.nats_url else None
    return _end(await _serve(settings, group, keeper_pid, journal, group.report))


def _fleet_key(settings: WorkerSettings) -> FleetKey | None:
    return FleetKey.read(Path(settings.fleet_key_file)) if settings.fleet_key_file else None


def _sweep() -> None:
    """Remove the shared memory of killed workers of this host, which would otherwise stay allocated until a reboot."""
    from workers.kv_transfer.receiver import sweep

    if swept := sweep():
        log.info("regions_swept", instances=swept)


async def _watch(settings: WorkerSettings, links: FleetLinks, stop: Stop) -> int:
    from workers.watch_only import run_watch

    assert links.bus is not None, "the settings check requires a broker"
    await run_watch(settings, links.journal, links.bus, stop.wanted)
    return 0


def _workers(settings: WorkerSettings, instance: str, links: FleetLinks, stop: Stop) -> Workers:
    """Return the runner of the process's workers: `Alone` for one worker, `Many` for more."""

    def make(config: WorkerConfig) -> InferenceWorker:
        devices, kv = _devices(settings, config.name), kv_publisher(settings, config, links.bus)
        deadlines = WorkerDeadlines(start_s=settings.ready_timeout + START_SPARE_S)
        return InferenceWorker(
            config, build_engine(settings), links.journal, links.bus, devices, links.channels, kv, deadlines
        )

    configs = worker_configs(settings, instance, _fleet_key(settings))
    if len(configs) == 1:
        return Alone(make(configs[0]), stop, make)
    return Many(configs, make, links.journal, stop, settings.stagger_delay)


def end_after(context: dict[str, object], workers: Workers) -> None:
    """End the workers after an error in an event-loop callback: code that waits for the callback would hang.

    `context` is the argument of the loop's exception handler.
    """
    asyncio.get_running_loop().default_exception_handler(context)
    error = context.get("exception")
    if "handle" in context and isinstance(error, Exception):
        workers.fail(error)


def _devices(settings: WorkerSettings, worker: str) -> Devices | None:
    """Return the watch over a worker's GPUs, which may be simulated; None if the worker watches no GPUs.

    A simulated worker with a single rank watches no GPUs, because the imports would take time and memory.
    """
    ranks = (settings.tp or 1) * settings.dp_size
    if settings.engine == "simulated" and not settings.gpus and ranks > 1:
        from workers.devices.simulated import SimulatedDevices

        return SimulatedDevices(worker, ranks)
    if not settings.gpus and settings.engine != "transformers":
        return None
    from workers.devices.mapping import parse
    from workers.devices.watch import DeviceWatch, Memory

    return DeviceWatch(parse(settings.gpus), memory=Memory(settings.data, worker))


async def _serve(
    settings: WorkerSettings,
    workers: Workers,
    keeper_pid: int | None,
    journal: ObservedJournal | None,
    upstreams: Callable[[], Json] | None = None,
) -> int:
    """Run the workers, the process's admin port and the checks of the keeper; return the process's exit code.

    `journal` is None if the process belongs to no fleet. `upstreams` returns the report of a process with a file of upstreams.
    """
    async with asyncio.TaskGroup() as group:
        beside = [group.create_task(_serve_admin(settings, workers, journal, upstreams))]
        if keeper_pid is not None:
            beside.append(group.create_task(_watch_keeper(keeper_pid)))
        code = await workers.run()
        for task in beside:
            task.cancel()
    return code


async def _watch_keeper(keeper_pid: int) -> None:
    """Log a warning if the keeper ends.

    The workers continue without the keeper. Without it, frontends notice a little later if this process is killed.
    """
    while not keeper.ended(keeper_pid):  # noqa: ASYNC110 (another process)
        await asyncio.sleep(KEEPER_S)
    log.warning("keeper_ended", pid=keeper_pid)


async def _serve_admin(
    settings: WorkerSettings,
    process: Workers,
    journal: ObservedJournal | None,
    upstreams: Callable[[], Json] | None,
) -> None:
    """Once all workers serve, open the admin port and announce this process in the data directory.

    A process with a file of upstreams does so at once, because some of its upstreams may never serve.
    """
    while upstreams is None and (waiting := [one for one in process.workers if not one.serving.is_set()]):
        # a worker of `Many` may have ended and been replaced by a new object
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SERVING_S):
                await waiting[0].serving.wait()
    gc.freeze()  # these objects live until the end: no later collection needs to scan them
    url, pages = "", None
    if settings.admin_port >= 0:
        # In a thread: an import on the loop would look like a hang to every frontend.
        admin = await asyncio.to_thread(importlib.import_module, "workers.admin.server")
        try:
            pages, url = await admin.serve(
                process.workers, process.stopping, settings.host, settings.admin_port, journal=journal,
                upstreams=upstreams,
            )  # fmt: skip
        except OSError as error:
            log.error("admin_port_taken", port=settings.admin_port, error=error.strerror)
    announced: Path | None = None
    try:
        names = settings.names
        name = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
        announced = await asyncio.to_thread(presence.announce, settings.data, "worker", name, url)
        await asyncio.Event().wait()
    except OSError as error:
        log.error("presence_unwritable", data=str(settings.data), error=error.strerror)
    finally:
        if announced is not None:
            presence.withdraw(announced)
        if pages is not None:
            pages.close()


def _die_with_parent() -> None:
    """Make the kernel kill this process with SIGKILL when its parent process ends (Linux only)."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
