"""Supervises a fleet's servers (broker, database, Prometheus), and restarts each server that ends.

The fleet serves requests even without these servers. A server that cannot be restarted (full disk, port taken) is reported and
retried. It never ends the fleet, and never blocks the supervision of the other processes.
"""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path

from controller.adapters.embedded.accounts import DatabaseAccounts, DatabaseUrls
from controller.adapters.embedded.nats import Stuck, reload_users, start_nats
from controller.adapters.embedded.nats_log import REFUSAL, LogTail, refusals
from controller.adapters.embedded.nats_users import BrokerUsers
from controller.adapters.embedded.postgres import start_postgres
from controller.adapters.embedded.prometheus import alert_rules, start_prometheus
from controller.adapters.embedded.server import EmbeddedServer
from controller.processes.children import run_module
from controller.processes.console import print_line, warn
from controller.processes.fleet_dir import FleetDir
from controller.processes.observability.scrape_targets import TargetGroup, file_sd, rule_files, target_groups
from controller.processes.operator_client import reachable
from events.broker_users import workers_of
from events.errors import HoldfastError
from events.fact import Fact
from events.nats.urls import with_keys
from events.observations import IntrusionRefused
from events.process.presence import present

Start = Callable[[int], Coroutine[object, object, EmbeddedServer]]
"""Starts the server on a given port; port 0 means any free port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingPolicy:
    """Intervals of the checks and restarts of a server, in seconds."""

    look_s: float = 0.05
    looks_per_checkup: int = 40  # every 40th check also tests whether a running server is stuck
    wait_min_s: float = 0.2  # delay between two attempts to start a server; doubles after each failure
    wait_max_s: float = 10.0


@dataclass(eq=False)
class KeptServer:
    """Keeps one embedded server running: starts it again whenever it ends or is stuck."""

    start: Start
    announce: Callable[[EmbeddedServer], None]  # called after each start
    # returns whether a running server must be restarted
    stuck: Callable[[EmbeddedServer], bool] = lambda server: False
    policy: KeepingPolicy = KeepingPolicy()

    def __post_init__(self) -> None:
        self._server: EmbeddedServer | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def log(self) -> Path | None:
        """The log file of the server, or None before its first start."""
        return self._server.log if self._server is not None else None

    async def begin(self) -> EmbeddedServer:
        """Start the server for the first time, and supervise it from then on. Raise ServerFailed if it does not start."""
        server = self._server = await self.start(0)
        self.announce(server)
        self._keeping = asyncio.create_task(self._keep(server), name=f"keep-{server.role}")
        return server

    def check(self) -> None:
        """Raise the error that ended the background supervision. Do nothing if the supervision still runs."""
        if self._keeping is not None and self._keeping.done():
            self._keeping.result()

    async def _keep(self, server: EmbeddedServer) -> None:
        while True:
            await self._end_of(server)
            server = self._server = await self._again(server)
            self.announce(server)

    async def _end_of(self, server: EmbeddedServer) -> None:
        """Wait until the server has ended. If the server is stuck, stop it."""
        for look in itertools.count(1):
            await asyncio.sleep(self.policy.look_s)
            if not server.running:
                return warn(f"{server.role} ended; starting it again")
            if look % self.policy.looks_per_checkup == 0 and self.stuck(server):
                warn(f"{server.role} is stuck; starting it again")
                await server.stop()
                return None

    async def _again(self, server: EmbeddedServer) -> EmbeddedServer:
        """Start the server on its old port, and retry until this succeeds, because the kernel may free the port only later."""
        wait_s, failures = self.policy.wait_min_s, 0
        while True:
            try:
                return await self.start(server.port)
            except (HoldfastError, OSError) as error:
                failures += 1
                if failures > 1:  # the first failure may only mean that the port is not free yet
                    warn(f"{server.role} does not start: {error}")
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, self.policy.wait_max_s)

    async def stop(self) -> None:
        """Stop the server gracefully. Do nothing if it was not started."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        if self._server is not None:
            await self._server.stop()


LOOK_EVERY_S = 2.0


class FleetBroker:
    """The broker of a fleet: an embedded broker with its users and permissions, or an external one.

    The embedded broker has a user for each role and for each worker process. The users authenticate by nkeys. Their private keys
    (seeds) are in DIR/secrets/nats. A process that joins later writes its own seed there, and the broker soon accepts the new
    user. Requests that the broker refuses are reported on the terminal and on the journal. An external broker has the users that
    its operator configured.

    `url` is the URL of the broker, and is empty until an embedded broker has started. Each process derives the URL of its own
    user from this URL.
    """

    def __init__(
        self,
        directory: FleetDir,
        url: str,
        present: Callable[[EmbeddedServer], None],
        tell: Callable[[IntrusionRefused], None],
        monitor: int | None,
    ) -> None:
        self.url = url
        self._embedded = not url
        self._directory = directory
        self._present = present
        self._monitor = monitor
        self._tell = tell
        self._log = LogTail()
        self._look_at = 0.0  # monotonic seconds
        self._users = BrokerUsers(directory.broker_keys.resolve())
        self._running: EmbeddedServer | None = None
        self.server = KeptServer(self._start, self._began, Stuck())

    async def begin(self, processes: Iterable[str]) -> None:
        """Start the embedded broker, or check that the external broker answers.

        The embedded broker gets users for all roles and for the worker processes in `processes`. Raise ServerFailed if the
        embedded broker does not start, and Unreachable if the external one does not answer. Raise BadSetting for an invalid seed
        file, and OSError if a file cannot be written.
        """
        if not self._embedded:
            await reachable(self.url)
            return
        self._users.make(processes)
        self.url = with_keys((await self.server.begin()).url, self._users.folder)

    def admit(self, process: str) -> None:
        """Create the broker user of one more worker process, before the process starts.

        Raise OSError if a file cannot be written, BadSetting if a user's file holds no valid seed.
        """
        if self._embedded:
            self._users.make((process,))
            self._reload_users()

    def receive(self, fact: Fact) -> None:
        """If the fact ejects a worker for an intrusion attempt, withdraw the broker account with which the attempt was made.

        The process that replaces the worker gets a new account by `admit`.
        """
        if self._embedded and isinstance(fact, IntrusionRefused) and fact.eject and workers_of(fact.who):
            for user in self._users.withdraw(fact.who, fact.worker):
                warn(f"withdrew the broker account of {user}: it tried to {fact.tried}")
            self._reload_users()

    async def _start(self, port: int) -> EmbeddedServer:
        return await start_nats(
            self._directory.nats, port=port, users=self._users.written(), monitor=self._monitor
        )

    def _began(self, server: EmbeddedServer) -> None:
        self._running = server
        with contextlib.suppress(OSError):
            self._log.news(server)  # refusals are reported from this position of the log on
        self._users.admitted()
        self._present(server)

    def check(self) -> None:
        """Make the broker accept users that were added since the last call, and report the requests that it refused.

        Raise the error that ended the supervision of the server. Call this often.
        """
        self.server.check()
        if self._running is None or not self._running.running:
            return
        self._reload_users()
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY_S
            self._report_refusals(self._running)

    def _reload_users(self) -> None:
        """Make the server reload its configuration if users have changed."""
        if self._running is not None and self._users.changed():
            reload_users(self._running, self._users.written())
            self._users.admitted()

    def _report_refusals(self, server: EmbeddedServer) -> None:
        with contextlib.suppress(OSError):  # the log cannot be read: the next call tries again
            if REFUSAL in (news := self._log.news(server)):
                for one in refusals(news, self._users.names_by_key()):
                    warn(f"the broker refused {one.client} {one.times} times; first attempt: to {one.tried}")
                    self._tell(IntrusionRefused(who=one.client, tried=one.tried, times=one.times))


VARIABLE = "HOLDFAST_DATABASE_URL"


class FleetDatabase:
    """The database of a fleet, embedded or external, and the database URL of each process.

        owner    migrations and rebuilds; no long-running process has it
        writer   the projector
        reader   controllers, frontends and planners; `holdfast database reader` prints it

    The list shows what uses each database account. An external database has one account for all: the one in its URL.
    """

    def __init__(self, directory: FleetDir, url: str, present: Callable[[EmbeddedServer], None]) -> None:
        self.embedded = not url
        self.urls = DatabaseUrls.all_as(url)
        self._directory = directory
        self._accounts: DatabaseAccounts | None = None
        self.server = KeptServer(self._start, present)

    async def begin(self) -> None:
        """Start the embedded database. Do nothing for an external database.

        Raise ServerFailed if the embedded database does not start.
        """
        if self.embedded:
            server = await self.server.begin()
            assert self._accounts is not None
            self.urls = self._accounts.urls(server.url)

    async def _start(self, port: int) -> EmbeddedServer:
        if self._accounts is None:
            self._accounts = DatabaseAccounts.kept(self._directory.accounts)
        return await start_postgres(self._directory.postgres, port=port, accounts=self._accounts)

    def known(self) -> dict[str, str]:
        """Return the database URLs for other `holdfast` commands: the reader's, and the owner's for a rebuild."""
        return {"database_url": self.urls.reader, "database_owner_url": self.urls.owner}

    def environment(self, role: str) -> dict[str, str]:
        """Return the environment variable that holds the database URL of a role.

        For a role without database access the value is empty, so that the process does not inherit the value of `up`.
        """
        url_of = {
            "projector": self.urls.writer,
            **dict.fromkeys(("controller", "frontend", "planner"), self.urls.reader),
        }
        return {VARIABLE: url_of.get(role, "")}

    async def migrate(self) -> tuple[int, str] | None:
        """Migrate the schema in a child process, so that this process need not import the migration's modules.

        Return the stream sequence and the CloudEvents id of the last event that was applied to the database, or None if there is
        no such event. Raise HoldfastError if the migration fails.
        """
        # the URL is not an argument, because `ps` shows arguments to all users
        output = await run_module(
            "controller.adapters.postgres.migrate", environment={VARIABLE: self.urls.owner}
        )
        place = json.loads(output.splitlines()[-1])
        return (place[0], place[1]) if place else None

    async def put_aside(self, name: str) -> None:
        """Rename the schema to `name`, so that its rows stay readable, and create a new, empty schema in its place.

        Raise HoldfastError if that fails.
        """
        from controller.adapters.postgres.migrate import rename

        await rename(self.urls.owner, name)
        await self.migrate()


WRITE_EVERY_S = 2.0


class FleetPrometheus:
    """The Prometheus server of `holdfast up --observability`, which scrapes every process and loads alert rules.

    Prometheus reads its targets from a file, which is rewritten when processes start or stop. The fleet does not depend on
    Prometheus. If Prometheus is not installed or does not start, this is reported and has no other effect.
    """

    def __init__(self, data: Path, announce: Callable[[EmbeddedServer], None]) -> None:
        self._data = data
        self._folder = data / "prometheus"
        self._targets = self._folder / "targets.json"
        self.server = KeptServer(self._start, announce)
        self._begun = False
        self._written: list[TargetGroup] | None = None
        self._write_at = 0.0  # monotonic seconds

    async def begin(self) -> None:
        """Start the server and supervise it from then on. If it does not start, print the reason."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write()
            server = await self.server.begin()
        except (HoldfastError, OSError) as error:
            return warn(f"Prometheus is not running: {error}")
        self._begun = True
        print_line(
            f"  Prometheus at {server.url}{'' if alert_rules() else ' (without alert rules, which are only in the source tree)'}"
        )

    async def _start(self, port: int) -> EmbeddedServer:
        config = file_sd(str(self._targets.resolve())) + rule_files(str(path) for path in alert_rules())
        return await start_prometheus(self._folder, config, port=port)

    def tend(self) -> None:
        """Update the file of targets every 2 s. Raise the error that ended the supervision of the server."""
        if not self._begun:
            return
        self.server.check()
        if time.monotonic() >= self._write_at:
            try:
                self._write()
            except OSError as error:
                warn(f"cannot write {self._targets}: {error.strerror}")

    def _write(self) -> None:
        self._write_at = time.monotonic() + WRITE_EVERY_S
        groups = target_groups(present(self._data))
        if groups == self._written:
            return
        fresh = self._targets.with_suffix(".tmp")
        fresh.write_text(json.dumps(groups, indent=2))
        fresh.replace(self._targets)
        self._written = groups
