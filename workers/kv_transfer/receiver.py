"""The target's side of a KV transfer: provides memory regions to sources and receives their chunks.

    /dev/shm/holdfast-kv-INSTANCE/     locked with flock by the instance while it lives
        socket                         where sources on this host connect
        0, 1, 2, …                     one file per region; a name is never reused

Source and target map the same file of a region. A new file costs both processes a page fault per 4 KiB. These faults limit a
transfer to 2 to 4 GB/s instead of 15 GB/s (measured). Regions are therefore kept for the next transfer, up to `spare_bytes_max`
bytes. If a reservation ends before its source has finished writing, the region is unlinked and not reused, because the source
may still write into it.

If /dev/shm does not exist or has no space, a region is plain memory, and its bytes arrive over the socket.

One thread for each listening socket accepts connections, ends expired reservations and frees memory. Each connection has its own
thread. Every wait has a deadline. A source must send its ticket within 2 s (`OPEN_S`) after its connection was accepted. Once
the ticket has arrived, the reservation's deadline applies.
"""

import asyncio
import contextlib
import fcntl
import itertools
import mmap
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import xxhash

from events.fleet_key import FleetKey
from workers.kv_transfer.ledger import KvReservation, ReservationPolicy, TransferReservations
from workers.kv_transfer.messages import (
    Accepted,
    Description,
    Ending,
    Grant,
    KvChunk,
    Open,
    Opened,
    RegionTaken,
    TransferAddress,
    TransferFailed,
    TransferRefused,
    TransferSocket,
    Transport,
    unpacked,
)
from workers.listen_socket import listening

ROOT = Path("/dev/shm")
PREFIX = "holdfast-kv-"
# limits the instance's name, so that the path of its socket stays below the 108 bytes of a Unix socket's address
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
CLAIM_TRIES = 5
SPARE_BYTES_MAX = 256 << 20  # maximum total size of the regions that are kept for the next transfer
SPARES_MAX = 16  # maximum number of kept regions, each of which has a file descriptor
OPEN_S = 2.0
TICK_S = 0.1
STOP_S = 5.0


class Region:
    """The mapped memory of one reservation. `path` is the region's file; empty if the memory belongs to this process only."""

    def __init__(self, mapped: mmap.mmap, path: str = "") -> None:
        """Take ownership of the mapping `mapped`."""
        self.path = path
        self.size = len(mapped)
        self.memory = memoryview(mapped)
        self._mapped = mapped

    def empty(self) -> None:
        """Return the region's memory to the kernel, even while other processes still map it.

        This takes 0.1 to 0.3 s per gigabyte. Without this call, the last process to unmap the region would need that time.
        """
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # not supported by every file system
                self._mapped.madvise(mmap.MADV_REMOVE)


class Regions:
    """Creates and reuses the regions of one worker instance. Only `take` and `give_back` are thread-safe."""

    def __init__(
        self, instance: str, root: Path | None = ROOT, spare_bytes_max: int = SPARE_BYTES_MAX
    ) -> None:
        """Create and lock the instance's directory below `root`. If `root` is None, all regions are plain memory.

        Raise ValueError for an invalid instance name, RegionTaken if a live process has locked the directory, and OSError if
        the directory cannot be created.
        """
        if not NAME.fullmatch(instance):
            raise ValueError(
                f"invalid instance name {instance!r}: expected 1 to 64 letters, digits, dots, dashes, underscores"
            )
        self._spare_bytes_max = spare_bytes_max
        self.spares: list[Region] = []  # regions that are kept for the next transfer
        self._numbers = itertools.count()
        self._held: int | None = None
        self.folder: Path | None = None
        if root is not None and root.is_dir():
            self.folder = root / f"{PREFIX}{instance}"
            self._held = _claim(self.folder)

    @property
    def socket(self) -> str:
        """Path of the Unix socket for sources of this host; empty if the instance has no directory."""
        return str(self.folder / "socket") if self.folder else ""

    def take(self, size: int) -> Region:
        """Return a reused or new region of at least `size` bytes. Raise OSError if no memory can be allocated."""
        for spare in sorted(self.spares, key=lambda one: one.size):
            if size <= spare.size <= 2 * size:
                with contextlib.suppress(ValueError):  # another thread has removed this region first
                    self.spares.remove(spare)
                    return spare
        if self.folder is not None and self._held is not None:
            with contextlib.suppress(OSError):  # no space left, as in containers with a small /dev/shm
                return self._create_region(self.folder / str(next(self._numbers)), size)
        return Region(mmap.mmap(-1, size))

    def _create_region(self, path: Path, size: int) -> Region:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # allocates all pages now, because a full /dev/shm would otherwise cause SIGBUS at a write
            os.posix_fallocate(held, 0, size)
            return Region(mmap.mmap(held, size), str(path))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(held)
            # `close` ran meanwhile and may have left the directory because of this file
            if self._held is None:
                shutil.rmtree(path.parent, ignore_errors=True)

    def give_back(self, region: Region, quiet: bool) -> Region | None:
        """Keep a region for the next transfer, or unlink it if it cannot be reused.

        `quiet` is true if the source has finished writing and this process no longer reads the region. Return the region that
        the caller must `empty`: `region` itself, or an older region that `region` replaces. Return None if all are kept.
        """
        kept = sum(one.size for one in self.spares)
        if quiet and region.path and kept + region.size <= self._spare_bytes_max and self._held is not None:
            self.spares.append(region)
            if len(self.spares) <= SPARES_MAX:
                return None
            region = self.spares.pop(0)
        if region.path:
            Path(region.path).unlink(missing_ok=True)
        return region

    def close(self) -> None:
        """Remove the instance's directory with all its files. Mapped regions keep their memory until they are unmapped."""
        self.spares.clear()
        held, self._held = self._held, None  # first, because another thread may close at the same time
        if self.folder is not None and held is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(held)


def _claim(folder: Path) -> int:
    """Create the directory, lock it, and return the descriptor that holds the lock.

    If another process removes the directory before it is locked, try again. Raise RegionTaken if a live process has locked it.
    """
    for _ in range(CLAIM_TRIES):
        _sweep(folder)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            break
        held = _lock_folder(folder)
        if held is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(held), folder.stat()):
                    return held
            os.close(held)
    raise RegionTaken(
        f"another live process serves the KV regions in {folder}: every instance needs its own name"
    )


def _lock_folder(folder: Path) -> int | None:
    """Lock a directory without waiting, and return its descriptor; None if it does not exist or is already locked."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    return held


def _sweep(folder: Path) -> bool:
    if (held := _lock_folder(folder)) is None:
        return False
    try:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    finally:
        os.close(held)


def sweep(root: Path = ROOT) -> list[str]:
    """Remove the region directories of dead instances, and return the instances' names.

    An instance is dead if its directory is not locked, because the kernel releases the lock of a process that ends.
    """
    found = sorted(root.glob(f"{PREFIX}*")) if root.is_dir() else []
    return [folder.name.removeprefix(PREFIX) for folder in found if _sweep(folder)]


class ArrivalProgress:
    """An asyncio event that the receiver's threads set when more bytes of a transfer have arrived."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()

    def set(self) -> None:
        """Set the event. May be called from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._more.set)

    def settled(self, _: object) -> None:
        """Set the event when the transfer is over. The future of the transfer's result calls this method on the loop."""
        self._more.set()

    async def wait(self) -> None:
        """Wait until the event is set."""
        await self._more.wait()

    def clear(self) -> None:
        """Clear the event."""
        self._more.clear()


@dataclass(frozen=True, slots=True)
class Arrived:
    """The result of a committed transfer.

    `memory` holds the blocks in the order of the sequence. It stays valid until `Receiver.release` or the deadline.
    """

    ticket: str
    computed: int  # number of tokens that have their KV in the blocks
    tokens: list[int]  # the request's token ids so far
    state: bytes  # the request's state, as encoded by `migration.state`
    memory: memoryview
    link: str = ""  # the link over which the bytes arrived: shm, unix or tcp


@dataclass(slots=True)
class _ReservedRoom:
    """The region, connection and result of a live reservation. `TransferReservations` has the reservation's size and deadline."""

    ticket: str
    region: Region
    arrival: "Future[Arrived | TransferRefused]"
    connection: TransferSocket | None = None
    shared: bool = False  # whether the source writes into the region directly
    quiet: bool = False  # whether the source has finished writing; it may begin even before its Open is read
    why: str = ""  # the reason why the reservation ended
    progress: ArrivalProgress | None = None  # set whenever more bytes are verified


class Receiver:
    """Receives KV transfers from sources.

    All methods may be called from any thread. `reserve` may block for 0.3 s per gigabyte.
    """

    def __init__(
        self,
        own: Sequence[Description],
        regions: Regions,
        policy: ReservationPolicy | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        transport: Transport | None = None,
        key: FleetKey | None = None,
    ) -> None:
        """Start to listen for sources. Raise OSError if an address cannot be bound.

        `own` has the description of the accepted blocks for each shard. The receiver listens on `host` and `port`, and on a
        Unix socket for sources of this host. Sources on other hosts connect to `advertise` (default: `host`). A source that has
        the same kind of `transport` writes through it. `key` is the fleet key that sources must know; None: any source may
        connect.
        """
        policy = policy or ReservationPolicy()
        self.regions = regions
        self._transport = transport
        self._key = key
        self._ledger = TransferReservations(own, policy)
        self._rooms: dict[str, _ReservedRoom] = {}
        # reentrant, because a callback of an arrival may call this object again
        self._lock = threading.RLock()
        self._connection_slots = threading.BoundedSemaphore(2 * policy.live_max * len(own))
        self._connections: set[TransferSocket] = set()
        self._to_empty: deque[Region] = deque()
        self._stopped = threading.Event()
        self._listeners = [listening(host, port)]
        if regions.socket:
            self._listeners.append(unix := socket.socket(socket.AF_UNIX))
            try:
                unix.bind(regions.socket)
                unix.listen()
            except OSError:  # a path of more than 108 bytes
                for one in self._listeners:
                    one.close()
                raise
        for one in self._listeners:
            one.settimeout(TICK_S)
        self.endpoint = TransferAddress(
            advertise or host, self._listeners[0].getsockname()[1], regions.socket
        )
        self._threads = [
            threading.Thread(target=self._accept, args=(one,), name="kv-accept", daemon=True)
            for one in self._listeners
        ]
        for thread in self._threads:
            thread.start()

    @property
    def live(self) -> int:
        """Number of reservations that are live or still hold memory."""
        with self._lock:
            return max(len(self._ledger), len(self._rooms))

    def reserve(
        self, description: Description, blocks: int, tokens: Sequence[int] = (), first_block: int = 0
    ) -> Grant:
        """Reserve memory for `blocks` KV blocks of a request, starting at block `first_block` of the request's sequence.

        `tokens` are the request's tokens so far. Return the grant for the source. Raise TransferFailed with the reason if the
        reservation is refused.
        """
        with self._lock:
            self._expire()
            made = self._ledger.reserve(description, blocks, tokens, time.monotonic(), first_block)
        try:
            region = self.regions.take(made.size)
        except OSError as error:
            with self._lock:
                self._ledger.abort(made.ticket)
            raise TransferFailed(f"no room: {error}") from error
        try:
            offer = self._transport.offer(region.memory) if self._transport is not None else b""
        except TransferFailed:  # without an offer, sources send over the socket
            offer = b""
        with self._lock:
            if self._stopped.is_set() or self._ledger.get(made.ticket) is None:
                self._withdraw(region, quiet=True)
                self._give_back(region, quiet=True)
                raise TransferFailed("the reservation's deadline has passed")
            self._rooms[made.ticket] = room = _ReservedRoom(made.ticket, region, Future())
            room.arrival.set_running_or_notify_cancel()  # from now on, the future cannot be cancelled
        left_s = made.deadline_s - time.monotonic()
        return Grant(
            made.ticket, self.endpoint, made.size, left_s, description, region.path, made.first_block, offer
        )

    def arrival(self, ticket: str) -> "Future[Arrived | TransferRefused]":
        """Return a future with a reservation's result. It completes soon after the reservation's deadline at the latest."""
        with self._lock:
            if (room := self._rooms.get(ticket)) is not None:
                return room.arrival
        gone: Future[Arrived | TransferRefused] = Future()
        gone.set_result(TransferRefused("the reservation does not exist, or has ended"))
        return gone

    def received(self, ticket: str) -> memoryview:
        """Return the verified bytes from the first block up to the first gap. An engine may already copy these bytes.

        The result is empty if the reservation has ended.
        """
        with self._lock:
            found, room = self._ledger.get(ticket), self._rooms.get(ticket)
            return room.region.memory[: found.coverage.prefix] if found and room else memoryview(b"")

    def watch(self, ticket: str, progress: ArrivalProgress) -> None:
        """From this call on, set `progress` whenever more bytes of the reservation `ticket` are verified."""
        with self._lock:
            if (room := self._rooms.get(ticket)) is not None:
                room.progress = progress

    def abort(self, ticket: str, why: str = "the target aborted the transfer") -> None:
        """End a reservation in any state and free its memory. A reservation that has ended is ignored."""
        with self._lock:
            self._free(self._ledger.abort(ticket), why, read=True)

    def release(self, ticket: str) -> None:
        """End a committed reservation after the engine has copied its bytes, so that its memory can be reused."""
        with self._lock:
            self._free(self._ledger.abort(ticket), "the target has released the reservation", read=False)

    def close(self, within_s: float = STOP_S) -> None:
        """End all reservations and connections, stop listening, and wait for the threads for at most `within_s` seconds."""
        self._stopped.set()
        with self._lock:
            for ticket in list(self._rooms):
                self._free(self._ledger.abort(ticket), "the target is shutting down", read=True)
            for connection in self._connections:
                connection.break_off(socket.SHUT_RD)
            threads = list(self._threads)
        until = time.monotonic() + within_s
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        for one in self._listeners:
            one.close()
        self.regions.close()

    def _free(self, ended: KvReservation | None, why: str, read: bool) -> None:
        """Free the resources of `ended`, a reservation that the ledger has ended. If `ended` is None, do nothing.

        `read` is true if an engine may still read the reservation's memory, which must then not be reused.
        """
        room = self._rooms.pop(ended.ticket, None) if ended else None
        if room is None or ended is None:
            return
        room.why = why
        if room.connection is not None and ended.ending is None:
            room.connection.break_off(socket.SHUT_RD)
        self._withdraw(room.region, room.quiet)
        self._give_back(room.region, room.quiet and not (read and bool(ended.ending)))
        if not room.arrival.done():
            room.arrival.set_result(TransferRefused(why))

    def _give_back(self, region: Region, quiet: bool) -> None:
        if (gone := self.regions.give_back(region, quiet)) is not None:
            self._to_empty.append(gone)

    def _empty(self) -> None:
        """Return the memory of unlinked regions to the kernel.

        The caller must not hold the lock, because an event loop may be waiting for the lock.
        """
        with contextlib.suppress(IndexError):
            while True:
                self._to_empty.popleft().empty()

    def _withdraw(self, region: Region, quiet: bool) -> None:
        if self._transport is not None:
            with contextlib.suppress(TransferFailed):
                self._transport.withdraw(region.memory, quiet)

    def _expire(self) -> None:
        for ended in self._ledger.expire(time.monotonic()):
            self._free(ended, "the reservation's deadline has passed", read=True)

    def _accept(self, at: socket.socket) -> None:
        while not self._stopped.is_set():
            with self._lock:
                self._expire()
                self._threads = [one for one in self._threads if one.is_alive()]
            self._empty()
            try:
                connected, _ = at.accept()
            except TimeoutError:
                continue
            except OSError:  # no free file descriptor: try again soon
                self._stopped.wait(TICK_S)
                continue
            if not self._connection_slots.acquire(blocking=False):
                connected.close()
                continue
            connection = TransferSocket(connected, time.monotonic() + OPEN_S)
            thread = threading.Thread(target=self._serve, args=(connection,), name="kv-receive", daemon=True)
            with self._lock:
                self._threads.append(thread)
                self._connections.add(connection)
                thread.start()

    def _serve(self, connection: TransferSocket) -> None:
        opened: _ReservedRoom | None = None
        last: Accepted | TransferRefused = TransferRefused("the target failed")
        try:
            opened = self._open(connection)
            self._take_in(connection, opened)
            last = Accepted(opened.ticket)
        except TransferFailed as error:
            last = TransferRefused((opened.why if opened else "") or str(error))
        finally:
            with self._lock:
                self._connections.discard(connection)
                if opened and isinstance(last, TransferRefused):
                    self._free(self._ledger.abort(opened.ticket), last.reason, read=True)
            connection.close(last)
            self._connection_slots.release()

    def _open(self, connection: TransferSocket) -> _ReservedRoom:
        message = connection.receive()
        if not isinstance(message, Open):
            raise TransferFailed("a transfer must begin with the ticket of its reservation")
        ticket = message.ticket.encode()
        if self._key is not None and not self._key.proves(message.proof, "source", ticket, message.nonce):
            raise TransferFailed("the source does not have this fleet's key")
        with self._lock:
            found = self._ledger.open(message, time.monotonic())
            room = self._rooms[message.ticket]
            room.connection, room.shared = connection, message.shared
            connection.deadline_s = found.deadline_s
        if self._key is not None:
            connection.send(Opened(self._key.proof("target", ticket, message.nonce)))
        return room

    def _take_in(self, connection: TransferSocket, room: _ReservedRoom) -> None:
        while True:
            match message := connection.receive():
                case KvChunk():
                    self._chunk(connection, room, message)
                case Ending():
                    return self._commit(connection, room, message)
                case _:
                    raise TransferFailed(f"unexpected message from a source: {type(message).__name__}")

    def _chunk(self, connection: TransferSocket, room: _ReservedRoom, chunk: KvChunk) -> None:
        with self._lock:
            needed = self._ledger.check(room.ticket, chunk, time.monotonic())
        if not needed:
            if not room.shared:
                connection.fill(memoryview(bytearray(chunk.bytes)))
            return
        view = room.region.memory[chunk.offset : chunk.offset + chunk.bytes]
        if not room.shared:
            connection.fill(view)
        xxh3 = xxhash.xxh3_64_intdigest(view)
        with self._lock:
            self._ledger.mark(room.ticket, chunk, xxh3, time.monotonic())
        if room.progress is not None:
            room.progress.set()

    def _commit(self, connection: TransferSocket, room: _ReservedRoom, ending: Ending) -> None:
        with self._lock:
            made = self._ledger.commit(room.ticket, ending, time.monotonic())
            room.quiet = True
            memory = room.region.memory[: made.need(ending.computed)]
            tokens, link = unpacked(ending.tokens), "shm" if room.shared else connection.kind
            room.arrival.set_result(Arrived(room.ticket, ending.computed, tokens, ending.state, memory, link))
