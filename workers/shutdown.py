"""Emptying a worker: nothing new, what runs may finish until a deadline, the rest is told to go elsewhere."""

from dataclasses import dataclass

from workers.server import Refusal, Server

DRAINING = Refusal("engine_shutdown: this worker is draining", canaries_too=False)
LEAVING = Refusal("engine_shutdown: this worker is shutting down", canaries_too=True)
TIME_UP = "engine_shutdown: the grace period is over"


@dataclass(frozen=True, slots=True)
class Drained:
    """How a drain ended: streams that finished in time, and streams that were sent elsewhere."""

    completed: int
    migrated: int


async def drain(server: Server, refusal: Refusal, deadline_s: float) -> Drained:
    """Empty a worker and say how it went. The worker refuses new requests from now on and afterwards."""
    server.refuse(refusal)
    before = server.counters.completed
    emptied = await server.landed(deadline_s)
    migrated = 0 if emptied else server.end_all(TIME_UP)
    return Drained(server.counters.completed - before, migrated)
