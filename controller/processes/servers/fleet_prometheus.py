"""The Prometheus of `holdfast up --observability`: it measures every process of the fleet, and knows the alerts.

It reads from a file where they are, which is written anew as they come and go. A fleet does without it: that it cannot be had,
or does not start, is said, and ends nothing.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

from controller.adapters.embedded.prometheus import alert_rules, start_prometheus
from controller.adapters.embedded.servers import EmbeddedServer
from controller.processes.console import say, warn
from controller.processes.observability.scrape_targets import TargetGroup, file_sd, rule_files, target_groups
from controller.processes.servers.kept_server import KeptServer
from events.errors import HoldfastError
from events.process.presence import present

WRITE_EVERY_S = 2.0


class FleetPrometheus:
    """One fleet's."""

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
        """The log that it writes; None where it does not run."""
        return self._server.log

    async def begin(self) -> None:
        """Start it, and look after it from now on. Where that cannot be, say so."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write()
            server = await self._server.begin()
        except (HoldfastError, OSError) as error:
            return warn(f"nothing measures the fleet: {error}")
        self._begun = True
        say(
            f"  Prometheus at {server.url}{'' if alert_rules() else ' (without alerts: they are in the source tree)'}"
        )

    async def _start(self, port: int) -> EmbeddedServer:
        config = file_sd(str(self._targets.resolve())) + rule_files(str(path) for path in alert_rules())
        return await start_prometheus(self._folder, config, port=port)

    def tend(self) -> None:
        """Tell it who is there now. Raise what has ended the looking after it."""
        if not self._begun:
            return
        self._server.check()
        if time.monotonic() >= self._write_at:
            try:
                self._write()
            except OSError as error:
                warn(f"{self._targets} cannot be written: {error.strerror}")

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
        """Stop it in order."""
        await self._server.stop()
