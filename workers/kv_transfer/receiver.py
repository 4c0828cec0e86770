"""The target's side of a KV transfer: the memory for sources, and the reception of their chunks.

    /dev/shm/holdfast-kv-INSTANCE/     locked with flock by the instance while it lives
        socket                         where sources on this host connect
        0, 1, 2, …                     one file per region; a name is never reused

A new file costs the kernel a page fault per 4 KiB on either side (measured: 2 to 4 GB/s, against 15 GB/s). Regions are
therefore reused, up to `spare_bytes_max`, but only after their source has finished writing. A slow source of a reservation
that ended must not write into memory in use, so its file is unlinked and not reused.

If there is no such directory, or no space in it, a region is plain memory and its bytes come over the socket.

One thread accepts connections, ends expired reservations and frees memory; each connection has another one. Every wait has a
deadline: that of its reservation, or `OPEN_S` until a source has sent its ticket.
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
from typing import TypeVar, cast

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
# with the prefix and `socket`, a path stays below a Unix socket's 108 bytes
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
CLAIM_TRIES = 5
SPARE_BYTES_MAX = 256 << 20  # kept for the next transfer
SPARES_MAX = 16  # each has a file descriptor
OPEN_S = 2.0
TICK_S = 0.1
STOP_S = 5.0
T = TypeVar("T")


class Region:
    """The memory of one reservation. `path` is empty if only this process can write to it."""

    def __init__(self, mapped: mmap.mmap, path: str = "") -> None:
        """Take ownership of this mapping."""
        self.path = path
        self.size = len(mapped)
        self.memory = memoryview(mapped)
        self._mapped = mapped

    def empty(self) -> None:
        """Return the memory to the kernel, wherever it is still mapped.

        A gigabyte takes 0.1 to 0.3 s. Otherwise the last process that holds the mapping would spend that time.
        """
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # not supported by every file system
                self._mapped.madvise(mmap.MADV_REMOVE)


class Regions:
    """The regions of one instance. Only `take` and `give_back` are thread-safe."""

    def __init__(
        self, instance: str, root: Path | None = ROOT, spare_bytes_max: int = SPARE_BYTES_MAX
    ) -> None:
        """Claim the instance's directory below `root`. Raise RegionTaken if a live process has it, OSError without access."""
        if not NAME.fullmatch(instance):
            raise ValueError(
                f"invalid instance name {instance!r}: expected 1 to 64 letters, digits, dots, dashes, underscores"
            )
        self._spare_bytes_max = spare_bytes_max
        self._spares: list[Region] = []
        self._numbers = itertools.count()
        self._held: int | None = None
        self.folder: Path | None = None
        if root is not None and root.is_dir():
            self.folder = root / f"{PREFIX}{instance}"
            self._held = _claim(self.folder)

    @property
    def socket(self) -> str:
        """Where to listen for sources of this host; empty without a directory."""
        return str(self.folder / "socket") if self.folder else ""

    @property
    def kept(self) -> list[str]:
        """The paths of the regions kept for the next transfer."""
        return [spare.path for spare in self._spares]

    def take(self, size: int) -> Region:
        """Return a region of at least this many bytes. Raise OSError if there is no memory."""
        for spare in sorted(self._spares, key=lambda one: one.size):
            if size <= spare.size <= 2 * size:
                with contextlib.suppress(ValueError):  # another thread was faster
                    self._spares.remove(spare)
                    return spare
        if self.folder is not None and self._held is not None:
            with contextlib.suppress(OSError):  # full, or small as in containers: plain memory works too
                return self._create_region(self.folder / str(next(self._numbers)), size)
        return Region(mmap.mmap(-1, size))

    def _create_region(self, path: Path, size: int) -> Region:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # otherwise a full /dev/shm would cause SIGBUS at the first write
            os.posix_fallocate(held, 0, size)
            return Region(mmap.mmap(held, size), str(path))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(held)
            if self._held is None:  # closed meanwhile, when the directory was not empty
                shutil.rmtree(path.parent, ignore_errors=True)

    def give_back(self, region: Region, quiet: bool) -> Region | None:
        """Free a region. Return it if it is not kept, so that the caller empties it.

        `quiet`: its source writes no more, and nothing here reads it.
        """
        kept = sum(one.size for one in self._spares)
        if quiet and region.path and kept + region.size <= self._spare_bytes_max and self._held is not None:
            self._spares.append(region)
            if len(self._spares) <= SPARES_MAX:
                return None
            region = self._spares.pop(0)
        if region.path:
            Path(region.path).unlink(missing_ok=True)
        return region

    def close(self) -> None:
        """Unlink everything. Regions that are still mapped remain as memory until they are unmapped."""
        self._spares.clear()
        held, self._held = self._held, None  # first, because another thread may close at the same time
        if self.folder is not None and held is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(held)


def _claim(folder: Path) -> int:
    """Create the directory and lock it. If a sweep removes it between the two, try again."""
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
    """Lock a directory without waiting; return None if a live process holds it."""
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
    """Remove the directories of dead instances, and return their names. The kernel releases a dead owner's lock."""
    found = sorted(root.glob(f"{PREFIX}*")) if root.is_dir() else []
    return [folder.name.removeprefix(PREFIX) for folder in found if _sweep(folder)]


class ArrivalProgress:
    """A flag of the running loop: more of a transfer has arrived. The receiver's threads set it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()

    def set(self) -> None:
        """Set the flag, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._more.set)

    def settled(self, _: object) -> None:
        """Set the flag, on the loop, once the transfer is over."""
        self._more.set()

    async def wait(self) -> None:
        """Wait until the flag is set."""
        await self._more.wait()

    def clear(self) -> None:
        """Clear the flag."""
        self._more.clear()


@dataclass(frozen=True, slots=True)
class Arrived:
    """A committed transfer. `memory` holds the blocks in order and belongs to the engine until it calls `release`."""

    ticket: str
    computed: int  # number of tokens with their KV in the blocks
    tokens: list[int]
    state: bytes
    memory: memoryview
    link: str = ""  # how the bytes came: shm, unix, tcp


@dataclass(slots=True)
class _ReservedRoom:
    """The memory region, connection and progress of a live reservation. The ledger has the reservation's limits and deadline."""

    ticket: str
    region: Region
    arrival: "Future[Arrived | TransferRefused]"
    connection: TransferSocket | None = None
    shared: bool = False  # its source writes into the region itself
    quiet: bool = False  # the source has finished writing; it may have begun before its Open is read
    why: str = ""  # the reason why the reservation ended
    progress: ArrivalProgress | None = None


class Receiver:
    """Receives transfers from sources. All methods may be called from any thread; `reserve` may take 0.3 s per gigabyte."""

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
        """Accept blocks of these descriptions, one of each shard. Raise OSError if the address cannot be bound.

        Listens on this address, and on a Unix socket for the own host. Sources connect to `advertise` (by default `host`).
        Sources that also have `transport` write through it. `key`: the fleet key, which sources must know too.
        """
        policy = policy or ReservationPolicy()
        self.regions = regions
        self._transport = transport
        self._key = key
        self._ledger = TransferReservations(own, policy)
        self._rooms: dict[str, _ReservedRoom] = {}
        self._lock = threading.RLock()  # reentrant: a waiter may call back when its arrival is settled
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
        """Number of reservations that still hold resources."""
        with self._lock:
            return max(len(self._ledger), len(self._rooms))

    def reserve(
        self, description: Description, blocks: int, tokens: Sequence[int] = (), first_block: int = 0
    ) -> Grant | TransferRefused:
        """Reserve blocks, starting at `first_block` of the sequence, for a request with these tokens so far; or refuse.

        No byte has moved yet.
        """
        with self._lock:
            self._expire()
            made = self._ledger.reserve(description, blocks, tokens, time.monotonic(), first_block)
        if isinstance(made, TransferRefused):
            return made
        try:
            region = self.regions.take(made.size)
        except OSError as error:
            with self._lock:
                self._ledger.abort(made.ticket)
            return TransferRefused(f"no room: {error}")
        try:
            offer = self._transport.offer(region.memory) if self._transport is not None else b""
        except TransferFailed:  # without an offer, sources send over the socket
            offer = b""
        with self._lock:
            if self._stopped.is_set() or self._ledger.get(made.ticket) is None:
                self._withdraw(region, quiet=True)
                self._give_back(region, quiet=True)
                return TransferRefused("the reservation's deadline has passed")
            self._rooms[made.ticket] = room = _ReservedRoom(made.ticket, region, Future())
            room.arrival.set_running_or_notify_cancel()  # not cancellable: it completes even if its waiter has gone
        left_s = made.deadline_s - time.monotonic()
        return Grant(
            made.ticket, self.endpoint, made.size, left_s, description, region.path, made.first_block, offer
        )

    def arrival(self, ticket: str) -> "Future[Arrived | TransferRefused]":
        """Return the future result of a reservation. It always completes, soon after the deadline at the latest."""
        with self._lock:
            if (room := self._rooms.get(ticket)) is not None:
                return room.arrival
        gone: Future[Arrived | TransferRefused] = Future()
        gone.set_result(TransferRefused("the reservation does not exist, or has ended"))
        return gone

    def received(self, ticket: str) -> memoryview:
        """Return the verified bytes so far, without a gap from the first block: an engine may already take them."""
        with self._lock:
            found, room = self._ledger.get(ticket), self._rooms.get(ticket)
            return room.region.memory[: found.coverage.prefix] if found and room else memoryview(b"")

    def watch(self, ticket: str, progress: ArrivalProgress) -> None:
        """Set `progress`, in the transfer's thread, whenever more bytes are verified; earlier bytes do not count."""
        with self._lock:
            if (room := self._rooms.get(ticket)) is not None:
                room.progress = progress

    def abort(self, ticket: str, why: str = "the target aborted the transfer") -> None:
        """End a reservation in any state and free its memory. Does nothing if it has already ended."""
        with self._lock:
            self._free(self._ledger.abort(ticket), why, read=True)

    def release(self, ticket: str) -> None:
        """Free a committed reservation: the engine has taken its bytes and no longer reads its memory."""
        with self._lock:
            self._free(self._ledger.abort(ticket), "the target has released the reservation", read=False)

    def close(self, within_s: float = STOP_S) -> None:
        """End everything, and wait for the threads for up to this many seconds."""
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
        """Free the resources of a reservation that the ledger has ended. `read`: its memory may still be read."""
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
        """Return the memory of ended reservations to the kernel; not under the lock, for which an event loop may wait."""
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
            except OSError:  # out of file descriptors: one may be freed soon
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
            found = _or_fail(self._ledger.open(message, time.monotonic()))
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
            needed = _or_fail(self._ledger.check(room.ticket, chunk, time.monotonic()))
        if not needed:
            if not room.shared:
                connection.fill(memoryview(bytearray(chunk.bytes)))
            return
        view = room.region.memory[chunk.offset : chunk.offset + chunk.bytes]
        if not room.shared:
            connection.fill(view)
        xxh3 = xxhash.xxh3_64_intdigest(view)
        with self._lock:
            _or_fail(self._ledger.mark(room.ticket, chunk, xxh3, time.monotonic()))
        if room.progress is not None:
            room.progress.set()

    def _commit(self, connection: TransferSocket, room: _ReservedRoom, ending: Ending) -> None:
        with self._lock:
            made = _or_fail(self._ledger.commit(room.ticket, ending, time.monotonic()))
            room.quiet = True
            memory = room.region.memory[: made.need(ending.computed)]
            tokens, link = unpacked(ending.tokens), "shm" if room.shared else connection.kind
            room.arrival.set_result(Arrived(room.ticket, ending.computed, tokens, ending.state, memory, link))


def _or_fail(found: "T | TransferRefused | None") -> "T":
    if isinstance(found, TransferRefused):
        raise TransferFailed(found.reason)
    return cast(T, found)
