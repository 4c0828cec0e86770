"""The Prometheus of `holdfast up --observability`: scrapes every process and loads alert rules.

Prometheus reads its targets from a file that is rewritten when processes start or stop. The fleet does not depend on Prometheus:
if it is not installed or does not start, that is reported and has no other effect.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

from controller.adapters.embedded.prometheus import alert_rules, start_prometheus
from controller.adapters.embedded.servers import EmbeddedServer
from controller.processes.console import say, warn
from controller.processes.observability.scrape_targets import TargetGroup, file_sd, rule_files, target_groups
from controller.processes.servers.supervised_server import KeptServer
from events.errors import HoldfastError
from events.process.presence import present

WRITE_EVERY_S = 2.0


class FleetPrometheus:
    """The Prometheus server of one fleet."""

    def __init__(self, data: Path, announce: Callable[[EmbeddedServer], None]) -> None:
        self._data = data
        self._folder = data / "prometheus"
        self._targets = self._folder / "targets.json"
        self._server = KeptServer(self._start, announce)
        self._begun = False
        self._written: list[TargetGroup] | None = None
        self._write_at = 0.0  # monotonic seconds

    @property
    def log(self) -> Path | None:
        """The log of the server; None if it does not run."""
        return self._server.log

    async def begin(self) -> None:
        """Start the server and supervise it from now on. Report a failure on the console."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write()
            server = await self._server.begin()
        except (HoldfastError, OSError) as error:
            return warn(f"Prometheus is not running: {error}")
        self._begun = True
        say(
            f"  Prometheus at {server.url}{'' if alert_rules() else ' (without alert rules, which are only in the source tree)'}"
        )

    async def _start(self, port: int) -> EmbeddedServer:
        config = file_sd(str(self._targets.resolve())) + rule_files(str(path) for path in alert_rules())
        return await start_prometheus(self._folder, config, port=port)

    def tend(self) -> None:
        """Update its targets. Raise the error that ended its supervision."""
        if not self._begun:
            return
        self._server.check()
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

    async def stop(self) -> None:
        """Stop the server gracefully."""
        await self._server.stop()
