"""The broker of a fleet: the embedded one with its users and permissions, or an external one.

The embedded broker has a user for each role and for each worker process, authenticated by nkeys. Their seeds are in
DIR/secrets/nats. A process that joins later writes its own seed there and is admitted a moment later. The broker's refusals are
reported on the console and on the journal. An external broker has the users that its operator configured.
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
from controller.processes.servers.supervised_server import KeptServer
from events.broker_users import workers_of
from events.fact import Fact
from events.nats.urls import with_keys
from events.observations import IntrusionRefused

LOOK_EVERY_S = 2.0


class FleetBroker:
    """One fleet's broker. `url` is set once it has started; each process derives its own user from it."""

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
        """The log of the embedded server; None if there is none."""
        return self._server.log

    async def begin(self, processes: Iterable[str]) -> None:
        """Start the embedded server with users for all roles and for these worker processes, or check that the external one
        answers. Raise ServerFailed, Unreachable, BadSetting or OSError."""
        if not self._embedded:
            await reachable(self.url)
            return
        self._users.make(processes)
        self.url = with_keys((await self._server.begin()).url, self._users.folder)

    def admit(self, process: str) -> None:
        """Create the user of one more worker process, before it starts. Raise OSError or what `written` raises."""
        if self._embedded:
            self._users.make((process,))
            self._reload_users()

    def hear(self, fact: Fact) -> None:
        """Withdraw the account of a sender that is to be ejected. Its successor gets a new seed through `admit`."""
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
            self._log.news(server)  # refusals are reported from here on
        self._users.admitted()
        self._present(server)

    def check(self) -> None:
        """Admit users that were added since the last call, and report refusals. Raise the error that ended the supervision of
        the server, if any."""
        self._server.check()
        if self._running is None or not self._running.running:
            return
        self._reload_users()
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY_S
            self._report_refusals(self._running)

    def _reload_users(self) -> None:
        """Reload the server's configuration if users have changed."""
        if self._running is not None and self._users.changed():
            reload_users(self._running, self._users.written())
            self._users.admitted()

    def _report_refusals(self, server: EmbeddedServer) -> None:
        with contextlib.suppress(OSError):  # a full disk: the next call reads the log again
            if REFUSAL in (news := self._log.news(server)):
                for one in refusals(news, self._users.names_by_key()):
                    warn(f"the broker refused {one.client} {one.times} times; first attempt: to {one.tried}")
                    self._tell(IntrusionRefused(who=one.client, tried=one.tried, times=one.times))

    async def stop(self) -> None:
        """Stop the embedded server gracefully."""
        await self._server.stop()
