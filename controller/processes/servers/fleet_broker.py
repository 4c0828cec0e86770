"""The broker of a fleet: the embedded one, started, kept alive and told who may do what, or one of the operator's own.

The embedded one knows a user for each role and for each process of workers, by nkeys whose seeds lie in DIR/secrets/nats. Who
joins later puts his own there, and is let in a moment later. What the broker refuses anybody is told, on the console and on the
journal. A broker of one's own has the users that its operator gave it.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from controller.adapters.embedded.nats_log import REFUSAL, LogTail, refusals
from controller.adapters.embedded.nats_users import BrokerUsers
from controller.adapters.embedded.servers import EmbeddedServer, Stuck, reload_users, start_nats
from controller.processes.console import warn
from controller.processes.fleet_dir import FleetDir
from controller.processes.operator_client import reachable
from controller.processes.servers.kept_server import KeptServer
from events.broker_users import workers_of
from events.fact import Fact
from events.nats.urls import with_keys
from events.observations import IntrusionRefused

LOOK_EVERY_S = 2.0


class FleetBroker:
    """One fleet's broker. `url` is known once it has begun: each process finds in it as whom it comes."""

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
        self._server = KeptServer(self._start, self._began, Stuck())

    @property
    def log(self) -> Path | None:
        """The embedded server's log; None where there is none."""
        return self._server.log

    async def begin(self, processes: Iterable[str]) -> None:
        """Start the embedded server with users for all roles and for these processes of workers, or make sure that the other
        one answers. Raise ServerFailed, Unreachable, BadSetting or OSError."""
        if not self._embedded:
            await reachable(self.url)
            return
        self._users.make(processes)
        self.url = with_keys((await self._server.begin()).url, self._users.folder)

    def admit(self, process: str) -> None:
        """Let one more process of workers in, before it is started. Raise OSError or what `written` raises."""
        if self._embedded:
            self._users.make((process,))
            self._let_in()

    def hear(self, fact: Fact) -> None:
        """Withdraw the broker account of a sender that is to be ejected. Its successor gets a new seed with `admit`."""
        if self._embedded and isinstance(fact, IntrusionRefused) and fact.eject and workers_of(fact.who):
            for user in self._users.withdraw(fact.who, fact.worker):
                warn(f"{user} is shut out of the broker: it tried to {fact.tried}")
            self._let_in()

    async def _start(self, port: int) -> EmbeddedServer:
        return await start_nats(
            self._directory.nats, port=port, users=self._users.written(), monitor=self._monitor
        )

    def _began(self, server: EmbeddedServer) -> None:
        self._running = server
        with contextlib.suppress(OSError):
            self._log.news(server)  # what is refused from now on is told, however late the first look comes
        self._users.admitted()
        self._present(server)

    def check(self) -> None:
        """Let in who has come since the last look, and tell of those who were refused. Raise what has ended the looking
        after, if anything has."""
        self._server.check()
        if self._running is None or not self._running.running:
            return
        self._let_in()
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY_S
            self._tell_refusals(self._running)

    def _let_in(self) -> None:
        """Let in whoever has come since the last look."""
        if self._running is not None and self._users.changed():
            reload_users(self._running, self._users.written())
            self._users.admitted()

    def _tell_refusals(self, server: EmbeddedServer) -> None:
        with contextlib.suppress(OSError):  # a full disk: the log stays
            if REFUSAL in (said := self._log.news(server)):
                for one in refusals(said, self._users.who()):
                    warn(f"the broker has refused {one.who} {one.times} times, first: to {one.tried}")
                    self._tell(IntrusionRefused(who=one.who, tried=one.tried, times=one.times))

    async def stop(self) -> None:
        """Stop the embedded server in order."""
        await self._server.stop()
