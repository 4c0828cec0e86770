"""The source's side of a planned move: ships a stream's KV cache to another worker.

The source ships full KV blocks while the stream decodes. Then it stops the stream and ships the rest.

    decoding ── Ship ──▶ shipping ── little is left ──▶ stopped ── all shards accepted ──▶ shipped ── Cancel ──▶ gone
       ▲                    │                              │                                  │
       └──── Stay, failure ─┴──────────────────────────────┴──── Stay, failure, 2 s ──────────┘

The frontend sends Ship to start a move, Stay to abort it, and Cancel when the stream decodes at the target.

The length of the stream does not affect how long it is stopped: after the stop, only the one or two blocks that were filled
since the last check are shipped. No shard sends its last message (`Ending`) before all shards have sent all their blocks.

After any failure or Stay, the stream continues on this worker unchanged. After a failure, the frontend receives the reason. If
the failure comes after the target has accepted the stream, both workers decode the stream at the same time. The frontend then
accepts the tokens of only one of them.
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

# from the stop until the frontend sends Cancel or Stay, including the transfer of the last blocks
STOPPED_S_MAX = 2.0
# for the engine to stop the stream at the end of its step; an engine that needs longer hangs
STOP_S_MAX = 10.0
SETTLE_S_MAX = 0.05  # for the target to copy the blocks sent so far, before the next ones or the stop
_grants = msgspec.msgpack.Decoder(Grant)

log = structlog.get_logger(__name__)


async def run_concurrently(works: Iterable[Awaitable[None]]) -> None:
    """Run all awaitables in `works` concurrently. The first failure cancels the others, and is raised once all have ended.

    A TaskGroup is not used because in Python 3.11 it swallows a cancellation that coincides with a failure.
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
                    one.exception()  # marks a later error as retrieved, because only the first is raised
    try:
        for one in failed or tasks:
            one.result()
    finally:  # breaks the reference cycle of tasks and errors, which keeps their data alive
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
    handed_over: bool = False  # whether all blocks have been sent, so that the target may already decode
    bytes: int = 0  # number of bytes sent so far
    over: bool = False  # whether the move has ended, so that the frontend needs no further answer
    shipments: list[OutgoingShipment] = field(default_factory=list)


class OutgoingMigrations:
    """Runs the moves of one worker's streams to other workers."""

    def __init__(self, engine: Engine, trust: Trust, counters: WorkerCounters, piece_bytes: int) -> None:
        """Start without moves. `piece_bytes` is the maximum number of bytes copied out of the engine at once, per shard."""
        self._engine = engine
        self._trust = trust
        self._counters = counters
        self._leaving: dict[int, OutgoingStream] = {}
        self._piece_bytes = piece_bytes

    def __len__(self) -> int:
        return len(self._leaving)

    @staticmethod
    def at_once(shards: int) -> int:
        """Return how many streams may move at the same time from an engine with `shards` shards.

        The number is limited because each shard of each moving stream occupies a thread.
        """
        return max(1, min(MOVES_MAX, THREADS_MAX // max(1, shards)))

    def under_way(self) -> list[OutgoingStream]:
        """Return the streams that are moving to other workers."""
        return list(self._leaving.values())

    def begin(self, key: int, stream: Stream, grants: Sequence[bytes]) -> OutgoingStream | None:
        """Prepare the shipment of the stream `key`. A later call of `ship` runs the shipment.

        If the stream cannot be shipped, send its frontend the reason and return None.
        """
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
        """Check that a stream can be shipped, and export it from the engine. Raise HoldfastError if it cannot be shipped."""
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
        """Decode the grants, one for each shard of the engine in the order of the ranks.

        Raise CannotShip if a grant is invalid or does not fit its shard.
        """
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
        """Abort the shipment of the stream `key`, so that the stream continues on this worker, even if it was stopped."""
        if (leaving := self._remove(key)) is not None:
            self._counters.moved("out", "failed")
            log.info("ship_given_up", request=leaving.stream.asked.request)
            self._release(leaving, continues=True)

    def forget(self, key: int) -> bool:
        """End the shipment of the stream `key`, which has ended on this worker.

        Return whether all its blocks had been sent; False if the stream was not being shipped.
        """
        leaving = self._remove(key)
        if leaving is None:
            return False
        self._counters.moved("out", "committed" if leaving.handed_over else "failed", leaving.bytes)
        self._release(leaving, continues=False)
        return leaving.handed_over

    def close(self) -> None:
        """Cancel all moves, so that their streams continue on this worker, and close the threads of shipments."""
        for key in list(self._leaving):
            self.stay(key)
        self._trust.close()

    def decline(self, leaving: OutgoingStream, reason: str) -> bool:
        """Abort a shipment, so that the stream continues on this worker, and send its frontend the reason.

        Return False if the move has already ended.
        """
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
        """Cancel the shipment at once and release the stream's exported blocks.

        If `continues` is true, a stopped stream also resumes decoding. If the engine is still stopping the stream, postpone the
        release and the resumption until the stop has ended.
        """
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
        """Ship a stream that `begin` returned. Return True if the shipment fails and the stream stays on this worker.

        Return False if the move had already ended when the shipment failed. After a success, wait until the task of this call
        is cancelled, because the stream has ended on this worker or the frontend has aborted the move.
        """
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
        """Ship full blocks while the stream decodes, and return how many of the stream's blocks the target then has.

        End when at most one full block is unsent, or when the number of unsent blocks no longer falls. `first` is the number of
        the stream's blocks that the target has at the beginning.
        """
        sent, before = first, 0
        while (missing := leaving.export.full_blocks() - sent) > 0:
            if before and (missing == 1 or missing >= before):
                break
            began = time.monotonic()
            await self._send(leaving, sent, missing)
            sent, before = sent + missing, missing
            # The target needs about as long to verify and copy the blocks. Unfinished copies at the stop lengthen the pause.
            await asyncio.sleep(min(time.monotonic() - began, SETTLE_S_MAX))
        return sent

    async def _ship_rest(self, leaving: OutgoingStream, sent: int, timer: asyncio.Timeout) -> None:
        """Stop the stream and ship its remaining blocks. `sent` is the number of blocks that the target already has."""
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
        """Send `count` blocks of every shard, starting at block `first` of the sequence."""
        if count > 0:
            shards = range(len(leaving.shipments))
            await run_concurrently(self._send_shard(leaving, shard, first, count) for shard in shards)

    async def _send_shard(self, leaving: OutgoingStream, shard: int, first: int, count: int) -> None:
        """Send `count` blocks of a shard in pieces. While a piece is sent, the next one is copied out of the engine."""
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
            # breaks the reference cycle of the task and its error, which keeps the last piece alive
            del copying


def _retrieve_error(copying: "asyncio.Future[Buffer]") -> None:
    """Retrieve the error of a copy that is no longer needed, so that asyncio does not log it."""
    if not copying.cancelled():
        copying.exception()
