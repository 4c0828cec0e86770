"""Shuts a worker down gracefully: requests get time to finish, the rest move to other workers.

The graceful shutdown of seed 004; its timer runs from the first moment:

    1 deregister ──▶ 2 drain ─────────────────▶ 3 cleanup ──▶ exit 0
      in heartbeats    prefill, then decode       `InferenceWorker`, and `FleetLinks.close`
                       time up, or hurried: remaining streams are ended and continue elsewhere

A worker has two endpoints, prefill and decode. The worker always waits for prefill, because ending it would waste computed
blocks. It also waits for decode (`graceful_shutdown`), or sends each stream to another worker as soon as its prompt is computed.
If the KV cache can move too, frontends get a moment to arrange that.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Literal

import structlog

from workers.counters import Ends, Refusal
from workers.engines.engine import EngineDead
from workers.exits import exit_within
from workers.server import WorkerServer

DRAINING = Refusal("engine_shutdown: this worker is draining", canaries_too=False)
LEAVING = Refusal("engine_shutdown: this worker is shutting down", canaries_too=True)
TIME_UP = "engine_shutdown: the grace period is over"
SENT_ELSEWHERE = "engine_shutdown: this worker is leaving and does not wait for the stream"
CLEANUP_S = 5.0  # phase 3, which an orchestrator's grace period must include
DEREGISTERED_S = 0.5  # by then, requests have arrived that frontends sent before they were notified

SecondSignal = Literal["ignore", "hurry"]
log = structlog.get_logger(__name__)


class WorkerEnd:
    """The reason why one worker ends: a stop command or a failure. Only the first failure counts."""

    def __init__(self) -> None:
        self.stop_requested = asyncio.Event()  # a flag: the fleet's operator has stopped it
        self.failed: asyncio.Future[EngineDead] | None = None  # set by `begin`

    def begin(self) -> asyncio.Future[EngineDead]:
        """Return a future for the reason of the next failure; earlier failures are ignored."""
        self.failed = asyncio.get_running_loop().create_future()
        return self.failed

    def fail(self, reason: EngineDead) -> None:
        """End the worker: its engine or device is dead, or it is Broken. Exit code 1."""
        if self.failed is not None and not self.failed.done():
            self.failed.set_result(reason)


class Stop:
    """The stop request of one process, and the effect of a repeated one."""

    def __init__(self, second: SecondSignal = "ignore") -> None:
        self.wanted = asyncio.Event()  # a flag
        self.hurried = asyncio.Event()  # a flag: end the grace period now
        self._second = second

    def signalled(self) -> None:
        """Handle SIGTERM or SIGINT. The first signal starts the shutdown; a later one hurries it or is ignored."""
        if not self.wanted.is_set():
            self.wanted.set()
        elif self._second == "hurry":
            self.hurried.set()
        else:
            log.info("signal_ignored", reason="the shutdown has begun")


def budget_s(grace_s: float, orchestrator_grace_s: float | None, pre_stop_s: float) -> float:
    """Return the seconds for phases 1 and 2: `grace_s`, limited to what the orchestrator leaves before it kills.

    The orchestrator's grace period includes its own preStop hook, which is over when SIGTERM arrives, and must include the
    cleanup.
    """
    if orchestrator_grace_s is None:
        return grace_s
    return max(0.0, min(grace_s, orchestrator_grace_s - pre_stop_s - CLEANUP_S))


async def drain(server: WorkerServer, refusal: Refusal, deadline_s: float) -> Ends:
    """Drain a worker and return how its streams ended. From now on it refuses new requests, also afterwards."""
    server.refuse(refusal)
    streams = server.streams
    try:
        async with asyncio.timeout(deadline_s):  # wait_for of Python 3.11 can swallow a cancellation
            await streams.all_ended.wait()
    except TimeoutError:
        server.output.end_all(TIME_UP)
    return server.drain.drained()


async def shut_down(server: WorkerServer, grace_s: float, *, graceful: bool, hurried: asyncio.Event) -> Ends:
    """Run phases 1 and 2 of a graceful shutdown, until the grace period ends or `hurried` is set. Then refuse everything."""
    cut = 0
    waiting, hurry = asyncio.ensure_future(_wait(server, graceful)), asyncio.ensure_future(hurried.wait())
    try:
        await asyncio.wait((waiting, hurry), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
        else:
            cut = server.in_flight
            log.warning("grace_over", worker=server.worker, sent_elsewhere=cut)
    finally:
        waiting.cancel()
        hurry.cancel()
    server.refuse(LEAVING)
    # canaries too: their end must not look like a failure
    server.output.end_all(TIME_UP if cut else LEAVING.reason)
    return server.drain.drained()


async def _wait(server: WorkerServer, graceful: bool) -> None:
    """Deregister, and wait until both endpoints are empty."""
    active, streams = 2 if graceful else 1, server.streams
    _log_active(server, active)
    waits = server.drain.refusal is None and server.connections.any_greeted
    server.deregister()
    if not graceful and not (waits and server.moves.possible):
        server.output.send_elsewhere(SENT_ELSEWHERE)
    if waits:
        await asyncio.sleep(DEREGISTERED_S)
    server.refuse(LEAVING)
    if not graceful:
        server.output.send_elsewhere(SENT_ELSEWHERE)
    await streams.all_decode.wait()
    if graceful:
        _log_active(server, active - 1)
    await streams.all_ended.wait()
    log.info("Last endpoint completed, notifying all waiters", worker=server.worker)


def _log_active(server: WorkerServer, active: int) -> None:
    log.info(f"Active graceful endpoints: {active}", worker=server.worker, in_flight=server.in_flight)


@contextlib.contextmanager
def or_exit(seconds: float, code: int) -> Iterator[None]:
    """End the process with `code` if the block does not finish in time, even if it blocks the event loop."""
    timer = exit_within(seconds, code)
    try:
        yield
    finally:
        timer.cancel()


class Retired(EngineDead):
    """The fleet considers this instance dead: it was silent too long, or another took its name. A new instance replaces it."""


class Broken(EngineDead):
    """An essential part of the worker failed. The engine is not to blame."""


class Killed(EngineDead):
    """A rehearsal has killed this worker, which is one of many in its process."""


def broken(part: str, error: Exception) -> Broken:
    """Return the failure that ends a worker after one of its parts failed with `error`."""
    broken = Broken(f"{part} failed: {error!r}")
    broken.__cause__ = error
    return broken
