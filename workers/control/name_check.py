"""Refuses to start a worker under the name of another live one.

A fleet believes the newest life of a name and retires the older one. So a second worker of one name would end the first. The
newcomer listens for the first one's heartbeats before it registers, and leaves if it hears one.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import structlog

from events import subjects
from events.errors import HoldfastError
from events.journal.port import Journal
from events.nats.bus import Bus
from events.nats.connection import DISCONNECTED
from events.observations import WorkerAwaited
from workers.config.worker import WorkerConfig

log = structlog.get_logger(__name__)


class NameTaken(HoldfastError):
    """Another live worker of the fleet has this name."""


class NameCheck:
    """One worker's check of its own name."""

    def __init__(self, config: WorkerConfig, bus: Bus | None, journal: Journal) -> None:
        self._config = config
        self._bus = bus
        self._journal = journal

    async def run(self) -> None:
        """Listen for `name_check_s`. Raise NameTaken if another worker of this name lives. Without a broker do nothing."""
        config, bus = self._config, self._bus
        if bus is None or bus.since is None or not config.name_check_s:
            return
        heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_beat(subject: str, body: Mapping[str, Any]) -> None:
            other = str(body.get("instance") or "")
            if other and other != config.instance and not heard.done():
                heard.set_result(other)

        try:
            subscription = await bus.subscribe(subjects.beat(config.name), on_beat)
        except DISCONNECTED:
            return
        try:
            await asyncio.wait((heard,), timeout=config.name_check_s)
        finally:
            with contextlib.suppress(*DISCONNECTED):
                await subscription.cancel()
        if heard.done():
            raise self._taken(heard.result())

    def _taken(self, other: str) -> NameTaken:
        name = self._config.name
        log.error("name_taken", worker=name, instance=self._config.instance, other=other)
        reason = f"another live worker is named {name} (instance {other})"
        self._journal.observe(
            WorkerAwaited(worker=name, instance=self._config.instance, reason=reason, name_taken_by=other)
        )
        return NameTaken(f"{reason}; it stays in service. Choose another --name, or stop that worker first.")
