"""The transformers engine's `Export` and `Import`, which move requests with their KV blocks.

Their methods run on the worker's event loop. Separate threads copy blocks in parallel with the engine's thread. If blocks are
released during a copy, they become free when the copy has ended. Requests stop, resume and start between two steps.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Sequence as Sequential
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engines.engine import MoveEnded, MoveRefused, Stopped, validate_import
from workers.engines.transformers.attention import Pool
from workers.engines.transformers.schedule import TorchArrival, TorchDeparture
from workers.engines.transformers.stepper import Stepper
from workers.kv_transfer.messages import Buffer

HOLD_S = 10.0  # longest wait for the end of the current step
COPY_S = 2.0  # longest wait for the end of the current copy, which takes milliseconds
COPIES_AT_ONCE = 2
T = TypeVar("T")
Between = Callable[[Callable[[Stepper], None]], None]


class Copier:
    """Copies whole KV blocks from a pool to bytes, and back, while the model computes.

    May be called from several threads. The order of the bytes in a block: [layer][keys, values][KV head][token][head width]

    On a GPU, copies use a separate stream and pinned memory, so that they run in parallel with a step. Outgoing copies need not
    wait for the step's stream: a block counts as full only after the step's tokens were chosen, and that choice waits for the
    GPU. Incoming copies wait for the last clearing of blocks, which may have cleared the same blocks. `out` and `into` return
    only after all bytes have been copied.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        layers, _, heads, tokens, width = pool.keys.shape
        self._shape = (layers, 2, heads, tokens, width)
        self.block_bytes = 2 * pool.keys[:, 0].numel() * pool.keys.element_size()
        device = pool.keys.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def out(self, blocks: Sequential[int]) -> memoryview:
        """Return the bytes of these blocks, in this order."""
        host = self._empty(len(blocks))
        with self._beside():
            there = host if self._stream is None else torch.empty_like(host, device=self._pool.keys.device)
            for place, block in enumerate(blocks):
                there[place, :, 0] = self._pool.keys[:, block]
                there[place, :, 1] = self._pool.values[:, block]
            if there is not host:
                host.copy_(there, non_blocking=True)
        return _bytes(host).data

    @torch.inference_mode()
    def into(self, blocks: Sequential[int], data: Buffer) -> None:
        """Write `data`, bytes in the form that `out` returns, into these blocks."""
        host = self._empty(len(blocks))
        # numpy releases the GIL and accepts read-only memory
        np.copyto(_bytes(host), np.frombuffer(data, np.uint8))
        with self._beside():
            if self._stream is not None and self._pool.cleared is not None:
                self._stream.wait_event(self._pool.cleared)
            arrived = host.to(self._pool.keys.device, non_blocking=True)
            for place, block in enumerate(blocks):
                self._pool.keys[:, block] = arrived[place, :, 0]
                self._pool.values[:, block] = arrived[place, :, 1]

    def _empty(self, blocks: int) -> Tensor:
        pinned = self._stream is not None
        return torch.empty((blocks, *self._shape), dtype=self._pool.keys.dtype, pin_memory=pinned)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            done = self._stream.record_event()
        done.synchronize()


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a tensor's memory as a numpy array."""
    return tensor.view(-1).view(torch.uint8).numpy()


class TorchMoves:
    """The state and the copy threads that all exports and imports of one engine share.

    `between` schedules a call between two steps, on the engine's thread. `wake` makes the engine check for work after blocks or a
    slot have become free.
    """

    def __init__(self, stepper: Stepper, between: Between, wake: Callable[[], None]) -> None:
        self.stepper = stepper
        self.lock = stepper.lock
        self.transit = stepper.transit
        self.between = between
        self.wake = wake
        self.copier = Copier(stepper.pool)
        self._threads = ThreadPoolExecutor(COPIES_AT_ONCE, thread_name_prefix="kv-copy")
        self._pauses: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()

    async def copied(self, copy: Callable[[], T], done: Callable[[bool], None]) -> T:
        """Run `copy` on a copy thread and return its result.

        When the copy has ended, `done` is called on any thread, with True if the copy succeeded. A cancelled call still waits
        for the end of the copy, for at most COPY_S (2) seconds, because the caller may release the data that the copy reads.
        """
        copying = self._threads.submit(copy)

        def over(ended: "Future[T]") -> None:
            with self.lock:
                done(ended.exception() is None)
            self.wake()

        copying.add_done_callback(over)
        waiting = asyncio.wrap_future(copying)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            await asyncio.wait([waiting], timeout=COPY_S)
            if waiting.done():
                waiting.exception()  # marks the exception as retrieved, because no other code does
            raise

    async def pause(self, departure: TorchDeparture) -> None:
        """Stop a request that moves to another worker, and wait until it has left the batch between two steps.

        Return at once if the request cannot move any more. Raise TimeoutError if no step ends within HOLD_S (10) seconds. After
        such a timeout, the request continues to decode.
        """
        held: asyncio.Future[None] = self._loop.create_future()
        with self.lock:
            if departure.lost:
                return
            self._pauses.add(held)

        def hold(stepper: Stepper) -> None:
            with stepper.lock:
                if stepper.faults.dead:
                    departure.lost = departure.lost or "the engine is dead"
                stepper.schedule.hold(departure)
            self._settle(held)

        self.between(hold)
        try:
            async with asyncio.timeout(HOLD_S):
                await held
        except BaseException:
            self.resume(departure)
            raise
        finally:
            with self.lock:
                self._pauses.discard(held)

    def resume(self, departure: TorchDeparture) -> None:
        """Put a request that `pause` has stopped back into the running batch, between two steps.

        Has no effect if the request is not stopped at that time.
        """

        def resume(stepper: Stepper) -> None:
            with stepper.lock:
                stepper.schedule.resume(departure)

        self.between(resume)

    def cancel(self, key: int, why: str) -> None:
        """End a request's move to or from another worker, and free what was reserved for the move."""
        with self.lock:
            self.transit.cancel(key, why)

    def end(self, why: str) -> None:
        """End all moves, for the reason `why`. The engine's thread calls this as its last action."""
        with self.lock:
            self.transit.drop_all(why)
            pauses = list(self._pauses)
        for held in pauses:
            self._settle(held)
        self._threads.shutdown(wait=False)

    def _settle(self, held: "asyncio.Future[None]") -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(lambda: None if held.done() else held.set_result(None))


class TransformersExport:
    """The `Export` of a request that moves to another worker with its KV blocks."""

    def __init__(self, moves: TorchMoves, departure: TorchDeparture) -> None:
        self._moves, self._transit, self._copier = moves, moves.transit, moves.copier
        self._departure = departure

    def full_blocks(self) -> int:
        lost, sequence = self._departure.lost, self._departure.sequence
        return 0 if lost else sequence.cached // self._moves.stepper.blocks.tokens

    async def blocks(self, shard: int, first: int, count: int) -> Buffer:
        """Copy KV blocks out of the pool on a copy thread, and return their bytes.

        Raise MoveEnded if the request cannot move any more, if these blocks do not exist yet, or if the copy fails.
        """
        with self._moves.lock:
            self._check()
            sequence, size = self._departure.sequence, self._moves.stepper.blocks
            held = sequence.key in self._transit.held
            there = size.needed(sequence.cached) if held else self.full_blocks()
            if shard != 0 or not 0 <= first <= first + count <= there:
                asked = f"blocks {first} to {first + count} of shard {shard}"
                raise MoveEnded(f"{asked} were requested; there are {there}")
            table = sequence.blocks[first : first + count]
            self._departure.copies += 1
        try:
            copy = await self._moves.copied(lambda: self._copier.out(table), self._copied)
        except (RuntimeError, MemoryError) as error:  # torch's exceptions
            raise MoveEnded(f"the blocks cannot be copied: {error}") from error
        self._check()
        return copy

    async def stop(self) -> Stopped:
        """Remove the request from the batch at the end of the current step, and return its state.

        Raise MoveEnded if the request cannot move any more, or if no step ends within HOLD_S (10) seconds.
        """
        self._check()
        try:
            await self._moves.pause(self._departure)
        except TimeoutError:
            raise MoveEnded(f"no step has ended for {HOLD_S:.0f} s") from None
        with self._moves.lock:
            self._check()
            sequence = self._departure.sequence
            return Stopped(list(sequence.tokens), sequence.cached)

    def resume(self) -> None:
        self._moves.resume(self._departure)

    def close(self) -> None:
        with self._moves.lock:
            self._transit.close(self._departure, "it has been closed")
        # also makes the engine check for work, because blocks may have become free
        self._moves.resume(self._departure)

    def _copied(self, succeeded: bool) -> None:
        self._transit.copied_out(self._departure)

    def _check(self) -> None:
        if self._departure.lost:
            raise MoveEnded(self._departure.lost)


class TransformersImport:
    """The `Import` of a request that arrives from another worker with its KV blocks."""

    cached_tokens = 0  # all blocks are transferred, because an arrived request shares no blocks with others

    def __init__(self, moves: TorchMoves, arrival: TorchArrival) -> None:
        self._moves, self._transit, self._copier = moves, moves.transit, moves.copier
        self._arrival = arrival

    async def take(self, shard: int, first: int, data: Buffer) -> None:
        """Copy KV blocks into the pool on a copy thread.

        Raise MoveRefused if the blocks are outside of the reservation, if the reservation has ended, or if the copy fails.
        """
        view = memoryview(data).cast("B")
        count, odd = divmod(len(view), self._copier.block_bytes)
        with self._moves.lock:
            self._check()
            room = len(self._arrival.blocks)
            if shard != 0 or odd or not 0 <= first <= first + count <= room:
                self._abort()
                where = f"for shard {shard} from block {first} on"
                raise MoveRefused(f"{len(view)} bytes arrived {where}, but there is room for {room} blocks")
            table = self._arrival.blocks[first : first + count]
            self._arrival.copies += 1

        def copied(succeeded: bool) -> None:
            self._transit.copied_in(self._arrival, range(first, first + count) if succeeded else range(0))

        try:
            await self._moves.copied(lambda: self._copier.into(table, view), copied)
        except (RuntimeError, MemoryError) as error:  # torch's exceptions
            self._abort()
            raise MoveRefused(f"the blocks cannot be copied: {error}") from error
        self._check()

    async def commit(self, tokens: Sequence[int], computed: int) -> None:
        """Start to decode the arrived request.

        Raise MoveRefused if the tokens do not match the reservation, if blocks are missing, or if the reservation has ended.
        """
        with self._moves.lock:
            self._check()
            if against := self._objection(tokens, computed):
                self._abort()
                raise MoveRefused(against)
            self._arrival.over = "it has been committed"
        arrived = list(tokens)
        self._moves.between(lambda stepper: stepper.settle(self._arrival, arrived, computed))

    def _abort(self) -> None:
        with self._moves.lock:
            self._transit.abort(self._arrival, "it has been aborted")
        self._moves.wake()

    def _objection(self, tokens: Sequence[int], computed: int) -> str:
        stepper, arrival = self._moves.stepper, self._arrival
        against = validate_import(
            arrival.request, arrival.room_tokens, tokens, computed,
            context=stepper.limit, vocabulary=stepper.model.vocabulary,
        )  # fmt: skip
        if against or arrival.copies:
            return against or "its blocks are still being copied"
        missing = set(range(stepper.blocks.needed(computed))) - arrival.taken
        return f"block {min(missing)} of shard 0 did not arrive" if missing else ""

    def _check(self) -> None:
        if self._arrival.over:
            raise MoveRefused(self._arrival.over)
