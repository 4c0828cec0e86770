"""The source's side of a planned move: ships a stream's KV cache, mostly while it decodes.

Then it stops the stream and ships the rest.

    decoding ── Ship ──▶ shipping ── little is left ──▶ stopped ── all shards accepted ──▶ shipped ── Cancel ──▶ gone
       ▲                    │                              │                                  │
       └──── Stay, failure ─┴──────────────────────────────┴──── Stay, failure, 2 s ──────────┘

The pause does not depend on the stream's length: only a block or two, filled since the last check, are shipped after the stop.
No shard sends its ending before all shards have sent all their blocks.

After any failure, the stream continues here unchanged. If the frontend did not request that, it receives the reason. Two
attempts may then decode at once, here and at the target: the frontend accepts the tokens of only one.
"""

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf

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

STOPPED_S_MAX = 2.0  # for the tail to travel, and for the frontend to send Cancel or Stay
STOP_S_MAX = 10.0  # an engine's step; longer is a hang
SETTLE_S_MAX = 0.05  # for the target to copy what was sent, before the stream stops
_grants = msgspec.msgpack.Decoder(Grant)

log = structlog.get_logger(__name__)


async def run_concurrently(works: Iterable[Awaitable[None]]) -> None:
    """Run all of these concurrently. The first failure cancels the others, and is raised when they have ended.

    Not a TaskGroup: in Python 3.11 it swallows a cancellation that coincides with a failure.
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
                    one.exception()  # only the first failure counts
    try:
        for one in failed or tasks:
            one.result()
    finally:  # otherwise tasks and errors would keep each other alive, and what they worked on
        del one, tasks, failed, ending


class CannotShip(HoldfastError):
    """This stream cannot be shipped. It continues decoding here."""


@dataclass(slots=True, eq=False)
class OutgoingStream:
    """A stream that is moving to another worker."""

    key: int
    stream: Stream
    export: Export
    trusted: TrustedSender
    grants: list[Grant]
    task: "asyncio.Task[None] | None" = None
    stopping: "asyncio.Future[Stopped] | None" = None
    handed_over: bool = False  # everything was sent, and the target may already decode
    bytes: int = 0
    over: bool = False  # the frontend no longer needs an answer
    shipments: list[OutgoingShipment] = field(default_factory=list)


class OutgoingMigrations:
    """All streams of one worker that are moving to other workers."""

    def __init__(self, engine: Engine, trust: Trust, counters: WorkerCounters, piece_bytes: int) -> None:
        """Manage the moves of one engine; `piece_bytes` are copied out of the engine at once, per shard."""
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
        """Return how many streams may move at once: each shard of each stream has a thread."""
        return max(1, min(MOVES_MAX, THREADS_MAX // max(1, shards)))

    def under_way(self) -> list[OutgoingStream]:
        """Return the streams that are moving to other workers."""
        return list(self._leaving.values())

    def begin(self, key: int, stream: Stream, grants: Sequence[bytes]) -> OutgoingStream | None:
        """Return a stream for `ship`. If it cannot be shipped, notify its frontend of the reason and return None."""
        try:
            leaving = self._prepare(key, stream, grants)
        except HoldfastError as refusal:
            self._counters.moved("out", "declined")
            log.info("ship_declined", reason=str(refusal))
            stream.connection.send(Declined(stream.number, str(refusal)))
            return None
        self._leaving[key] = leaving
        stream.leaving = True
        return leaving

    def _prepare(self, key: int, stream: Stream, grants: Sequence[bytes]) -> OutgoingStream:
        """Return a stream that is ready to be shipped. Raise HoldfastError."""
        if not self._engine.kv:
            raise CannotShip("this engine cannot send its KV cache")
        trusted = TrustedSender(self._trust)
        if stream.turn != self._trust.turns:
            raise SenderDistrusted(
                "the source is not trusted: it was distrusted while it computed this stream"
            )
        if key in self._leaving:
            raise CannotShip("the stream is already being shipped")
        if len(self._leaving) >= (limit := self.at_once(len(self._engine.kv))):
            raise CannotShip(f"too many at once: {limit} streams are moving")
        read = self._decode_grants(grants)
        export = self._engine.export(key)
        if export is None:
            raise CannotShip("the stream does not decode yet, or too many are moving")
        return OutgoingStream(key, stream, export, trusted, read)

    def _decode_grants(self, grants: Sequence[bytes]) -> list[Grant]:
        """Decode the grants for all shards of this engine, in the order of the ranks. Raise CannotShip."""
        own = self._engine.kv
        try:
            read = [_grants.decode(one) for one in grants]
        except msgspec.MsgspecError as error:
            raise CannotShip(f"cannot decode the grants: {error}") from error
        if len(read) != len(own):
            raise CannotShip(f"got {len(read)} grants for {len(own)} shards")
        for ours, grant in zip(own, read, strict=True):
            if differs := ours.difference(grant.description):
                raise CannotShip(f"another model: {differs}")
            if not (grant.first_block >= 0 and grant.bytes > 0 and 0 < grant.seconds < 3600):
                raise CannotShip("the grants have invalid values")
        if len({grant.first_block for grant in read}) > 1:
            raise CannotShip("the grants begin at different blocks")
        return read

    # --- how a shipment ends

    def stay(self, key: int) -> None:
        """Abort a stream's shipment and let the stream continue here, even if it has stopped."""
        if (leaving := self._remove(key)) is not None:
            self._counters.moved("out", "failed")
            log.info("ship_given_up", request=leaving.stream.asked.request)
            self._release(leaving, continues=True)

    def forget(self, key: int) -> bool:
        """Release a stream that has ended here; return whether it has moved."""
        leaving = self._remove(key)
        if leaving is None:
            return False
        self._counters.moved("out", "committed" if leaving.handed_over else "failed", leaving.bytes)
        self._release(leaving, continues=False)
        return leaving.handed_over

    def close(self) -> None:
        """Cancel all moves, so that their streams continue here, and close the trust."""
        for key in list(self._leaving):
            self.stay(key)
        self._trust.close()

    def decline(self, leaving: OutgoingStream, reason: str) -> bool:
        """Let a stream continue here, and notify its frontend of the reason. Return False if the stream no longer moves."""
        if self._remove(leaving.key) is None:
            return False
        self._counters.moved("out", "failed")
        stream = leaving.stream
        log.warning("ship_failed", request=stream.asked.request, reason=reason)
        self._release(leaving, continues=True)
        stream.connection.send(Declined(stream.number, reason))
        return True

    def _remove(self, key: int) -> OutgoingStream | None:
        if (leaving := self._leaving.pop(key, None)) is not None:
            leaving.over, leaving.stream.leaving = True, False
        return leaving

    def _release(self, leaving: OutgoingStream, continues: bool) -> None:
        """Release a stream's blocks. If the engine has yet to carry out a stop, wait for it, then undo it."""
        if leaving.task is not None and leaving.task is not asyncio.current_task():
            leaving.task.cancel()
        for one in leaving.shipments:
            one.cancel()

        def release(stopping: "asyncio.Future[Stopped] | None") -> None:
            stopped = stopping is not None and not stopping.cancelled() and stopping.exception() is None
            if stopped and continues:
                leaving.export.resume()
            leaving.export.close()

        if leaving.stopping is None or leaving.stopping.done():
            release(leaving.stopping)
        else:
            leaving.stopping.add_done_callback(release)

    # --- how a shipment runs

    async def ship(self, leaving: OutgoingStream) -> bool:
        """Ship a stream that `begin` returned, until the shipment ends; return whether the stream stays here."""
        reason, grants = "", leaving.grants
        try:
            async with asyncio.timeout(min(grant.seconds for grant in grants)) as timer:
                with ExitStack() as stack:
                    await self._open(leaving, stack)
                    sent = await self._ship_full(leaving, grants[0].first_block)
                    await self._ship_rest(leaving, sent, timer)
                await asyncio.Event().wait()  # until Cancel or Stay ends this task
        except TimeoutError:
            late = "the target did not take over in time"
            reason = late if leaving.handed_over else "the shipment took too long"
        except HoldfastError as error:
            reason = str(error)
        except Exception as error:  # the stream continues here anyway
            log.exception("ship_broke")
            reason = f"the engine failed: {error!r}"
        return not leaving.over and self.decline(leaving, reason)

    async def _open(self, leaving: OutgoingStream, stack: ExitStack) -> None:
        for grant in leaving.grants:
            shipment = await leaving.trusted.shipment(grant)
            stack.callback(shipment.close)
            leaving.shipments.append(shipment)
        await run_concurrently(one.open() for one in leaving.shipments)

    async def _ship_full(self, leaving: OutgoingStream, first: int) -> int:
        """Ship full blocks while the stream decodes, until almost none is left; return how many the target then has."""
        sent, before = first, 0
        while (missing := leaving.export.full_blocks() - sent) > 0:
            if before and (missing == 1 or missing >= before):
                break
            began = time.monotonic()
            await self._send(leaving, sent, missing)
            sent, before = sent + missing, missing
            # The target needs about as long to verify and copy: what is unfinished at the stop would lengthen the pause.
            await asyncio.sleep(min(time.monotonic() - began, SETTLE_S_MAX))
        return sent

    async def _ship_rest(self, leaving: OutgoingStream, sent: int, timer: asyncio.Timeout) -> None:
        """Stop the stream, and ship the rest of it."""
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
        leaving.handed_over = True
        await run_concurrently(one.finish(b"", tokens, computed, state) for one in leaving.shipments)

    async def _send(self, leaving: OutgoingStream, first: int, count: int) -> None:
        """Send `count` blocks of every shard."""
        if count > 0:
            shards = range(len(leaving.shipments))
            await run_concurrently(self._send_shard(leaving, shard, first, count) for shard in shards)

    async def _send_shard(self, leaving: OutgoingStream, shard: int, first: int, count: int) -> None:
        """Send `count` blocks of a shard, piece by piece; while one is sent, the next is copied out of the engine."""
        limit, end = max(1, self._piece_bytes // self._engine.kv[shard].block_bytes), first + count

        def copy(at: int) -> asyncio.Future[Buffer]:
            return asyncio.ensure_future(leaving.export.blocks(shard, at, min(limit, end - at)))

        copying = copy(first)
        try:
            for after in range(first + limit, end + limit, limit):
                piece = await copying
                if after < end:
                    copying = copy(after)
                await leaving.shipments[shard].send(piece)
                leaving.bytes += len(memoryview(piece).cast("B"))
        finally:
            copying.cancel()
            copying.add_done_callback(_retrieve_error)
            del copying  # otherwise it and its error would keep each other alive, and the last piece


def _retrieve_error(copying: "asyncio.Future[Buffer]") -> None:
    """Retrieve the error of a copy that is no longer needed, so that asyncio does not log it."""
    if not copying.cancelled():
        copying.exception()
