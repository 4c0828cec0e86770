"""Refuses to start a worker under the name of another live one.

A fleet believes the newest life of a name and retires the older one. So a second worker of one name would end the first. The
newcomer listens for the first one's heartbeats from its start until it registers, and leaves if it hears one: another newcomer
may have begun to load its engine at the same time, and registered first.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import structlog

from events import subjects
from events.errors import HoldfastError
from events.journal.port import Journal
from events.nats.bus import Bus, Subscription
from events.nats.connection import DISCONNECTED
from events.observations import WorkerAwaited
from workers.config.worker import WorkerConfig

log = structlog.get_logger(__name__)


class NameTaken(HoldfastError):
    """Another live worker of the fleet has this name."""


class NameCheck:
    """One worker's check of its own name. Without a broker nothing is checked."""

    def __init__(self, config: WorkerConfig, bus: Bus | None, journal: Journal) -> None:
        self._config = config
        self._bus = bus
        self._journal = journal
        self._subscription: Subscription | None = None
        self._heard = asyncio.Event()  # a flag: another worker has said a heartbeat
        self._other = ""  # its instance

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listen for `name_check_s`, and on until this is left. Raise NameTaken if another worker of this name lives."""
        try:
            await self._first_check()
            yield
        finally:
            subscription, self._subscription = self._subscription, None
            if subscription is not None:
                with contextlib.suppress(*DISCONNECTED):
                    await subscription.cancel()

    async def again(self) -> None:
        """Check once more, by what was heard up to now. Raise NameTaken. A broker that was away before is listened to first."""
        if self._subscription is None:
            await self._first_check()
        elif self._heard.is_set():
            raise self._taken()

    async def _first_check(self) -> None:
        config, bus = self._config, self._bus
        if bus is None or bus.since is None or not config.name_check_s:
            return
        try:
            self._subscription = await bus.subscribe(subjects.beat(config.name), self._on_beat)
        except DISCONNECTED:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(config.name_check_s):
                await self._heard.wait()
            raise self._taken()

    def _on_beat(self, subject: str, body: Mapping[str, Any]) -> None:
        other = str(body.get("instance") or "")
        if other and other != self._config.instance:
            self._other = other
            self._heard.set()

    def _taken(self) -> NameTaken:
        name, other = self._config.name, self._other
        log.error("name_taken", worker=name, instance=self._config.instance, other=other)
        reason = f"another live worker is named {name} (instance {other})"
        self._journal.observe(
            WorkerAwaited(worker=name, instance=self._config.instance, reason=reason, name_taken_by=other)
        )
        return NameTaken(f"{reason}; it stays in service. Choose another --name, or stop that worker first.")
