"""`holdfast up`: starts the parts of a fleet in order, restarts those that die, stops all in order.

    broker ─┬─▶ workers, frontends, controller, notifier    (none of them waits for the database)
            └─▶ database ─▶ migrations ─▶ projector

The arrows show the order of the start. Parts start concurrently where possible. A part that dies is restarted on the same
address. The supervisor receives the exit status of a worker process that died, and records the death on the journal.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import time
from itertools import chain
from typing import Any

from controller.adapters.embedded.server import EmbeddedServer
from controller.processes.children import Child, reap_orphan, shell_status, stop_all, trim
from controller.processes.console import print_line, warn
from controller.processes.fleet_dir import FleetDir, restrict
from controller.processes.operator_client import http_ok
from controller.processes.process_plan import (
    accounts,
    database_processes,
    frontend_grace_s,
    names,
    plan,
    spare_names,
)
from controller.processes.readiness_watch import ReadinessWatch, status_reader
from controller.processes.scaling.worker_scaling import WorkerScaling
from controller.processes.store_rebuilder import StoreRebuilder
from controller.processes.supervised_servers import FleetBroker, FleetDatabase, FleetPrometheus
from controller.processes.up_checks import check, hold
from controller.processes.up_flags import PATIENT, journal_bounds, ready_timeout_s
from controller.processes.worker_exits import WorkerExits
from events import fleet_key
from events.errors import QUARANTINE, HoldfastError, UsageError
from events.fact import Observation
from events.journal.port import JournalUnavailable
from events.nats.urls import as_user
from events.process import descriptors
from events.process.presence import announce, present
from events.process.stopping import run_until
from workers.exits import USAGE

POLL_S = 0.05
TRIM_EVERY_S = 10.0
REAP_EVERY_S = 1.0
FOLLOW_AGAIN_S = 1.0
STOP_GRACE_S = 10.0
CLOSE_S = 3.0  # extra time for a frontend to close after its grace period
LIVES_BEFORE_GIVING_UP = 5  # maximum starts of one part while the fleet has never been ready


def run(args: argparse.Namespace) -> int:
    """Run a fleet until it is stopped, and return the exit code."""
    check(args)
    descriptors.require(len(names(args) + spare_names(args)) + descriptors.SPARE, "start fewer workers")
    return asyncio.run(FleetSupervisor(args).run())


class FleetSupervisor:
    """Supervises all processes of one fleet on this machine."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.dir = FleetDir(args.data)
        named = os.environ.get("HOLDFAST_NATS_URL", "")
        self.broker = FleetBroker(self.dir, named, self._present, self._observe, args.nats_monitor)
        self.database = FleetDatabase(self.dir, os.environ.get("HOLDFAST_DATABASE_URL", ""), self._present)
        self.prometheus = FleetPrometheus(args.data, self._present)
        self.key = os.environ.get(fleet_key.VARIABLE, "")
        self.children: list[Child] = []
        self.exits = WorkerExits(self._observe)
        self.readiness = ReadinessWatch(
            status_reader(self.dir.path),
            names(args),
            ready_timeout_s(args),
            patient=args.engine in PATIENT,
            spares=spare_names(args),
        )
        self.rebuilder = StoreRebuilder(args.data)
        self.scaling = WorkerScaling(args, self.dir, self.children, self._add, self._observe)
        self.stopping = asyncio.Event()
        self.ready = False
        self.journal: Any = None
        self._following: asyncio.Task[None] | None = None
        self.watch: Any = None
        self.bounding: Any = None

    @property
    def url(self) -> str:
        """The URL at which the fleet serves requests."""
        host = f"[{self.args.host}]" if ":" in self.args.host else self.args.host
        tls = getattr(self.args, "tls_cert", None) or os.environ.get("HOLDFAST_FRONTEND__TLS_CERT")
        return f"{'https' if tls else 'http'}://{host}:{self.args.port}"

    @property
    def _supervisor_url(self) -> str:
        return as_user(self.broker.url, "supervisor")

    async def run(self) -> int:
        """Start the fleet, supervise it until it is stopped, and stop its processes. Return 0 after an orderly stop."""
        began = time.monotonic()
        with hold(self.args.host, self.args.port):
            self.dir.take()
            self._restrict_directory()
            loop = asyncio.get_running_loop()
            nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            for number in (signal.SIGINT, signal.SIGTERM, *(() if nohup else (signal.SIGHUP,))):
                loop.add_signal_handler(number, self.stopping.set)
            try:
                # so a database that does not answer does not block Ctrl-C
                await run_until(self.stopping, self._begin(began), leave_s=STOP_GRACE_S)
                await self._supervise()
                return 0
            finally:
                await self._stop()

    def _restrict_directory(self) -> None:
        if foreign := restrict(self.dir.path):
            warn(
                f"{self.dir.path} is readable by other users, because it also contains {foreign[0]}, which is not the fleet's. "
                "The fleet's own files in it are private; use a separate directory with --data"
            )

    # --- starting ---------------------------------------------------------------------------------------------------

    async def _begin(self, began: float) -> None:
        self.readiness.begin()
        await self._start()
        await self._until_ready(began)

    async def _start(self) -> None:
        self.key = fleet_key.key_file(self.key, self.dir.key)
        database = asyncio.create_task(self._start_database())
        try:
            planned = list(plan(self.args, self.dir))
            await self.broker.begin(chain.from_iterable(accounts(self.args, child) for child in planned))
            self._remember()
            if self.args.accept_journal:
                await self._accept_journal(await database)
            await self._open_journal()  # creates the stream, because few other processes may create it
            self.children += planned
            for child in self.children:
                self._spawn(child)
            await self._check_history(await database)
        except BaseException:
            database.cancel()
            with contextlib.suppress(BaseException):
                await database
            raise
        for child in database_processes(self.args, self.dir):
            self._add(child)

    def _remember(self) -> None:
        """Store the fleet's addresses for other commands.

        Called after the broker has started, and again after the database has started.
        """
        self.dir.remember(
            url=self.url,
            nats_url=self.broker.url,
            fleet_key_file=self.key,
            **self.database.known(),
            chaos=self.args.chaos,
            pid=os.getpid(),
        )

    async def _start_database(self) -> tuple[int, str] | None:
        await self.database.begin()
        self._remember()
        return await self.database.migrate()

    async def _accept_journal(self, place: tuple[int, str] | None) -> None:
        from controller.processes import journal_recovery

        await journal_recovery.accept(self._supervisor_url, self.dir.spools, self.database, place)

    async def _check_history(self, place: tuple[int, str] | None) -> None:
        """Raise JournalLost if the journal lacks an acknowledged event or the last event in the database (`place`).

        With --accept-journal, nothing is checked.
        """
        from controller.processes import journal_recovery

        # with --accept-journal, the projection of another journal was set aside before
        if not self.args.accept_journal:
            await journal_recovery.refuse_lost(self.journal, self.dir.spools, place)

    def _present(self, server: EmbeddedServer) -> None:
        announce(self.dir.path, server.role, server.role, server.url, server.pid)

    def _add(self, child: Child) -> None:
        """Start one more process, and restart it from now on whenever it ends."""
        for account in accounts(self.args, child):
            self.broker.admit(account)
        self.children.append(child)
        self._spawn(child)

    def _spawn(self, child: Child) -> None:
        servers = {"HOLDFAST_NATS_URL": self.broker.url, fleet_key.VARIABLE: self.key}
        servers |= self.database.environment(child.role)
        try:
            child.start({**servers, **self.exits.begins(child)})
        # no process, memory or disk space is free; the start is retried after the back-off
        except OSError as error:
            if not self.ready:
                raise HoldfastError(f"cannot start {child.name}: {error}") from error
            child.rest()
            warn(f"cannot start {child.name}, retrying: {error}")

    async def _open_journal(self) -> None:
        from controller.processes import journal_recovery

        self.journal = await journal_recovery.open_journal(self._supervisor_url, self.dir.spools)
        self.watch = journal_recovery.JournalWatch(self.journal)
        after: int | None = None
        with contextlib.suppress(JournalUnavailable):
            # read before a worker of this fleet joins, so that no join is missed
            after = await self.journal.last_seq()
        self._following = asyncio.create_task(self._follow(after))

    async def _follow(self, after: int | None) -> None:
        """Follow the journal after the sequence `after`; None means from its end.

        Pass each event to the parts that react to scaling proposals, intrusion attempts and dead workers.
        """
        why = ""
        while True:
            try:
                after = await self.journal.last_seq() if after is None else after
                async for batch in self.journal.read(after):
                    children = {child.pid: child.name for child in self.children if child.pid is not None}
                    for recorded in batch:
                        self.exits.receive(recorded.fact, children)
                        self.broker.receive(recorded.fact)
                        self.scaling.receive(recorded)
                    after, why = batch[-1].seq, ""
            except JournalUnavailable:
                pass  # the connection is being restored
            except HoldfastError as error:
                if str(error) != why:
                    warn(f"cannot follow the journal, so dead workers are not detected: {error}")
                after, why = None, str(error)
            await asyncio.sleep(FOLLOW_AGAIN_S)

    async def _until_ready(self, began: float) -> None:
        url, watch = self.url, self.readiness
        while not (await http_ok(f"{url}/health") and await watch.serves()):
            self._check_parts()
            if watch.late:
                raise HoldfastError(
                    f"the fleet was not ready after {watch.timeout_s:g} s: {await watch.verdict()}; see {self.dir.logs}"
                )
            await asyncio.sleep(POLL_S)
        self.ready = True
        self.scaling.begin(watch.kept)
        print_line(f"Holdfast is ready after {time.monotonic() - began:.1f} s: {url}/v1 with {watch.there}")
        print_line(f"  data and logs in {self.dir.path}; `holdfast status` shows the fleet, Ctrl-C stops it")
        if consoles := [one.console for one in present(self.dir.path) if one.console]:
            print_line(f"  in a browser: {consoles[0]}")
        if self.args.observability:
            await self.prometheus.begin()

    # --- watching ---------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        if self.ready:  # False if the fleet was stopped while it started
            from controller.processes.journal_recovery import JournalBounding

            self.bounding = JournalBounding(self.journal, journal_bounds(self.args))
        trim_at, reap_at, orphan = 0.0, 0.0, 0
        while not self.stopping.is_set():
            self._check_parts()
            if time.monotonic() >= reap_at:
                reap_at = time.monotonic() + REAP_EVERY_S
                orphan = reap_orphan(orphan)
            if time.monotonic() >= trim_at:
                trim_at = time.monotonic() + TRIM_EVERY_S
                await asyncio.to_thread(self._trim)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), POLL_S)

    def _check_parts(self) -> None:
        """Handle processes that have ended, and start processes that are due to be started."""
        database = self.database.server
        self.scaling.tend(time.monotonic())
        for child in list(self.children):
            status = child.ended()
            if status is not None:
                self._ended(child, status)
            elif action := self.exits.carry_out(child, time.monotonic()):
                warn(action)
            if child.due():
                self._spawn(child)
        self.broker.check()
        database.check()
        self.prometheus.tend()
        self.readiness.check()

    def _trim(self) -> None:
        """Truncate the log of each process and server that exceeds 32 MiB."""
        kept = (self.broker.server, self.database.server, self.prometheus.server)
        servers = [log for server in kept if (log := server.log) is not None]
        for log in (*(child.log for child in list(self.children)), *servers):
            trim(log)

    def _ended(self, child: Child, status: int) -> None:
        if not child.restart:  # the process was stopped by scaling
            print_line(self.scaling.left(child, status))
            return self.exits.ended(child, status)
        self._check_start(child, status)
        warn(f"{child.name} ended with status {shell_status(status)}; starting it again")
        self.exits.ended(child, status)
        self.rebuilder.ended(child, status)

    def _observe(self, fact: Observation) -> None:
        if self.journal is not None:  # without a journal no fleet has started yet
            self.journal.observe(fact)

    def _check_start(self, child: Child, status: int) -> None:
        """Raise an error if the fleet has never been ready and a part of it cannot start."""
        mistaken = status == USAGE  # a retry would not help
        if self.ready:
            return
        words = child.last_words().removeprefix(f"holdfast {child.role}: ").removeprefix("holdfast: ")
        if QUARANTINE in words:  # keep running, because the operator needs the broker to quarantine the event
            self.readiness.wait_for_decision(words)
            return
        if not (mistaken or child.lives >= LIVES_BEFORE_GIVING_UP):
            return
        kind = UsageError if mistaken else HoldfastError
        raise kind(f"{child.name} does not start: {words or f'see {child.log}'}")

    # --- stopping ---------------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """Stop in order: first the planner and the frontends, then workers, controllers, notifier, projector and servers."""
        broker, database, prometheus = self.broker.server, self.database.server, self.prometheus.server
        await self.readiness.end()
        if self.ready:
            print_line(f"Stopping; open streams may finish for up to {frontend_grace_s():g} s")
        await self.rebuilder.stop()
        await prometheus.stop()
        for role in ("planner", "frontend", "worker", "controller", "notifier", "projector"):
            within_s = frontend_grace_s() + CLOSE_S if role == "frontend" else STOP_GRACE_S
            await stop_all(
                [child for child in self.children if child.role == role], within_s, self.exits.ended
            )
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait((self._following,))
        for watch in (self.watch, self.bounding):
            if watch is not None:
                await watch.stop()
        if self.journal is not None:
            await self.journal.close()
        await database.stop()
        await broker.stop()
        (self.dir.path / "fleet.json").unlink(missing_ok=True)
