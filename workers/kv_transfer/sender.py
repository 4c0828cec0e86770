"""The source's side of a KV transfer: sends KV blocks while the request decodes, then the rest.

`Sender` has blocking calls. `Shipment` runs a `Sender` in a thread for an event loop. A call returns only when the transfer no
longer reads the caller's memory. Any failure or refusal raises TransferFailed and ends the transfer.
"""

import asyncio
import contextlib
import mmap
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from events.fleet_key import FleetKey, nonce
from workers.kv_transfer.ledger import CHUNK_BYTES
from workers.kv_transfer.messages import (
    Accepted,
    Buffer,
    Ending,
    Grant,
    KvChunk,
    Open,
    Opened,
    Remote,
    TransferAddress,
    TransferFailed,
    TransferRefused,
    TransferSocket,
    Transport,
    digest,
    packed,
)
from workers.kv_transfer.receiver import PREFIX, SPARE_BYTES_MAX

Bytes = npt.NDArray[np.uint8]
CONNECT_S = 2.0
REASON_S = 0.5  # how long to wait for the target's reason after the target has closed the connection
MAPPINGS_MAX = 4
# threads that hash chunks and copy them into shared memory; a single thread takes a third longer if processors are free
SHIPPERS = 2
QUIET_S = 2.0  # how long to wait until a cancelled thread stops reading; a chunk takes about a millisecond


class Mapped:
    """The `Remote` for a region on this host, which is written through a memory mapping."""

    def __init__(self, memory: Bytes) -> None:
        """Prepare to write into the mapping `memory`."""
        self._memory = memory

    def write(self, offset: int, data: memoryview) -> None:
        # numpy releases the GIL while it copies; a memoryview does not
        self._memory[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def break_off(self) -> None:
        pass

    def close(self) -> None:
        pass


class Mappings:
    """A cache of mapped regions of other workers, because a new mapping costs 0.1 s per gigabyte. Thread-safe.

    A mapping keeps its memory allocated even if the target has unlinked the file or is dead. Therefore the total size of the
    cached mappings is limited. The limit is the number of bytes that a target keeps for reuse, because a larger region is never
    reused.
    """

    def __init__(self, bytes_max: int = SPARE_BYTES_MAX) -> None:
        """Build an empty cache, for mappings of up to `bytes_max` bytes in total."""
        self._bytes_max = bytes_max
        self.mapped: dict[tuple[str, int], Bytes] = {}  # by path and inode, least recently used first
        self._lock = threading.Lock()

    def get(self, path: str, size: int) -> Bytes | None:
        """Return the memory of the region at `path`, from the cache or newly mapped.

        Return None if the region is not a file on this host or has less than `size` bytes.
        """
        if not path or not Path(path).parent.name.startswith(PREFIX):
            return None
        try:
            held = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(held)
            if not stat.S_ISREG(found.st_mode) or found.st_size < size:
                return None
            with self._lock:
                return self._cached(held, path, found)
        except OSError:
            return None
        finally:
            os.close(held)

    def _cached(self, held: int, path: str, found: os.stat_result) -> Bytes:
        key = (path, found.st_ino)
        memory = self.mapped.pop(key, None)
        if memory is None:
            self.mapped = {one: kept for one, kept in self.mapped.items() if Path(one[0]).exists()}
            # MAP_POPULATE maps all pages at once; page faults at the first write would take twice as long
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            memory = np.frombuffer(mmap.mmap(held, found.st_size, flags=flags), np.uint8)
        if len(memory) <= self._bytes_max:
            self.mapped[key] = memory
        while len(self.mapped) > MAPPINGS_MAX or sum(map(len, self.mapped.values())) > self._bytes_max:
            del self.mapped[next(iter(self.mapped))]
        return memory


class Sender:
    """Sends one KV transfer with blocking calls.

    Calls must not overlap, except `cancel`, which may be called at any time from any thread.
    """

    def __init__(
        self,
        grant: Grant,
        mappings: Mappings | None = None,
        transport: Transport | None = None,
        key: FleetKey | None = None,
    ) -> None:
        """Prepare a transfer that uses `grant`, the target's permission to write. The time limit of the grant starts now.

        If the grant contains an offer for a transport, the bytes are written through `transport`. `key` is the fleet key. If it
        is set, the source sends no chunk before the target has proved that it knows the key.
        """
        self.grant = grant
        self._key = key
        self._mappings = mappings or Mappings()
        self._transport = transport
        self._deadline_s = time.monotonic() + grant.seconds
        self._connection: TransferSocket | None = None
        self._remote: Remote | None = None
        self._cancelled = False
        self._failure = ""  # the reason why the transfer has ended
        self._lock = threading.Lock()  # serialises messages
        self._offset = 0  # bytes sent so far
        self._number = 0  # chunks sent so far

    @property
    def shared(self) -> bool:
        """Whether this process writes into the target's memory directly. Known once the transfer is open."""
        return self._remote is not None

    @property
    def way(self) -> str:
        """The link that carries the bytes: "shm", "socket" or the transport's name. Known once the transfer is open."""
        if self._remote is None:
            return "socket"
        return "shm" if isinstance(self._remote, Mapped) or self._transport is None else self._transport.name

    def open(self) -> None:
        """Connect to the target and open the reservation. Raise TransferFailed if the target is unreachable or refuses."""
        self._remote = self._open_remote()
        self._connection = connection = TransferSocket(_connect(self.grant.endpoint), self._deadline_s)
        message = Open(self.grant.ticket, self.grant.description, self.shared)
        if self._key is None:
            self._send_message(message)
            return
        ticket, sent_nonce = self.grant.ticket, nonce()
        proof = self._key.proof("source", ticket.encode(), sent_nonce)
        self._send_message(msgspec.structs.replace(message, nonce=sent_nonce, proof=proof))
        try:
            answer = connection.receive()
            if isinstance(answer, TransferRefused):
                raise TransferFailed(answer.reason)
            if not isinstance(answer, Opened) or not self._key.proves(
                answer.proof, "target", ticket.encode(), sent_nonce
            ):
                raise TransferFailed("the target does not have this fleet's key")
        except TransferFailed as error:
            with self._lock:
                raise self._ended(str(error)) from error

    def _open_remote(self) -> Remote | None:
        grant = self.grant
        if self._transport is not None and grant.offer:
            return self._transport.remote(grant.offer, self._deadline_s)
        region = self._mappings.get(grant.region, grant.bytes)
        return None if region is None else Mapped(region)

    def send(self, blocks: Buffer) -> None:
        """Send the next whole blocks of the sequence. Raise TransferFailed if the transfer fails or the target refuses it.

        The buffer must not change until the call returns.
        """
        view = memoryview(blocks).cast("B")
        if self._offset + len(view) > self.grant.bytes:
            self.close()
            raise TransferFailed(f"the reservation has room for only {self.grant.bytes} bytes")
        parts = [
            (self._number + n, view[at : at + CHUNK_BYTES], self._offset + at)
            for n, at in enumerate(range(0, len(view), CHUNK_BYTES))
        ]
        self._number += len(parts)
        self._offset += len(view)
        if not self.shared or len(parts) < 2 * SHIPPERS:
            return self._ship(parts)
        with ThreadPoolExecutor(SHIPPERS, thread_name_prefix="kv-ship") as threads:
            list(threads.map(self._ship, [parts[n::SHIPPERS] for n in range(SHIPPERS)]))

    def finish(self, tail: Buffer, tokens: Sequence[int], computed: int, state: bytes = b"") -> None:
        """Send the last blocks and the request's state, and return when the target has committed.

        The last block of `tail` may be partly filled. All blocks together hold the KV of the first `computed` tokens of
        `tokens`. Raise TransferFailed if the transfer fails or the target refuses it.
        """
        self.send(tail)
        ids = packed(tokens)
        self._send_message(
            Ending(self.grant.ticket, self._number, computed, len(tokens), ids, digest(ids), state)
        )
        assert self._connection is not None
        try:
            answer = self._connection.receive()
        except TransferFailed as error:
            raise self._failed(error) from error
        self.close()
        if not isinstance(answer, Accepted):
            raise TransferFailed(f"the KV cache could not be transferred: {_reason(answer)}")

    def cancel(self) -> None:
        """Abort the transfer, so that a running call fails and the target frees the reservation."""
        self._cancelled = True
        if (connection := self._connection) is not None:
            connection.break_off()
        if (remote := self._remote) is not None:
            remote.break_off()

    def close(self) -> None:
        """Close the connection. If the target has not committed yet, the transfer fails."""
        if (connection := self._connection) is not None:
            connection.close()
        self._connection = None
        if (remote := self._remote) is not None:
            remote.close()
        self._remote = None

    def _ship(self, parts: list[tuple[int, memoryview, int]]) -> None:
        for number, view, offset in parts:
            chunk = KvChunk(self.grant.ticket, number, offset, len(view), xxhash.xxh3_64_intdigest(view))
            remote = self._remote
            if remote is not None:
                self._write(remote, offset, view)
                self._send_message(chunk)
            else:
                self._send_message(chunk, view)

    def _write(self, remote: Remote, offset: int, view: memoryview) -> None:
        try:
            remote.write(offset, view)
        except TransferFailed as error:
            with self._lock:
                raise self._failed(error) from error

    def _send_message(self, message: Open | KvChunk | Ending, payload: memoryview | None = None) -> None:
        with self._lock:
            if self._failure:
                raise TransferFailed(self._failure)
            try:
                if self._connection is None or self._cancelled:
                    raise TransferFailed("the transfer is not open")
                if self._connection.readable():  # before the `Ending`, the target sends only refusals
                    raise TransferFailed("the connection was closed")
                self._connection.send(message, payload)
            except TransferFailed as error:
                raise self._failed(error) from error

    def _failed(self, error: TransferFailed) -> TransferFailed:
        """End the transfer after `error`, and return the error to raise.

        The returned error has the target's reason if the target sent one. For later calls, only the text is kept. A kept
        exception would keep its stack frames alive, and with them the data that was to be sent.
        """
        if self._failure:
            return TransferFailed(self._failure)
        reason = str(error)
        if self._connection is not None and not self._cancelled:
            self._connection.deadline_s = time.monotonic() + REASON_S
            with contextlib.suppress(TransferFailed):  # the target may not have sent a reason
                reason = _reason(self._connection.receive())
        return self._ended(reason)

    def _ended(self, reason: str) -> TransferFailed:
        """Close the transfer because of `reason`, and return the error to raise."""
        if self._cancelled:
            reason = "the transfer was cancelled"
        self.close()
        self._failure = f"the KV cache could not be transferred: {reason}"
        return TransferFailed(self._failure)


def _reason(answer: object) -> str:
    return (
        answer.reason
        if isinstance(answer, TransferRefused)
        else f"unexpected answer of the target: {type(answer).__name__}"
    )


def _connect(endpoint: TransferAddress) -> socket.socket:
    """Connect to the target's Unix socket if it exists on this host, otherwise over TCP. Raise TransferFailed if both fail."""
    if endpoint.path and Path(endpoint.path).exists():
        unix = socket.socket(socket.AF_UNIX)
        try:
            unix.settimeout(CONNECT_S)
            unix.connect(endpoint.path)
            return unix
        except OSError:
            unix.close()
    try:
        return socket.create_connection((endpoint.host, endpoint.port), CONNECT_S)
    except OSError as error:
        raise TransferFailed(f"cannot connect to the target: {error}") from error


class Shipment:
    """Runs one transfer from this worker in a thread, for an event loop.

    If an awaited call is cancelled, the transfer is cancelled too. The cancelled call then ends when the thread no longer reads
    the caller's memory, or after 2 s. A shipment may occupy a thread until the target answers or the grant expires, so `threads`
    needs one thread per shipment.
    """

    def __init__(self, sender: Sender, threads: ThreadPoolExecutor) -> None:
        """Prepare to run `sender`, which is not open yet, in a thread of the pool `threads`."""
        self._sender = sender
        self._threads = threads
        # serialises calls, so that the socket is not closed while another call uses it
        self._turn = threading.Lock()

    @property
    def way(self) -> str:
        """The link that carries the bytes: "shm", "socket" or the transport's name. Known once the transfer is open."""
        return self._sender.way

    async def open(self) -> None:
        """Connect to the target and open the reservation.

        Raise TransferFailed if that fails. The caller must call `close` even after a failure.
        """
        await self._run(self._sender.open)

    def close(self) -> None:
        """Close the connection. If the target has not committed yet, the transfer fails."""
        self._sender.cancel()
        try:
            self._threads.submit(self._in_turn, self._sender.close)
        except RuntimeError:  # the thread pool is shut down, so no thread uses the connection
            self._sender.close()

    async def send(self, blocks: Buffer) -> None:
        """Send the next whole blocks of the sequence. Raise TransferFailed if the transfer fails or the target refuses it."""
        await self._run(lambda: self._sender.send(blocks))

    async def finish(self, tail: Buffer, tokens: Sequence[int], computed: int, state: bytes = b"") -> None:
        """Send the last blocks and the request's state, and return when the target has committed.

        Raise TransferFailed if the transfer fails or the target refuses it.
        """
        await self._run(lambda: self._sender.finish(tail, tokens, computed, state))

    def cancel(self) -> None:
        """Abort the transfer, so that a running await fails with TransferFailed."""
        self._sender.cancel()

    async def _run(self, call: Callable[[], None]) -> None:
        running = asyncio.get_running_loop().run_in_executor(self._threads, self._in_turn, call)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._sender.cancel()
            await asyncio.wait([running], timeout=QUIET_S)
            if running.done():
                running.exception()  # marks the error as retrieved, because the cancelled await does not raise it
            raise
        finally:
            # breaks the reference cycle of the future and its error, which keeps the data alive that was to be sent
            del running

    def _in_turn(self, call: Callable[[], None]) -> None:
        with self._turn:
            call()
