"""A whole frontend and a whole worker with the simulated engine, in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from frontend_kit import Kit, frontend
from real_worker import RealWorker

from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape

SHAPE = EngineShape(context_tokens=8192, kv_blocks=1024)


@asynccontextmanager
async def simulated() -> AsyncIterator[Kit]:
    """Serve the model `m` at full speed."""
    worker = await RealWorker("w1", SimulatedEngine(SHAPE)).start()
    async with frontend() as kit:
        await kit.add(worker, **worker.facts)  # type: ignore[arg-type]
        yield kit
