"""Telling the fleet that a worker lives, and how it fares: one heartbeat a second on the bus."""

import asyncio
from datetime import UTC, datetime

import msgspec

from events import subjects
from events.nats.bus import Bus
from workers.config.worker import WorkerConfig
from workers.control.commands import CONVICTED, WorkerCommands
from workers.engines.engine import Engine
from workers.server import WorkerServer

BEAT_S = 1.0


class FleetBeats:
    """One worker's heartbeats. Without a bus there are none."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        server: WorkerServer,
        commands: WorkerCommands,
        bus: Bus | None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._server = server
        self._commands = commands
        self._bus = bus
        self._said = 0

    async def run(self) -> None:
        """Beat for ever."""
        while True:
            await self.say()
            await asyncio.sleep(BEAT_S)

    async def say(self) -> None:
        """Beat once, unless a rehearsal lets the worker say nothing."""
        server = self._server
        if self._bus is None or server.blackholed:
            return
        self._said += 1
        trust = server.moves.trust
        body = {
            "worker": self._config.name,
            "instance": self._config.instance,
            "seq": self._said,
            "load": msgspec.structs.asdict(self._engine.load()),
            "draining": server.draining,
            "convicted": CONVICTED in trust.doubts,
            "batch": self._commands.batch_share,
            "at": datetime.now(UTC).isoformat(),
        }
        await self._bus.publish(subjects.beat(self._config.name), body)
