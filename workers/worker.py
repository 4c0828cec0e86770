"""One worker: an engine, the server around it, and what the fleet is told about both.

    start ── joined ──▶ serving ◀──── resume ────┐
                           │  └── drain ──▶ drained (still there, takes nothing new)
                           ├── stop wanted ──▶ drain within the grace ──▶ left, exit 0
                           ├── it cannot go on ──▶ streams sent elsewhere ──▶ left, exit 1
                           └── killed by a rehearsal (one of many in its process) ──▶ gone without a word, exit 137

It folds nothing: the journal hears from it, and the controller's wishes reach it as requests on the bus that may be
repeated. Without a bus it serves all the same.
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from events import subjects
from events.errors import HoldfastError
from events.journal.port import Journal
from events.observations import DrainFinished, EngineFaulted, ShutdownBegan, WorkerLeft
from workers.engines.engine import Engine, EngineDead, unheard
from workers.exits import BROKE, FELL, KILLED
from workers.obedience import CONVICTED, Obedience, Place
from workers.registration import registration
from workers.server import Server
from workers.shutdown import CLEANUP_S, LEAVING, depart, or_exit

if TYPE_CHECKING:
    from events.bus import Answer, Bus, Handler, Subscription
    from events.channels import Channels
    from workers.devices.report import Devices
    from workers.kv_events import KvPublisher

BEAT_S = 1.0
CHECK_S = 2.0
CHECK_S_MAX = 10.0  # a check that takes longer is a dead engine
START_S_MAX = 960.0  # loading weights: more than an engine gives itself, whose words say why
DEVICES_S_MAX = 10.0  # the driver's own start; later it is waited for no longer
STOP_S_MAX = 2.0  # with the server's 1 s, the links' 1.5 s and the loop's 0.5 s it makes the cleanup's 5 s
FAULT_SAID_EVERY_S = 10.0  # a raising engine is one fact in a while, not one per request
LISTEN_RETRY_S = 0.2

log = structlog.get_logger(__name__)


class Retired(EngineDead):
    """The fleet holds this instance for dead: it was silent too long, or another took its name. A new one takes its place."""


class Broken(EngineDead):
    """A part of the worker failed that it cannot do without. The engine is not to blame."""


class Killed(EngineDead):
    """A rehearsal has killed this worker, which is one of many in its process."""


class Worker:
    """One engine in the fleet."""

    def __init__(
        self,
        place: Place,
        engine: Engine,
        journal: Journal,
        bus: "Bus | None",
        devices: "Devices | None" = None,
        channels: "Channels | None" = None,
        kv: "KvPublisher | None" = None,
    ) -> None:
        self.place = place
        self.engine = engine
        self.server = Server(worker=place.name, instance=place.instance, engine=engine)
        self.server.on_fault = self._engine_faulted
        self.server.moves.landing.host = place.host
        self.server.moves.landing.advertise = place.advertise
        self.obedience = Obedience(
            place,
            engine,
            self.server,
            journal,
            self._say_beat,
            self._retire,
            self._told_to_stop,
            lambda: self.fail(Killed()),
            devices,
        )
        self.serving = asyncio.Event()  # a flag
        self._journal = journal
        self._bus = bus
        self._devices = devices
        self._channels = channels  # through which frontends come in, instead of a port
        self._kv = kv  # says what the engine's prefix cache holds
        if kv is not None:
            kv.muted = lambda: self.server.blackholed
        self._beats = 0
        self._dead: asyncio.Future[EngineDead] | None = None
        self._told = asyncio.Event()  # a flag: the fleet's operator wants it to stop
        self._subscription: Subscription | None = None
        self._handlers = self._subjects()
        self._fault_said_at = float("-inf")
        self._strangers: set[str] = set()
        self._about: dict[str, Any] = {"worker": place.name, "instance": place.instance}
        self._log = log.bind(**self._about)

    async def run(self, stop: asyncio.Event, hurried: asyncio.Event | None = None) -> int:
        """Serve until `stop` is set or it cannot go on; return the exit code. Raise EngineDead if it cannot start.

        Once `hurried` is set, the grace of a stop is over.
        """
        self._dead = asyncio.get_running_loop().create_future()
        if not await self._started(stop):
            return 0
        async with asyncio.TaskGroup() as group:
            works = {"beat": self._beat(), "watch": self._watch(), "listen": self._listen()}
            services = [group.create_task(self._critical(name, work)) for name, work in works.items()]
            try:
                code = await self._until_over(stop, hurried or asyncio.Event())
            except Exception as error:  # a mistake of ours, on the way out: it ends all the same, and says so
                code = await self._fall(broken("shutdown", error))
            for service in services:
                service.cancel()
        return code

    async def _started(self, stop: asyncio.Event) -> bool:
        """Start; False if a stop was wanted before that was done (weights can take minutes)."""
        starting, stopped = asyncio.ensure_future(self._start()), asyncio.ensure_future(stop.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,), timeout=STOP_S_MAX)
            await self._end()
            return False
        starting.result()
        return True

    async def _start(self) -> None:
        await self._find_gpus(loaded=False)
        try:
            async with asyncio.timeout(START_S_MAX) as timer:
                await self.engine.start(self.server.deliver, self._kv.announce if self._kv else unheard)
                if self.place.kv_transport == "nixl":
                    await asyncio.to_thread(self._use_nixl)
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise EngineDead(f"it has not started within {START_S_MAX:g} s") from error
        await self._find_gpus(loaded=True)
        url = await self._let_in()
        if self.kv is not None:
            self.kv.start(self.engine.identity.dp)
        gpus = self._devices.gpus if self._devices else ()
        self._journal.observe(registration(self.place, self.engine, url, gpus, kv_events=self.kv is not None))
        self._watch_gpus()
        self.serving.set()
        self._log.info(
            "worker_ready", url=url, model=self.engine.identity.model, engine=self.engine.identity.engine
        )

    @property
    def kv(self) -> "KvPublisher | None":
        """What publishes the engine's KV events; None where nobody does, or there are none."""
        return self._kv if self.engine.announces else None

    async def _let_in(self) -> str:
        """Let frontends in; return the address that they are told. Raise HoldfastError if the port cannot be had."""
        if self._channels is not None:
            about = self.place.name, self.place.instance
            await self.server.start_behind(self._channels, subjects.plane(*about))
            return subjects.plane_url(*about)
        try:
            host, port = await self.server.start(self.place.host, self.place.port)
        except OSError as error:
            await self.engine.stop()
            raise HoldfastError(
                f"port {self.place.port} of {self.place.host} cannot be had: {error.strerror}"
            ) from error
        reach = self.place.advertise or host
        return f"tcp://[{reach}]:{port}" if ":" in reach else f"tcp://{reach}:{port}"

    def _use_nixl(self) -> None:
        """Load NIXL, which takes seconds: no move waits for it."""
        from workers.kv_transfer.nixl import Nixl

        self.server.moves.use(Nixl(self.place.instance))

    async def _find_gpus(self, loaded: bool) -> None:
        """Find this worker's GPUs: those that were named before the weights are loaded, those that are used after."""
        if self._devices is not None and self._devices.named is not loaded:
            await asyncio.to_thread(self._devices.start, DEVICES_S_MAX)

    def _watch_gpus(self) -> None:
        if self._devices is not None:
            from workers.devices.report import report

            name, instance = self.place.name, self.place.instance
            report(
                self._devices,
                self._journal,
                name,
                instance,
                doubt=self._doubt_gpus,
                died=self._gpu_died,
                broke=lambda error: self.fail(broken("the device watch", error)),
            )

    def _doubt_gpus(self, reason: str) -> None:
        """Send nobody a KV cache from a GPU that has a fatal fault, until none has."""
        if reason:
            self.server.moves.trust.lose("device", f"the source is not trusted: {reason}")
        else:
            self.server.moves.trust.regain("device")

    def _gpu_died(self, reason: str) -> None:
        """Go with a GPU that the engine computes on: nothing that is in its memory can be trusted any more."""
        if self.place.computes_on_gpus:
            self.fail(Broken(reason))

    # --- until it is over

    async def _until_over(self, stop: asyncio.Event, hurried: asyncio.Event) -> int:
        assert self._dead is not None
        wishes = [asyncio.ensure_future(flag.wait()) for flag in (stop, self._told)]
        over: list[asyncio.Future[Any]] = [*wishes, self._dead]
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        self.obedience.stop()
        told = any(wish.done() for wish in wishes)
        for wish in wishes:
            wish.cancel()
        if not told:
            return await self._fall(self._dead.result())
        leaving = asyncio.ensure_future(self._leave(hurried))
        over = [leaving, self._dead]
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            return leaving.result()
        leaving.cancel()  # what it waits for will not come
        await asyncio.wait((leaving,))
        return await self._fall(self._dead.result())

    async def _leave(self, hurried: asyncio.Event) -> int:
        """Go in good order: told to, and with time to finish what runs."""
        grace_s, reason = self.place.grace_s, "operator" if self._told.is_set() else "signal"
        self._log.info("shutdown_began", grace_s=grace_s, in_flight=self.server.in_flight)
        self._journal.observe(ShutdownBegan(**self._about, mode="graceful", grace_s=grace_s, reason=reason))
        graceful = self.place.graceful_shutdown or self.place.migration_limit == 0  # they could not move
        drained = await depart(self.server, grace_s, graceful=graceful, hurried=hurried)
        self._journal.observe(DrainFinished(**self._about, **asdict(drained)))
        await self._end()
        self._journal.observe(WorkerLeft(**self._about, mode="graceful", exit=0))
        self._log.info("worker_left", **asdict(drained))
        return 0

    async def _fall(self, reason: EngineDead) -> int:
        """Go at once: what the engine held is lost, and its streams are wanted elsewhere."""
        if isinstance(reason, Killed):
            return await self._vanish()
        self._log.critical(
            "worker_falls", reason=str(reason), in_flight=self.server.in_flight, exc_info=reason
        )
        if not isinstance(reason, Retired | Broken):
            self._journal.observe(EngineFaulted(**self._about, reason=str(reason), fatal=True))
        self._journal.observe(
            ShutdownBegan(**self._about, mode="self_initiated", grace_s=0.0, reason=str(reason))
        )
        self.server.refuse(LEAVING, tell=False)  # its connections end now
        self.server.end_all(f"engine_shutdown: {reason}")
        self._journal.observe(DrainFinished(**self._about, **asdict(self.server.drained())))
        await self._end()
        self._journal.observe(WorkerLeft(**self._about, mode="self_initiated", exit=FELL))
        return FELL

    async def _vanish(self) -> int:
        """Go as if the process had been killed: nobody is told, and nothing that is still to be sent leaves."""
        self._log.warning("worker_killed", in_flight=self.server.in_flight)
        self.server.abort()
        await self._end()
        return KILLED

    async def _end(self) -> None:
        """Close the server and stop the engine; end the process if that cannot be done in time, and it is our own."""
        self.serving.clear()
        if self._devices is not None:
            self._devices.stop()
        if self._subscription is not None:
            await self._subscription.cancel()
        if self._kv is not None:
            await self._kv.close()
        with contextlib.nullcontext() if self.place.shares_process else or_exit(CLEANUP_S, BROKE):
            await self.server.close()
            try:
                async with asyncio.timeout(STOP_S_MAX):
                    await self.engine.stop()
            except Exception as error:  # a dead engine may not even end as it should
                self._log.warning("engine_not_stopped", error=repr(error))

    # --- services

    async def _critical(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Do what the worker cannot do without; should it fail, the worker goes."""
        try:
            await work
        except Exception as error:
            self.fail(broken(name, error))

    async def _beat(self) -> None:
        while True:
            await self._say_beat()
            await asyncio.sleep(BEAT_S)

    async def _say_beat(self) -> None:
        if self._bus is None or self.server.blackholed:
            return
        self._beats += 1
        body = {
            **self._about,
            "seq": self._beats,
            "load": msgspec.structs.asdict(self.engine.load()),
            "draining": self.server.draining,
            "convicted": CONVICTED in self.server.moves.trust.doubts,
            "at": datetime.now(UTC).isoformat(),
        }
        await self._bus.publish(subjects.beat(self.place.name), body)

    async def _watch(self) -> None:
        """Ask the engine every so often whether it can go on."""
        assert self._dead is not None
        while not self._dead.done():
            try:
                async with asyncio.timeout(CHECK_S_MAX):
                    await self.engine.check()
            except TimeoutError:
                self.fail(EngineDead(f"its health check did not answer within {CHECK_S_MAX:g} s"))
            except EngineDead as error:
                self.fail(error)
            await asyncio.sleep(CHECK_S)

    def _retire(self) -> None:
        self.fail(Retired())

    def _told_to_stop(self) -> None:
        self._told.set()

    def fail(self, reason: EngineDead) -> None:
        """End this worker: its engine or device is dead, or it is Broken. The first reason stands; exit code 1."""
        if self._dead is not None and not self._dead.done():
            self._dead.set_result(reason)

    def _engine_faulted(self, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._fault_said_at < FAULT_SAID_EVERY_S:
            return
        self._fault_said_at = now
        self._log.error("engine_faulted", reason=reason)
        self._journal.observe(EngineFaulted(**self._about, reason=reason, fatal=False))

    # --- what the controller asks for

    def _subjects(self) -> "dict[str, Handler]":
        name, obedience = self.place.name, self.obedience
        return {
            subjects.drain(name): obedience.on_drain,
            subjects.resume(name): obedience.on_resume,
            subjects.chaos(name): obedience.on_chaos,
            subjects.retire(name): obedience.on_retire,
            subjects.stop(name): obedience.on_stop,
            subjects.distrust(name): obedience.on_distrust,
            subjects.beat(name): self._on_beat,
        }

    async def _listen(self) -> None:
        """Hear the controller's requests, now or as soon as there is a broker to hear them from. One subscription has them
        all: each costs a task and a queue, and a process may have a thousand workers."""
        from events.connection import DISCONNECTED

        if self.kv is not None:
            await self.kv.hear()
        while self._bus is not None and self._subscription is None:
            try:
                self._subscription = await self._bus.subscribe(subjects.live(self.place.name), self._heard)
            except DISCONNECTED:  # it is on its way out or back
                await asyncio.sleep(LISTEN_RETRY_S)

    def _heard(self, subject: str, body: Mapping[str, Any]) -> "Answer | Awaitable[Answer]":
        handler = self._handlers.get(subject)
        if handler is None or (self.obedience.hung and subject != subjects.chaos(self.place.name)):
            return None
        return handler(subject, body)

    def _on_beat(self, subject: str, body: Mapping[str, Any]) -> None:
        """Notice another process under our name: the fleet believes the newer one, the operator should know."""
        other = str(body.get("instance"))
        if other != self.place.instance and other not in self._strangers:
            self._strangers.add(other)
            self._log.error(
                "name_taken", other=other, advice="two live workers share this name; give each its own"
            )


def broken(part: str, error: Exception) -> Broken:
    """Return what ends a worker whose part failed with `error`."""
    broken = Broken(f"{part} failed: {error!r}")
    broken.__cause__ = error
    return broken


def say_why_not(worker: Worker, error: HoldfastError) -> None:
    """Say why a worker does not start: to who reads the log, and to who typed the command."""
    log.error("worker_failed", worker=worker.place.name, reason=str(error))
    print(f"holdfast worker: {error}", file=sys.stderr)
