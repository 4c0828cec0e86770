"""The source's side of a planned move: ships a stream's KV cache while it decodes, then stops it and ships the rest.

    decoding ── Ship ──▶ shipping ── little is left ──▶ stopped ── all shards accepted ──▶ shipped ── Cancel ──▶ gone
       ▲                    │                              │                                  │
       └──── Stay, failure ─┴──────────────────────────────┴──── Stay, failure, 2 s ──────────┘

The pause does not depend on the stream's length: what is shipped after the stop is what it has said since the last
look, a block or two. No shard says that it is at its end before all have sent everything.

Whatever goes wrong, the stream goes on here as if nothing had been; a frontend that did not ask for that is told why.
Two attempts may then decode at once, here and at the target: the frontend accepts the tokens of one only.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec
import structlog

from events.errors import HoldfastError
from events.wire import Declined
from workers.counters import WorkerCounters
from workers.engines.engine import MOVES_MAX, Engine, Export, Stopped
from workers.frontends import Stream
from workers.kv_transfer.messages import Buffer, Grant
from workers.migration.state import packed_state
from workers.migration.trust import THREADS_MAX, OutgoingShipment, SenderDistrusted, Trust, TrustedSender

STOPPED_S_MAX = 2.0  # for the tail to travel, and for the frontend to say Cancel or Stay
STOP_S_MAX = 10.0  # an engine's step; longer is a hang
SETTLE_S_MAX = 0.05  # for the target to take in what was sent, before the stream stops
_grants = msgspec.msgpack.Decoder(Grant)

log = structlog.get_logger(__name__)


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of these at once. The first failure ends the others, and is raised when they have ended.

    No TaskGroup: in Python 3.11 it swallows a cancellation that meets a failure.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        failed = [one for one in tasks if one.done() and not one.cancelled() and one.exception()]
        if ending := [one for one in tasks if not one.done()]:
            for one in ending:
                one.cancel()
            await asyncio.wait(ending)
            for one in ending:
                if not one.cancelled():
                    one.exception()  # the first one counts
    try:
        for one in failed or tasks:
            one.result()
    finally:  # else they and their errors would keep each other, and what they worked on
        del one, tasks, failed, ending


class CannotShip(HoldfastError):
    """This stream cannot be shipped. It goes on decoding here."""


@dataclass(slots=True, eq=False)
class OutgoingStream:
    """A stream on its way out."""

    key: int
    stream: Stream
    export: Export
    trusted: TrustedSender
    grants: list[Grant]
    task: "asyncio.Task[None] | None" = None
    stopping: "asyncio.Future[Stopped] | None" = None
    handed: bool = False  # all was sent, and the target may decode already
    bytes: int = 0
    over: bool = False  # its frontend needs no answer any more
    shipments: list[OutgoingShipment] = field(default_factory=list)


class OutgoingMigrations:
    """All streams of one worker that are on their way out."""

    def __init__(
        self,
        engine: Engine,
        trust: Trust,
        counters: WorkerCounters,
        piece_bytes: int,
    ) -> None:
        """`piece_bytes` are copied out of the engine at once, for each shard."""
        self._engine = engine
        self._trust = trust
        self._counters = counters
        self._leaving: dict[int, OutgoingStream] = {}
        self._piece_bytes = piece_bytes

    def __len__(self) -> int:
        return len(self._leaving)

    def __contains__(self, key: int) -> bool:
        return key in self._leaving

    @staticmethod
    def at_once(shards: int) -> int:
        """Return how many streams may be on their way at once: each shard of each has a thread."""
        return max(1, min(MOVES_MAX, THREADS_MAX // max(1, shards)))

    def under_way(self) -> list[OutgoingStream]:
        """Return the streams that are on their way out."""
        return list(self._leaving.values())

    def begin(self, key: int, stream: Stream, grants: Sequence[bytes]) -> OutgoingStream | None:
        """Return a stream for `ship`, or None once its frontend is told why it cannot be shipped."""
        try:
            leaving = self._begun(key, stream, grants)
        except HoldfastError as refusal:
            self._counters.moved("out", "declined")
            log.info("ship_declined", reason=str(refusal))
            stream.connection.send(Declined(stream.number, str(refusal)))
            return None
        self._leaving[key] = leaving
        stream.leaving = True
        return leaving

    def _begun(self, key: int, stream: Stream, grants: Sequence[bytes]) -> OutgoingStream:
        """Return a stream whose shipment may begin. Raise HoldfastError."""
        if not self._engine.kv:
            raise CannotShip("this engine sends no KV cache")
        trusted = TrustedSender(self._trust)
        if stream.turn != self._trust.turns:
            raise SenderDistrusted("the source is not trusted: it was doubted while it computed this stream")
        if key in self._leaving:
            raise CannotShip("it is being shipped already")
        if len(self._leaving) >= (most := self.at_once(len(self._engine.kv))):
            raise CannotShip(f"too many at once: {most} streams are on their way")
        read = self._read(grants)
        export = self._engine.export(key)
        if export is None:
            raise CannotShip("the stream does not decode yet, or too many are on their way")
        return OutgoingStream(key, stream, export, trusted, read)

    def _read(self, grants: Sequence[bytes]) -> list[Grant]:
        """Return grants for all shards of this engine, in the order of the ranks. Raise CannotShip."""
        own = self._engine.kv
        try:
            read = [_grants.decode(one) for one in grants]
        except msgspec.MsgspecError as error:
            raise CannotShip(f"the grants are none: {error}") from error
        if len(read) != len(own):
            raise CannotShip(f"there are {len(read)} grants for {len(own)} shards")
        for ours, grant in zip(own, read, strict=True):
            if differs := ours.difference(grant.description):
                raise CannotShip(f"another model: {differs}")
            if not (grant.first_block >= 0 and grant.bytes > 0 and 0 < grant.seconds < 3600):
                raise CannotShip("the grants make no sense")
        if len({grant.first_block for grant in read}) > 1:
            raise CannotShip("the grants begin at different blocks")
        return read

    # --- what ends it

    def stay(self, key: int) -> None:
        """Break a stream's shipment off and let it go on, even if it has stopped."""
        if (leaving := self._remove(key)) is not None:
            self._counters.moved("out", "failed")
            log.info("ship_given_up", request=leaving.stream.asked.request)
            self._part(leaving, goes_on=True)

    def forget(self, key: int) -> bool:
        """Let go of a stream that is over here; return whether it has moved."""
        leaving = self._remove(key)
        if leaving is None:
            return False
        self._counters.moved("out", "committed" if leaving.handed else "failed", leaving.bytes)
        self._part(leaving, goes_on=False)
        return leaving.handed

    def close(self) -> None:
        """Let go of everything."""
        for key in list(self._leaving):
            self.stay(key)
        self._trust.close()

    def decline(self, leaving: OutgoingStream, reason: str) -> bool:
        """Let a stream continue here, and tell its frontend why it did not move; False if it is not on its way any more."""
        if self._remove(leaving.key) is None:
            return False
        self._counters.moved("out", "failed")
        stream = leaving.stream
        log.warning("ship_failed", request=stream.asked.request, reason=reason)
        self._part(leaving, goes_on=True)
        stream.connection.send(Declined(stream.number, reason))
        return True

    def _remove(self, key: int) -> OutgoingStream | None:
        if (leaving := self._leaving.pop(key, None)) is not None:
            leaving.over, leaving.stream.leaving = True, False
        return leaving

    def _part(self, leaving: OutgoingStream, goes_on: bool) -> None:
        """Let go of a stream's blocks. A stop that the engine has not come to yet is waited for, then undone."""
        if leaving.task is not None and leaving.task is not asyncio.current_task():
            leaving.task.cancel()
        for one in leaving.shipments:
            one.cancel()

        def part(stopping: "asyncio.Future[Stopped] | None") -> None:
            stopped = stopping is not None and not stopping.cancelled() and stopping.exception() is None
            if stopped and goes_on:
                leaving.export.resume()
            leaving.export.close()

        if leaving.stopping is None or leaving.stopping.done():
            part(leaving.stopping)
        else:
            leaving.stopping.add_done_callback(part)

    # --- how it goes

    async def ship(self, leaving: OutgoingStream) -> bool:
        """Ship a stream that `begin` returned, until it ends; return whether it stays here after all."""
        reason, grants = "", leaving.grants
        try:
            async with asyncio.timeout(min(grant.seconds for grant in grants)) as timer:
                with ExitStack() as stack:
                    await self._open(leaving, stack)
                    sent = await self._ship_full(leaving, grants[0].first_block)
                    await self._ship_rest(leaving, sent, timer)
                await asyncio.Event().wait()  # for Cancel or Stay, which end this task
        except TimeoutError:
            reason = "nobody took it over in time" if leaving.handed else "it took too long"
        except HoldfastError as error:
            reason = str(error)
        except Exception as error:  # the stream goes on all the same
            log.exception("ship_broke")
            reason = f"the engine failed: {error!r}"
        return not leaving.over and self.decline(leaving, reason)

    async def _open(self, leaving: OutgoingStream, stack: ExitStack) -> None:
        for grant in leaving.grants:
            shipment = await leaving.trusted.shipment(grant, grant.description)
            stack.callback(shipment.close)
            leaving.shipments.append(shipment)
        await together(one.open() for one in leaving.shipments)

    async def _ship_full(self, leaving: OutgoingStream, first: int) -> int:
        """Ship full blocks while the stream decodes, until next to none is left; return how many went or were there."""
        sent, before = first, 0
        while (missing := leaving.export.full_blocks() - sent) > 0:
            if before and (missing == 1 or missing >= before):
                break
            began = time.monotonic()
            await self._send(leaving, sent, missing)
            sent, before = sent + missing, missing
            # The target checks and copies for about as long: what it had not done by the stop would be pause.
            await asyncio.sleep(min(time.monotonic() - began, SETTLE_S_MAX))
        return sent

    async def _ship_rest(self, leaving: OutgoingStream, sent: int, timer: asyncio.Timeout) -> None:
        """Stop the stream, and ship what is left of it."""
        loop = asyncio.get_running_loop()
        leaving.stopping = asyncio.ensure_future(leaving.export.stop())
        async with asyncio.timeout(STOP_S_MAX):
            stopped = await asyncio.shield(leaving.stopping)
        began = time.monotonic()
        timer.reschedule(min(timer.when() or inf, loop.time() + STOPPED_S_MAX))
        own = self._engine.kv[0]
        await self._send(leaving, sent, own.blocks(stopped.computed) - sent)
        tokens, computed = stopped.tokens, stopped.computed
        stopped_ms, way = (time.monotonic() - began) * 1e3, leaving.shipments[0].way
        state = packed_state(leaving.stream.asked, len(tokens), computed, stopped_ms, way)
        leaving.handed = True
        await together(one.finish(b"", tokens, computed, state) for one in leaving.shipments)

    async def _send(self, leaving: OutgoingStream, first: int, count: int) -> None:
        """Send so many blocks of every shard."""
        if count > 0:
            shards = range(len(leaving.shipments))
            await together(self._send_shard(leaving, shard, first, count) for shard in shards)

    async def _send_shard(self, leaving: OutgoingStream, shard: int, first: int, count: int) -> None:
        """Send so many blocks of a shard, piece by piece; while one travels the next is copied out of the engine."""
        most, end = max(1, self._piece_bytes // self._engine.kv[shard].block_bytes), first + count

        def copy(at: int) -> asyncio.Future[Buffer]:
            return asyncio.ensure_future(leaving.export.blocks(shard, at, min(most, end - at)))

        copying = copy(first)
        try:
            for after in range(first + most, end + most, most):
                piece = await copying
                if after < end:
                    copying = copy(after)
                await leaving.shipments[shard].send(piece)
                leaving.bytes += len(memoryview(piece).cast("B"))
        finally:
            copying.cancel()
            copying.add_done_callback(_seen)
            del copying  # else it and its error would keep each other, and the last piece


def _seen(copying: "asyncio.Future[Buffer]") -> None:
    """Retrieve the error of a copy that is not needed any more, so that asyncio logs none."""
    if not copying.cancelled():
        copying.exception()
