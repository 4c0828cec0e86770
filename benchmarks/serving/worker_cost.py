"""Measures a simulated worker's cost per request in machine instructions.

The number of instructions does not depend on the machine's speed.

    python -m benchmarks worker_cost [--requests 256] [--runs 3]      # with valgrind installed: half a minute per run
    python -m benchmarks worker_cost --once 4000 [--profile FILE]     # microseconds of CPU, and a cProfile

One worker flat out, in one process with one frontend that has three requests of 64 tokens open at a time: about as many
as a frontend that is the bottleneck has on each of two workers (`relay flat`). The figure includes the frontend's own share,
about a tenth. Measured in the same way as `request_cost`.
"""

import cProfile
import time

from benchmarks.serving.request_cost import FEW, TOKENS, measured
from benchmarks.serving.worker import read
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.rank import TURN_TOKENS
from workers.engines.simulated.sequence import EngineShape
from workers.server import WorkerServer

AT_ONCE = 3


async def answer(requests: int, profile: str) -> float:
    """Let a worker answer `requests` requests, after a warm-up; return the CPU seconds per request."""
    engine = SimulatedEngine(EngineShape(), turn_tokens=TURN_TOKENS)
    server = WorkerServer(worker="w0", instance="i0", engine=engine)
    await engine.start(server.deliver)
    _, port = await server.start("127.0.0.1", 0)
    await read(port, AT_ONCE, FEW, TOKENS)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    began = time.process_time()
    await read(port, AT_ONCE, requests, TOKENS)
    took = time.process_time() - began
    if profile:
        profiler.disable()
        profiler.dump_stats(profile)
    return took / requests


if __name__ == "__main__":
    measured(answer, "benchmarks.serving.worker_cost", __doc__ or "")
