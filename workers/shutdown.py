"""Shuts a worker down gracefully: open requests get time to finish or move to other workers.

A graceful shutdown has three phases. The grace period starts with phase 1:

    1 deregister ──▶ 2 drain ─────────────────▶ 3 cleanup ──▶ exit 0
      in heartbeats    prefill, then decode       `InferenceWorker`, and `FleetLinks.close`
                       time up, or hurried: remaining streams are ended and continue elsewhere

A stream is first in its prefill and then decodes. The worker always waits for the prefill of open streams, because a stream that
is ended in its prefill wastes computed KV blocks. With `graceful_shutdown`, the worker also waits until the streams have
decoded. Without it, each stream is sent to another worker as soon as its prompt is computed. If the engine can ship KV caches,
frontends first get 0.5 s to arrange moves with the KV cache.
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
CLEANUP_S = 5.0  # limit of phase 3, which an orchestrator's grace period must include
DEREGISTERED_S = 0.5  # wait after the notification for requests that frontends sent before it reached them

SecondSignal = Literal["ignore", "hurry"]
log = structlog.get_logger(__name__)


class WorkerEnd:
    """Holds the reason why one worker ends: a stop command or the first failure. Later failures are ignored."""

    def __init__(self) -> None:
        self.stop_requested = asyncio.Event()  # set when an operator stops the worker with a command
        self.failed: asyncio.Future[EngineDead] | None = None  # set by `begin`

    def begin(self) -> asyncio.Future[EngineDead]:
        """Return a future that receives the reason of the first `fail` after this call. Earlier `fail` calls have no effect."""
        self.failed = asyncio.get_running_loop().create_future()
        return self.failed

    def fail(self, reason: EngineDead) -> None:
        """Report the failure that ends the worker: the death of its engine or device, or an error in an essential part."""
        if self.failed is not None and not self.failed.done():
            self.failed.set_result(reason)


class Stop:
    """Turns the signals of one process into a stop request. `second` is the effect of signals after the first."""

    def __init__(self, second: SecondSignal = "ignore") -> None:
        self.wanted = asyncio.Event()  # set when the process must stop
        self.hurried = asyncio.Event()  # set when the grace period must end now
        self._second = second

    def signalled(self) -> None:
        """Handle SIGTERM or SIGINT. The first signal starts the shutdown.

        Later signals end the grace period if `second` is "hurry", and are ignored if it is "ignore".
        """
        if not self.wanted.is_set():
            self.wanted.set()
        elif self._second == "hurry":
            self.hurried.set()
        else:
            log.info("signal_ignored", reason="the shutdown has begun")


def budget_s(grace_s: float, orchestrator_grace_s: float | None, pre_stop_s: float) -> float:
    """Return the seconds for deregistration and drain: `grace_s`, limited by the time until the orchestrator's kill.

    The orchestrator's grace period starts with its preStop hook (`pre_stop_s`), which is over when SIGTERM arrives. The
    period must also cover the cleanup. None for `orchestrator_grace_s` means that no orchestrator limits the shutdown.
    """
    if orchestrator_grace_s is None:
        return grace_s
    return max(0.0, min(grace_s, orchestrator_grace_s - pre_stop_s - CLEANUP_S))


async def drain(server: WorkerServer, refusal: Refusal, deadline_s: float) -> Ends:
    """Drain a worker: refuse new requests and wait until its streams end. Return how many streams ended in which way.

    Streams that are still open after `deadline_s` seconds are ended with an error. The worker still refuses requests when this
    call returns.
    """
    server.refuse(refusal)
    streams = server.streams
    try:
        async with asyncio.timeout(deadline_s):  # wait_for of Python 3.11 can swallow a cancellation
            await streams.all_ended.wait()
    except TimeoutError:
        server.output.end_all(TIME_UP)
    return server.drain.drained()


async def shut_down(server: WorkerServer, grace_s: float, *, graceful: bool, hurried: asyncio.Event) -> Ends:
    """Run phases 1 (deregister) and 2 (drain) of a shutdown, and return how many streams ended in which way.

    The phases end when all streams have ended, after `grace_s` seconds, or when `hurried` is set. The worker then refuses all
    requests, and the streams that are still open are ended.
    """
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
    # ends canaries too, with an error that does not count as a failure of the worker
    server.output.end_all(TIME_UP if cut else LEAVING.reason)
    return server.drain.drained()


async def _wait(server: WorkerServer, graceful: bool) -> None:
    """Deregister the worker. Then wait until no stream is in its prefill, and after that until no stream is open.

    If `graceful` is false, streams that decode are sent to other workers.
    """
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
    """End the process with `code` if the `with` block takes more than `seconds`, even if it blocks the event loop."""
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
    """Return the Broken error that ends a worker after its part `part` failed with `error`."""
    broken = Broken(f"{part} failed: {error!r}")
    broken.__cause__ = error
    return broken
