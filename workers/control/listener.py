"""Hearing what the controller asks of a worker, and whether another one has its name."""

import asyncio
import inspect
from collections.abc import Awaitable, Mapping
from typing import Any

import structlog

from events import subjects
from events.intrusion.control_message import foreign
from events.nats.bus import Answer, Bus, Handler, Subscription
from events.nats.connection import DISCONNECTED
from workers.config.worker import WorkerConfig
from workers.control.commands import WorkerCommands

LISTEN_RETRY_S = 0.2

log = structlog.get_logger(__name__)


class CommandListener:
    """One worker's subscription to all that is asked of it."""

    def __init__(self, config: WorkerConfig, bus: Bus | None, commands: WorkerCommands) -> None:
        """Hear nothing yet; without a bus, never."""
        self._config = config
        self._bus = bus
        self._commands = commands
        self._handlers = {**commands.by_subject, subjects.beat(config.name): self._on_beat}
        self._subscription: Subscription | None = None
        self._strangers: set[str] = set()
        self.foreign = 0  # messages on its subjects that are no control messages

    async def run(self) -> None:
        """Hear the controller's requests, now or as soon as there is a broker to hear them from. One subscription has them
        all: each costs a task and a queue, and a process may have a thousand workers."""
        while self._bus is not None and self._subscription is None:
            try:
                self._subscription = await self._bus.subscribe(subjects.live(self._config.name), self._heard)
            except DISCONNECTED:  # it is on its way out or back
                await asyncio.sleep(LISTEN_RETRY_S)

    async def close(self) -> None:
        """Hear no more."""
        if self._subscription is not None:
            await self._subscription.cancel()

    def _heard(self, subject: str, body: Mapping[str, Any]) -> Answer | Awaitable[Answer]:
        handler = self._handlers.get(subject)
        if handler is None or not self._commands.heeds(subject):
            return None
        if handler != self._on_beat and (why := foreign(subject.split(".")[1], self._config.name, body)):
            return self._ignore(subject, why)
        if "until" in body:
            return self._in_time(handler, subject, body)
        return handler(subject, body)

    def _ignore(self, subject: str, why: str) -> Answer:
        """Note a body that no controller has sent: an acknowledgement for another process, for one."""
        self.foreign += 1
        if self.foreign.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …
            log.error("foreign_control_message", subject=subject, why=why, times=self.foreign)
        return {"error": f"this is no control message: {why}"}

    async def _in_time(self, handler: Handler, subject: str, body: Mapping[str, Any]) -> Answer:
        """Do what may be done only soon. Raise HeardTooLate."""
        await self._commands.check_time(str(body["until"]))
        answer = handler(subject, body)
        return await answer if inspect.isawaitable(answer) else answer

    def _on_beat(self, subject: str, body: Mapping[str, Any]) -> None:
        """Notice another process under our name: the fleet believes the newer one, the operator should know."""
        other = str(body.get("instance"))
        if other != self._config.instance and other not in self._strangers:
            self._strangers.add(other)
            log.error(
                "name_taken",
                worker=self._config.name,
                instance=self._config.instance,
                other=other,
                advice="two live workers share this name; give each its own",
            )
