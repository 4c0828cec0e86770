"""Emptying a worker: nothing new, what runs may finish until a deadline, the rest is told to go elsewhere.

A graceful shutdown, by seed 004; its timer runs from the first moment:

    1 deregister ──▶ 2 drain ─────────────────▶ 3 cleanup ──▶ exit 0
      beats say so     prefill, then decode       `Worker`, and `Links.close`
                       time up, or hurried: what is left is ended, and goes elsewhere

A worker has two endpoints, prefill and decode. Prefill is always waited for: to end it wastes what was computed. Decode
is waited for too (`graceful_shutdown`), or its streams are sent elsewhere, each as soon as its prompt is computed; where their
KV cache can go along, frontends are given a moment to see to that.
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
SENT_ON = "engine_shutdown: this worker leaves, and the stream need not wait for it"
CLEANUP_S = 5.0  # phase 3; what an orchestrator's grace must leave room for
DEREGISTERED_S = 0.5  # until then, what frontends sent before they heard of it has come

SecondSignal = Literal["ignore", "hurry"]
log = structlog.get_logger(__name__)


class WorkerEnd:
    """Why one worker ends: it was told to stop, or it failed. The first failure stands."""

    def __init__(self) -> None:
        self.told = asyncio.Event()  # a flag: the fleet's operator wants it to stop
        self.failed: asyncio.Future[EngineDead] | None = None  # since `begin`

    def begin(self) -> asyncio.Future[EngineDead]:
        """Return what becomes the reason of the failure; what failed before is not taken."""
        self.failed = asyncio.get_running_loop().create_future()
        return self.failed

    def fail(self, reason: EngineDead) -> None:
        """End the worker: its engine or device is dead, or it is Broken. Exit code 1."""
        if self.failed is not None and not self.failed.done():
            self.failed.set_result(reason)


class Stop:
    """A process's wish to stop, and what becomes of a wish that is repeated."""

    def __init__(self, second: SecondSignal = "ignore") -> None:
        self.wanted = asyncio.Event()  # a flag
        self.hurried = asyncio.Event()  # a flag: the grace is to end now
        self._second = second

    def signalled(self) -> None:
        """Take a SIGTERM or SIGINT. The first one begins the shutdown; no other begins a second one."""
        if not self.wanted.is_set():
            self.wanted.set()
        elif self._second == "hurry":
            self.hurried.set()
        else:
            log.info("signal_ignored", reason="the shutdown has begun")


def budget_s(grace_s: float, orchestrator_grace_s: float | None, pre_stop_s: float) -> float:
    """Return the seconds for phases 1 and 2: what is wanted, but no more than the orchestrator leaves before it kills.

    Its grace includes its own preStop hook, which is over when SIGTERM comes, and must include the cleanup.
    """
    if orchestrator_grace_s is None:
        return grace_s
    return max(0.0, min(grace_s, orchestrator_grace_s - pre_stop_s - CLEANUP_S))


async def drain(server: WorkerServer, refusal: Refusal, deadline_s: float) -> Ends:
    """Empty a worker and say how it went. The worker refuses new requests from now on and afterwards."""
    server.refuse(refusal)
    streams = server.streams
    try:
        async with asyncio.timeout(deadline_s):  # wait_for of Python 3.11 can swallow a cancellation
            await streams.all_ended.wait()
    except TimeoutError:
        server.output.end_all(TIME_UP)
    return server.drained()


async def depart(server: WorkerServer, grace_s: float, *, graceful: bool, hurried: asyncio.Event) -> Ends:
    """Do phases 1 and 2 of a graceful shutdown within the grace, or until there is a hurry. What comes afterwards is refused."""
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
    server.output.end_all(
        TIME_UP if cut else LEAVING.reason
    )  # canaries too: their end must not look like a failure
    return server.drained()


async def _wait(server: WorkerServer, graceful: bool) -> None:
    """Deregister, and wait until both endpoints are empty."""
    active, streams = 2 if graceful else 1, server.streams
    _say_active(server, active)
    waits = server.refusal is None and server.connections.any_greeted
    server.deregister()
    if not graceful and not (waits and server.moves.possible):
        server.output.send_on(SENT_ON)
    if waits:
        await asyncio.sleep(DEREGISTERED_S)
    server.refuse(LEAVING)
    if not graceful:
        server.output.send_on(SENT_ON)
    await streams.all_decode.wait()
    if graceful:
        _say_active(server, active - 1)
    await streams.all_ended.wait()
    log.info("Last endpoint completed, notifying all waiters", worker=server.worker)


def _say_active(server: WorkerServer, active: int) -> None:
    log.info(f"Active graceful endpoints: {active}", worker=server.worker, in_flight=server.in_flight)


@contextlib.contextmanager
def or_exit(seconds: float, code: int) -> Iterator[None]:
    """End the process with `code` if this does not end in time, even where it holds up the event loop."""
    timer = exit_within(seconds, code)
    try:
        yield
    finally:
        timer.cancel()
