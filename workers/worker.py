"""One worker: runs an engine and its server, and reports its state as facts on the fleet's journal.

    start ── joined ──▶ serving ◀──── resume ────┐
                           │  └── drain ──▶ drained (still connected, refuses new requests)
                           ├── stop requested ──▶ drain within the grace period ──▶ left, exit 0
                           ├── it fails ──▶ streams sent elsewhere ──▶ left, exit 1
                           ├── its engine has changed ──▶ streams sent elsewhere ──▶ left, exit 0 ──▶ new instance in this process
                           └── killed by a rehearsal (one of many in its process) ──▶ gone without a fact, exit 137

The diagram shows the states of one worker instance and the process's exit codes. A worker does not compute the fleet's state.
The controller's commands arrive as requests on the bus, and a command may arrive more than once. A worker without a bus still
serves requests.
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import structlog

from events import subjects
from events.errors import HoldfastError
from events.journal.port import JournalReports
from events.nats.bus import Bus
from events.nats.channels import Channels
from events.observations import DrainFinished, EngineFaulted, ShutdownBegan, WorkerLeft
from workers.config.settings import WorkerConfig
from workers.control.commands import Devices, RehearsedFaults, WorkerCommands
from workers.control.membership import (
    AdapterReport,
    FleetBeats,
    NameCheck,
    NameTaken,
    WaitReport,
    registration,
)
from workers.engines.engine import Engine, EngineChanged, EngineDead, discard_events
from workers.exits import BROKE, FAILED, KILLED, RENEWED
from workers.frontends import FrontendLimits
from workers.kv_events.publisher import KvPublisher
from workers.kv_transfer.messages import Transport
from workers.migration.target import KvMoveSettings
from workers.output import FaultReport, StreamOutput
from workers.server import WorkerServer
from workers.shutdown import (
    CLEANUP_S,
    LEAVING,
    Broken,
    Killed,
    Retired,
    WorkerEnd,
    broken,
    or_exit,
    shut_down,
)

DEVICES_S_MAX = 10.0  # the driver's own startup; later calls wait no longer


@dataclass(eq=False)
class WorkerGpus:
    """Finds and watches the GPUs of one worker. Every method does nothing if the worker has no GPUs."""

    config: WorkerConfig
    devices: Devices | None
    journal: JournalReports
    output: StreamOutput
    end: WorkerEnd

    @property
    def uuids(self) -> tuple[str, ...]:
        """The GPU UUIDs that the worker registers; empty if it has no GPUs."""
        return self.devices.gpus if self.devices is not None else ()

    async def find(self, *, loaded: bool) -> None:
        """Find this worker's GPUs. Call it with `loaded` False before the engine loads its weights, and True after.

        Configured GPUs are found in the first call. GPUs that are not configured are found in the second call, because an engine
        does not use a GPU before it loads its weights. Raise UnknownGpus if a configured GPU does not exist.
        """
        if self.devices is not None and self.devices.named is not loaded:
            await asyncio.to_thread(self.devices.start, DEVICES_S_MAX)

    def watch(self) -> None:
        """Start to record the faults of the GPUs on the journal."""
        if self.devices is not None:
            from workers.devices.report import report

            name, instance = self.config.name, self.config.instance
            report(
                self.devices, self.journal, name, instance, doubt=self._distrust, died=self._end_with_gpu,
                broke=lambda error: self.end.fail(broken("the device watch", error)),
            )  # fmt: skip

    def stop(self) -> None:
        """Stop reporting GPU faults."""
        if self.devices is not None:
            self.devices.stop()

    def _distrust(self, reason: str) -> None:
        """Stop shipping KV caches because of the GPU fault `reason`, or allow shipping again if `reason` is empty."""
        if reason:
            self.output.distrust("device", f"the source is not trusted: {reason}")
        else:
            self.output.regain("device")

    def _end_with_gpu(self, reason: str) -> None:
        """End the worker if its own process computes on a GPU that failed, because the GPU's memory cannot be trusted.

        If the engine computes in another process, the worker continues.
        """
        if self.config.computes_on_gpus:
            self.end.fail(Broken(reason))


CHECK_S = 2.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDeadlines:
    """Deadlines of one worker, in seconds, for operations that may never finish."""

    # start of the engine: longer than the engine's own deadline, because the engine's error carries the reason
    start_s: float = 1860.0
    check_s: float = 10.0  # an engine that does not answer its check in this time is dead
    # stop of the engine: with 1 s for the server, 1.5 s for the links and 0.5 s for the loop, within the cleanup's 5 s
    stop_s: float = 2.0
    cleanup_s: float = CLEANUP_S


def _kv_transport(config: WorkerConfig) -> Callable[[], Transport] | None:
    """Return the factory of the configured KV transport; None if only shared memory and sockets are used."""
    if config.kv_transport != "nixl":
        return None

    def make() -> Transport:
        from workers.kv_transfer.nixl import Nixl  # takes seconds to import, and is an optional dependency

        return Nixl(config.instance)

    return make


class InferenceWorker:
    """Runs one engine as a worker of the fleet, from its registration to its end."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        journal: JournalReports,
        bus: Bus | None,
        devices: Devices | None = None,
        channels: Channels | None = None,
        kv: KvPublisher | None = None,
        deadlines: WorkerDeadlines | None = None,
    ) -> None:
        """Build a worker, which does not serve until `run`.

        Without a `bus`, the worker receives no commands from the fleet. With `channels`, frontends connect through the broker
        instead of a port. `kv` publishes which blocks the engine's prefix cache holds.
        """
        self.config = config
        self.engine = engine
        self.server = WorkerServer(
            worker=config.name,
            instance=config.instance,
            engine=engine,
            kv_moves=KvMoveSettings(
                host=config.host,
                advertise=config.advertise,
                transport=_kv_transport(config),
                key=config.key,
            ),
            key=config.key,
            faults=FaultReport(journal, config.name, config.instance),
            limits=FrontendLimits(config.connections_max, config.connections_per_address_max),
        )
        self._ending = WorkerEnd()
        self.beats = FleetBeats(config, engine, self.server, bus)
        self.faults = RehearsedFaults(config, engine, self.server, self._ending, devices)
        self.commands = WorkerCommands(
            config, engine, self.server, journal, bus, self.beats, self._ending, self.faults
        )
        self.serving = asyncio.Event()  # set while the worker accepts frontends
        self.failure = ""  # why this worker has ended; empty: it has not failed
        self._journal = journal
        self._channels = channels
        self._kv = kv
        self._deadlines = deadlines or WorkerDeadlines()
        self._gpus = WorkerGpus(config, devices, journal, self.server.output, self._ending)
        self._waits = WaitReport(config, engine, journal)
        self._adapters = AdapterReport(config, engine, journal)
        self._name = NameCheck(config, bus, journal)
        self._about: dict[str, Any] = {"worker": config.name, "instance": config.instance}
        self._log = log.bind(**self._about)

    async def run(self, stop: asyncio.Event, hurried: asyncio.Event | None = None) -> int:
        """Serve until `stop` is set or the worker fails, and return the exit code.

        Once `hurried` is set, the grace period of a graceful shutdown is over. Raise HoldfastError if the worker cannot start,
        for example EngineDead or NameTaken.
        """
        dead = self._ending.begin()
        if not await self._start_unless_stopped(stop):
            return 0
        async with asyncio.TaskGroup() as group:
            works = {"beat": self.beats.run(), "watch": self._watch(dead), "listen": self._listen()}
            services = [group.create_task(self._critical(name, work)) for name, work in works.items()]
            try:
                code = await self._until_over(dead, stop, hurried or asyncio.Event())
            except Exception as error:  # a bug during shutdown: the worker ends anyway, and records that
                code = await self._leave_failed(broken("shutdown", error))
            for service in services:
                service.cancel()
        return code

    async def _start_unless_stopped(self, stop: asyncio.Event) -> bool:
        """Start the worker, which can take minutes. If `stop` is set first, cancel the start and return False."""
        starting, stopped = asyncio.ensure_future(self._start()), asyncio.ensure_future(stop.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,), timeout=self._deadlines.stop_s)
            await self._end()
            self._waits.leave()
            return False
        starting.result()
        return True

    async def _start(self) -> None:
        async with self._name.listening():
            await self._load()
            try:
                await self._name.again()
            except NameTaken:
                await self.engine.stop()
                raise
            url = await self._accept_frontends()
        if self.kv is not None:
            self.kv.start(self.engine.identity.dp, muted=lambda: self.server.connections.blackholed)
        gpus, identity = self._gpus.uuids, self.engine.identity
        joined = registration(self.config, self.engine, url, gpus, kv_events=self.kv is not None)
        self._journal.observe(joined)
        self._adapters.registered(joined.adapters)
        self._gpus.watch()
        self.serving.set()
        self._log.info("worker_ready", url=url, model=identity.model, engine=identity.engine)

    async def _load(self) -> None:
        """Start the engine and find the engine's GPUs. Raise EngineDead if the engine does not start in time."""
        await self._gpus.find(loaded=False)
        moves = self.server.moves
        try:
            async with asyncio.timeout(self._deadlines.start_s) as timer, self._waits.reporting():
                announce = self._kv.announce if self._kv else discard_events
                await self.engine.start(self.server.deliver, announce)
                await moves.start()
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise EngineDead(f"the engine did not start within {self._deadlines.start_s:g} s") from error
        await self._gpus.find(loaded=True)

    @property
    def kv(self) -> KvPublisher | None:
        """The publisher of the engine's KV events; None if none is configured or the engine announces no KV events."""
        return self._kv if self.engine.announces else None

    async def _accept_frontends(self) -> str:
        """Accept frontends and return the URL at which they connect. Raise HoldfastError if the port cannot be bound."""
        if self._channels is not None:
            about = self.config.name, self.config.instance
            await self.server.start_behind(self._channels, subjects.plane(*about))
            return subjects.plane_url(*about)
        try:
            host, port = await self.server.start(self.config.host, self.config.port)
        except OSError as error:
            await self.engine.stop()
            raise HoldfastError(
                f"cannot listen on port {self.config.port} of {self.config.host}: {error.strerror}"
            ) from error
        reach = self.config.advertise or host
        return f"tcp://[{reach}]:{port}" if ":" in reach else f"tcp://{reach}:{port}"

    # --- until the worker ends

    async def _until_over(
        self, dead: asyncio.Future[EngineDead], stop: asyncio.Event, hurried: asyncio.Event
    ) -> int:
        stop_waits = [asyncio.ensure_future(flag.wait()) for flag in (stop, self._ending.stop_requested)]
        over: list[asyncio.Future[Any]] = [*stop_waits, dead]
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        self.commands.stop()
        stop_requested = any(wait.done() for wait in stop_waits)
        for wait in stop_waits:
            wait.cancel()
        if not stop_requested:
            return await self._leave_failed(dead.result())
        leaving = asyncio.ensure_future(self._shut_down(hurried))
        over = [leaving, dead]
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            return leaving.result()
        leaving.cancel()  # the worker has failed, so that its streams may never finish
        await asyncio.wait((leaving,))
        return await self._leave_failed(dead.result())

    async def _shut_down(self, hurried: asyncio.Event) -> int:
        """Shut down gracefully after a stop request, and return exit code 0. Open requests get `grace_s` seconds to finish."""
        grace_s = self.config.grace_s
        reason = "operator" if self._ending.stop_requested.is_set() else "signal"
        self._log.info("shutdown_began", grace_s=grace_s, in_flight=self.server.in_flight)
        self._journal.observe(ShutdownBegan(**self._about, mode="graceful", grace_s=grace_s, reason=reason))
        # with a migration limit of 0, streams cannot move to other workers, so the worker waits for them
        graceful = self.config.graceful_shutdown or self.config.migration_limit == 0
        drained = await shut_down(self.server, grace_s, graceful=graceful, hurried=hurried)
        self._journal.observe(DrainFinished(**self._about, **asdict(drained)))
        await self._end()
        self._journal.observe(WorkerLeft(**self._about, mode="graceful", exit=0))
        self._log.info("worker_left", **asdict(drained))
        return 0

    async def _leave_failed(self, reason: EngineDead) -> int:
        """End after the failure `reason` without a grace period, and return the exit code.

        The engine's KV cache is lost, so frontends continue the streams on other workers.
        """
        self.failure = str(reason)
        if isinstance(reason, Killed):
            return await self._end_abruptly()
        if isinstance(reason, EngineChanged):
            return await self._renew(reason)
        self._log.critical(
            "worker_falls", reason=str(reason), in_flight=self.server.in_flight, exc_info=reason
        )
        if not isinstance(reason, Retired | Broken):
            self._journal.observe(EngineFaulted(**self._about, reason=str(reason), fatal=True))
        await self._leave_now(str(reason), "self_initiated", FAILED)
        return FAILED

    async def _renew(self, reason: EngineChanged) -> int:
        """End this instance because the engine's identity has changed; return the exit code RENEWED.

        The streams continue on other workers. The next instance registers the new identity.
        """
        self._log.warning("worker_renewed", reason=str(reason), in_flight=self.server.in_flight)
        await self._leave_now(str(reason), "graceful", 0)
        return RENEWED

    async def _leave_now(self, reason: str, mode: Literal["graceful", "self_initiated"], code: int) -> None:
        """Leave without a grace period. End every stream with an error, so that its frontend continues it elsewhere."""
        self._journal.observe(ShutdownBegan(**self._about, mode=mode, grace_s=0.0, reason=reason))
        server, output = self.server, self.server.output
        server.refuse(LEAVING, tell=False)  # frontends need no notice, because their connections end now
        output.end_all(f"engine_shutdown: {reason}")
        self._journal.observe(DrainFinished(**self._about, **asdict(server.drain.drained())))
        await self._end()
        self._journal.observe(WorkerLeft(**self._about, mode=mode, exit=code))

    async def _end_abruptly(self) -> int:
        """End as if the process had been killed, without notifying frontends. Unsent output is lost."""
        self._log.warning("worker_killed", in_flight=self.server.in_flight)
        self.server.abort()
        await self._end()
        return KILLED

    async def _end(self) -> None:
        """Close the server and stop the engine.

        If that takes longer than `cleanup_s`, end the process, unless other workers run in it.
        """
        self.serving.clear()
        self._gpus.stop()
        await self.commands.close()
        if self._kv is not None:
            await self._kv.close()
        shared = self.config.shares_process
        with contextlib.nullcontext() if shared else or_exit(self._deadlines.cleanup_s, BROKE):
            await self.server.close()
            try:
                async with asyncio.timeout(self._deadlines.stop_s):
                    await self.engine.stop()
            except Exception as error:  # a dead engine may fail to stop properly
                self._log.warning("engine_not_stopped", error=repr(error))

    # --- services

    async def _critical(self, name: str, work: Awaitable[None]) -> None:
        """Await `work`, a service without which the worker cannot run. If the service raises, end the worker."""
        try:
            await work
        except Exception as error:
            self.fail(broken(name, error))

    async def _listen(self) -> None:
        """Subscribe to frontends' requests for missed KV events and to the controller's commands."""
        if self.kv is not None:
            await self.kv.subscribe()
        await self.commands.run()

    async def _watch(self, dead: asyncio.Future[EngineDead]) -> None:
        """Check the engine every 2 s, and report changes of its adapters, until the worker is dead."""
        while not dead.done():
            try:
                async with asyncio.timeout(self._deadlines.check_s):
                    await self.engine.check()
                self._adapters.look(asyncio.get_running_loop().time())
            except TimeoutError:
                limit = f"{self._deadlines.check_s:g} s"
                self.fail(EngineDead(f"the engine's health check did not answer within {limit}"))
            except EngineDead as error:
                self.fail(error)
            await asyncio.sleep(CHECK_S)

    def fail(self, reason: EngineDead) -> None:
        """End this worker because of `reason`. Only the first call has an effect; `_leave_failed` chooses the exit code."""
        self._ending.fail(reason)


def report_start_failure(worker: InferenceWorker, error: HoldfastError) -> None:
    """Report why a worker did not start, both in the log and as a message of the command line on stderr."""
    log.error("worker_failed", worker=worker.config.name, reason=str(error))
    print(f"holdfast worker: {error}", file=sys.stderr)
