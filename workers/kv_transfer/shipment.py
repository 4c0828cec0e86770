"""How does a KV transfer leave an event loop? In a thread of its own: nothing here blocks."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from events.fleet_key import FleetKey
from workers.kv_transfer.messages import Buffer, Description, Grant, TransferRefused
from workers.kv_transfer.receiver import Arrived, Receiver
from workers.kv_transfer.sender import Mappings, Sender
from workers.kv_transfer.transport import Transport

QUIET_S = 2.0  # for a thread to notice that it is cancelled; a chunk takes it a millisecond


class Shipment:
    """One transfer from this worker.

    async with Shipment(grant, description, mappings, threads) as shipment:
        await shipment.send(blocks)
        await shipment.finish(tail, tokens, computed, state)

    An await that is cancelled cancels the transfer, and ends when the caller's memory is read no more. A shipment uses
    one of `threads` at a time, until its target answers or its grant's time is up: have one for each shipment.
    """

    def __init__(
        self,
        grant: Grant,
        description: Description,
        mappings: Mappings | None = None,
        threads: ThreadPoolExecutor | None = None,
        transport: Transport | None = None,
        key: FleetKey | None = None,
    ) -> None:
        """Prepare to use a grant, whose time runs from now. Without `threads` it makes one for itself."""
        self._sender = Sender(grant, description, mappings, transport, key)
        self._own = ThreadPoolExecutor(1, thread_name_prefix="kv-send") if threads is None else None
        self._threads = threads or self._own
        self._turn = threading.Lock()  # one call after the other: a socket is not closed while it is used

    @property
    def way(self) -> str:
        """Over what the bytes go: shm, socket, or the transport's name. Known once it is open."""
        return self._sender.way

    async def __aenter__(self) -> "Shipment":
        try:
            await self.open()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def open(self) -> None:
        """Connect to the target. Raise TransferFailed. Who calls it calls `close` too, whatever came of it."""
        await self._do(self._sender.open)

    def close(self) -> None:
        """Let go of the connection. Before the target has committed it ends the transfer."""
        self._sender.cancel()
        assert self._threads is not None
        try:
            self._threads.submit(self._in_turn, self._sender.close)
        except RuntimeError:  # the threads are gone, and nobody uses the connection
            self._sender.close()
        if self._own is not None:
            self._own.shutdown(wait=False)

    async def send(self, blocks: Buffer) -> None:
        """Ship whole blocks that follow those before. Raise TransferFailed."""
        await self._do(lambda: self._sender.send(blocks))

    async def finish(self, tail: Buffer, tokens: Sequence[int], computed: int, state: bytes = b"") -> None:
        """Ship the last blocks and the state; return when the target has committed. Raise TransferFailed."""
        await self._do(lambda: self._sender.finish(tail, tokens, computed, state))

    def cancel(self) -> None:
        """Break the transfer off: the await that runs fails with TransferFailed."""
        self._sender.cancel()

    async def _do(self, call: Callable[[], None]) -> None:
        running = asyncio.get_running_loop().run_in_executor(self._threads, self._in_turn, call)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._sender.cancel()
            await asyncio.wait([running], timeout=QUIET_S)
            if running.done():
                running.exception()  # it was cancelled: nobody else asks
            raise
        finally:
            del running  # else it and its error would keep each other, and all that was to be sent

    def _in_turn(self, call: Callable[[], None]) -> None:
        with self._turn:
            call()


async def reserve(
    receiver: Receiver,
    description: Description,
    blocks: int,
    tokens: Sequence[int] = (),
    first_block: int = 0,
) -> Grant | TransferRefused:
    """Reserve blocks at this worker. A caller that goes meanwhile leaves it to the reservation's deadline."""
    return await asyncio.to_thread(receiver.reserve, description, blocks, tokens, first_block)


async def arrived(receiver: Receiver, ticket: str) -> Arrived | TransferRefused:
    """Wait for what becomes of a reservation of this worker."""
    return await asyncio.wrap_future(receiver.arrival(ticket))
