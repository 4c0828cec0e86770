"""The target's side of a KV transfer: the memory that sources write into, and what receives their chunks.

    /dev/shm/holdfast-kv-INSTANCE/     held with flock by the instance, for as long as it lives
        socket                         where sources on this host connect
        0, 1, 2, …                     one file a region; a name is never used twice

A new file costs the kernel a page fault for every 4 KiB on either side (measured: 2 to 4 GB/s, against 15 GB/s), so
that regions are used again, up to `spare_bytes_max`. Only those whose source has ended its writes: a slow
source of a reservation that ended must not write into memory in use, and so its file is unlinked and forgotten.

Where there is no such folder, or no room in it, a region is plain memory and its bytes come over the socket.

One thread accepts, ends what is over its time, and gives memory back; one more serves each connection. Every wait has
a deadline: that of its reservation, or before a source has sent its ticket, `OPEN_S`.
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
    unpacked,
)
from workers.kv_transfer.transport import Transport
from workers.listening import listening

ROOT = Path("/dev/shm")
PREFIX = "holdfast-kv-"
NAME = re.compile(
    r"[A-Za-z0-9._-]{1,64}"
)  # with the prefix and `socket` it stays below a Unix socket's 108 bytes
TRIALS = 5
SPARE_BYTES_MAX = 256 << 20  # kept for the next transfer
SPARES_MAX = 16  # each has a file descriptor
OPEN_S = 2.0
TICK_S = 0.1
STOP_S = 5.0
T = TypeVar("T")


class Region:
    """Memory of one reservation. `path` is empty where only this process can write to it."""

    def __init__(self, mapped: mmap.mmap, path: str = "") -> None:
        """Own this mapping."""
        self.path = path
        self.size = len(mapped)
        self.memory = memoryview(mapped)
        self._mapped = mapped

    def empty(self) -> None:
        """Give the memory back to the kernel, wherever it is still mapped. A gigabyte takes 0.1 to 0.3 s, which would else
        be spent by its last holder."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # not every file system can
                self._mapped.madvise(mmap.MADV_REMOVE)


class Regions:
    """The regions of one instance. Not thread-safe but for `take` and `give_back`, which any thread may call."""

    def __init__(
        self, instance: str, root: Path | None = ROOT, spare_bytes_max: int = SPARE_BYTES_MAX
    ) -> None:
        """Claim the instance's folder below `root`. Raise RegionTaken if a live process has it, OSError without access."""
        if not NAME.fullmatch(instance):
            raise ValueError(f"an instance's name has 1 to 64 letters, digits, dots, dashes: {instance!r}")
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
        """Where to listen for sources of this host; empty without a folder."""
        return str(self.folder / "socket") if self.folder else ""

    @property
    def kept(self) -> list[str]:
        """The paths of the regions that are kept for the next transfer."""
        return [spare.path for spare in self._spares]

    def take(self, size: int) -> Region:
        """Return a region of at least this many bytes. Raise OSError if there is no memory."""
        for spare in sorted(self._spares, key=lambda one: one.size):
            if size <= spare.size <= 2 * size:
                with contextlib.suppress(ValueError):  # another thread was faster
                    self._spares.remove(spare)
                    return spare
        if self.folder is not None and self._held is not None:
            with contextlib.suppress(
                OSError
            ):  # full, or as small as containers have it: plain memory does too
                return self._made(self.folder / str(next(self._numbers)), size)
        return Region(mmap.mmap(-1, size))

    def _made(self, path: Path, size: int) -> Region:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(held, 0, size)  # else a full /dev/shm is a SIGBUS at the first write
            return Region(mmap.mmap(held, size), str(path))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(held)
            if self._held is None:  # closed meanwhile: the folder was not empty then
                shutil.rmtree(path.parent, ignore_errors=True)

    def give_back(self, region: Region, quiet: bool) -> Region | None:
        """Free a region. `quiet`: its source writes no more, and nothing here reads it. Return one that is not kept, for
        the caller to empty."""
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
        """Unlink everything. Regions that are mapped somewhere live on as memory until they are not."""
        self._spares.clear()
        held, self._held = self._held, None  # first: another thread may close at the same time
        if self.folder is not None and held is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(held)


def _claim(folder: Path) -> int:
    """Make the folder and hold it. A sweep may remove it between the two: then try again."""
    for _ in range(TRIALS):
        _sweep(folder)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            break
        held = _hold(folder)
        if held is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(held), folder.stat()):
                    return held
            os.close(held)
    raise RegionTaken(
        f"another live process serves the KV regions in {folder}: every instance needs its own name"
    )


def _hold(folder: Path) -> int | None:
    """Lock a folder without waiting; None if a live process has it."""
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
    if (held := _hold(folder)) is None:
        return False
    try:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    finally:
        os.close(held)


def sweep(root: Path = ROOT) -> list[str]:
    """Remove what dead instances left behind, and return their names. The kernel drops a dead owner's lock."""
    found = sorted(root.glob(f"{PREFIX}*")) if root.is_dir() else []
    return [folder.name.removeprefix(PREFIX) for folder in found if _sweep(folder)]


class ArrivalProgress:
    """A flag of the running loop that more of a transfer has arrived, which the receiver's threads set."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()

    def set(self) -> None:
        """Set it, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._more.set)

    def settled(self, _: object) -> None:
        """Set it, on the loop, once the transfer is over."""
        self._more.set()

    async def wait(self) -> None:
        """Wait until it is set."""
        await self._more.wait()

    def clear(self) -> None:
        """Unset it."""
        self._more.clear()


@dataclass(frozen=True, slots=True)
class Arrived:
    """A committed transfer. `memory` is the blocks in order; it is the engine's until it calls `release`."""

    ticket: str
    computed: int  # tokens whose KV is in the blocks
    tokens: list[int]
    state: bytes
    memory: memoryview
    link: str = ""  # over what they came: shm, unix, tcp


@dataclass(slots=True)
class _ReservedRoom:
    """What belongs to a live reservation besides the ledger's line."""

    ticket: str
    region: Region
    arrival: "Future[Arrived | TransferRefused]"
    line: TransferSocket | None = None
    shared: bool = False  # its source writes into the region itself
    quiet: bool = (
        False  # the source has said that it writes no more; before Open is read it may write already
    )
    why: str = ""  # it ended
    progress: ArrivalProgress | None = None


class Receiver:
    """Listens for sources. All methods may be called from any thread; `reserve` may take 0.3 s a gigabyte."""

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
        """Take in blocks of these descriptions, one of each shard. Listen on this address, and for the own host on a
        Unix socket; sources are told to come to `advertise` (by default `host`). Sources that have this
        transport too write by it. `key`: the fleet's, which sources must know, too. Raise OSError if it cannot."""
        policy = policy or ReservationPolicy()
        self.regions = regions
        self._transport = transport
        self._key = key
        self._ledger = TransferReservations(own, policy)
        self._rooms: dict[str, _ReservedRoom] = {}
        self._lock = threading.RLock()  # a waiter may call back when its arrival is settled
        self._places = threading.BoundedSemaphore(2 * policy.live_max * len(own))
        self._lines: set[TransferSocket] = set()
        self._gone: deque[Region] = deque()
        self._stopped = threading.Event()
        self._listening = [listening(host, port)]
        if regions.socket:
            self._listening.append(unix := socket.socket(socket.AF_UNIX))
            try:
                unix.bind(regions.socket)
                unix.listen()
            except OSError:  # a path of more than 108 bytes
                for one in self._listening:
                    one.close()
                raise
        for one in self._listening:
            one.settimeout(TICK_S)
        self.endpoint = TransferAddress(
            advertise or host, self._listening[0].getsockname()[1], regions.socket
        )
        self._threads = [
            threading.Thread(target=self._accept, args=(one,), name="kv-accept", daemon=True)
            for one in self._listening
        ]
        for thread in self._threads:
            thread.start()

    @property
    def live(self) -> int:
        """How many reservations hold anything yet."""
        with self._lock:
            return max(len(self._ledger), len(self._rooms))

    def reserve(
        self, description: Description, blocks: int, tokens: Sequence[int] = (), first_block: int = 0
    ) -> Grant | TransferRefused:
        """Reserve blocks, from `first_block` of the sequence on, for a request that has these tokens so far, or say
        why not. No byte has moved yet."""
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
        except TransferFailed:  # then they come by another way
            offer = b""
        with self._lock:
            if self._stopped.is_set() or self._ledger.get(made.ticket) is None:
                self._withdraw(region, quiet=True)
                self._give_back(region, quiet=True)
                return TransferRefused("the reservation's time is up")
            self._rooms[made.ticket] = room = _ReservedRoom(made.ticket, region, Future())
            room.arrival.set_running_or_notify_cancel()  # its waiter may go; it is settled all the same
        left_s = made.deadline_s - time.monotonic()
        return Grant(
            made.ticket, self.endpoint, made.size, left_s, description, region.path, made.first_block, offer
        )

    def arrival(self, ticket: str) -> "Future[Arrived | TransferRefused]":
        """Return what becomes of a reservation: it always becomes something, before its deadline is long over."""
        with self._lock:
            if (room := self._rooms.get(ticket)) is not None:
                return room.arrival
        gone: Future[Arrived | TransferRefused] = Future()
        gone.set_result(TransferRefused("there is no such reservation, or no longer"))
        return gone

    def received(self, ticket: str) -> memoryview:
        """Return the verified bytes so far, without a gap from the first block: an engine may take them in already."""
        with self._lock:
            found, room = self._ledger.get(ticket), self._rooms.get(ticket)
            return room.region.memory[: found.coverage.prefix] if found and room else memoryview(b"")

    def watch(self, ticket: str, progress: ArrivalProgress) -> None:
        """Set this, in the transfer's thread, whenever more has been verified; not for what already was."""
        with self._lock:
            if (room := self._rooms.get(ticket)) is not None:
                room.progress = progress

    def abort(self, ticket: str, why: str = "the target gave it up") -> None:
        """End a reservation at any point and free its memory. One that has ended already is left alone."""
        with self._lock:
            self._free(self._ledger.abort(ticket), why, read=True)

    def release(self, ticket: str) -> None:
        """Free a committed reservation: the engine has taken its bytes and reads its memory no more."""
        with self._lock:
            self._free(self._ledger.abort(ticket), "the target has released it", read=False)

    def close(self, within_s: float = STOP_S) -> None:
        """End everything, and wait for the threads, but no longer than this."""
        self._stopped.set()
        with self._lock:
            for ticket in list(self._rooms):
                self._free(self._ledger.abort(ticket), "the target shuts down", read=True)
            for line in self._lines:
                line.break_off(socket.SHUT_RD)
            threads = list(self._threads)
        until = time.monotonic() + within_s
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        for one in self._listening:
            one.close()
        self.regions.close()

    def _free(self, ended: KvReservation | None, why: str, read: bool) -> None:
        """Free what belongs to a reservation that the ledger has ended. `read`: its memory may still be read."""
        room = self._rooms.pop(ended.ticket, None) if ended else None
        if room is None or ended is None:
            return
        room.why = why
        if room.line is not None and ended.ending is None:
            room.line.break_off(socket.SHUT_RD)
        self._withdraw(room.region, room.quiet)
        self._give_back(room.region, room.quiet and not (read and bool(ended.ending)))
        if not room.arrival.done():
            room.arrival.set_result(TransferRefused(why))

    def _give_back(self, region: Region, quiet: bool) -> None:
        if (gone := self.regions.give_back(region, quiet)) is not None:
            self._gone.append(gone)

    def _empty(self) -> None:
        """Give back the memory of what has ended: not under the lock, for which an event loop may wait."""
        with contextlib.suppress(IndexError):
            while True:
                self._gone.popleft().empty()

    def _withdraw(self, region: Region, quiet: bool) -> None:
        if self._transport is not None:
            with contextlib.suppress(TransferFailed):
                self._transport.withdraw(region.memory, quiet)

    def _expire(self) -> None:
        for ended in self._ledger.expire(time.monotonic()):
            self._free(ended, "the reservation's time is up", read=True)

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
            except OSError:  # no descriptor is free: one may be, in a moment
                self._stopped.wait(TICK_S)
                continue
            if not self._places.acquire(blocking=False):
                connected.close()
                continue
            line = TransferSocket(connected, time.monotonic() + OPEN_S)
            thread = threading.Thread(target=self._serve, args=(line,), name="kv-receive", daemon=True)
            with self._lock:
                self._threads.append(thread)
                self._lines.add(line)
                thread.start()

    def _serve(self, line: TransferSocket) -> None:
        opened: _ReservedRoom | None = None
        last: Accepted | TransferRefused = TransferRefused("the target failed")
        try:
            opened = self._opened(line)
            self._take_in(line, opened)
            last = Accepted(opened.ticket)
        except TransferFailed as error:
            last = TransferRefused((opened.why if opened else "") or str(error))
        finally:
            with self._lock:
                self._lines.discard(line)
                if opened and isinstance(last, TransferRefused):
                    self._free(self._ledger.abort(opened.ticket), last.reason, read=True)
            line.close(last)
            self._places.release()

    def _opened(self, line: TransferSocket) -> _ReservedRoom:
        message = line.receive()
        if not isinstance(message, Open):
            raise TransferFailed("a transfer begins with the ticket of its reservation")
        ticket = message.ticket.encode()
        if self._key is not None and not self._key.proves(message.proof, "source", ticket, message.nonce):
            raise TransferFailed("the source does not know the fleet's key, or knows another one")
        with self._lock:
            found = _or_fail(self._ledger.open(message, time.monotonic()))
            room = self._rooms[message.ticket]
            room.line, room.shared = line, message.shared
            line.deadline_s = found.deadline_s
        if self._key is not None:
            line.send(Opened(self._key.proof("target", ticket, message.nonce)))
        return room

    def _take_in(self, line: TransferSocket, room: _ReservedRoom) -> None:
        while True:
            match message := line.receive():
                case KvChunk():
                    self._chunk(line, room, message)
                case Ending():
                    return self._commit(line, room, message)
                case _:
                    raise TransferFailed(f"a source does not say {type(message).__name__}")

    def _chunk(self, line: TransferSocket, room: _ReservedRoom, chunk: KvChunk) -> None:
        with self._lock:
            wanted = _or_fail(self._ledger.check(room.ticket, chunk, time.monotonic()))
        if not wanted:
            if not room.shared:
                line.fill(memoryview(bytearray(chunk.bytes)))
            return
        view = room.region.memory[chunk.offset : chunk.offset + chunk.bytes]
        if not room.shared:
            line.fill(view)
        xxh3 = xxhash.xxh3_64_intdigest(view)
        with self._lock:
            _or_fail(self._ledger.mark(room.ticket, chunk, xxh3, time.monotonic()))
        if room.progress is not None:
            room.progress.set()

    def _commit(self, line: TransferSocket, room: _ReservedRoom, ending: Ending) -> None:
        with self._lock:
            made = _or_fail(self._ledger.commit(room.ticket, ending, time.monotonic()))
            room.quiet = True
            memory = room.region.memory[: made.need(ending.computed)]
            tokens, link = unpacked(ending.tokens), "shm" if room.shared else line.kind
            room.arrival.set_result(Arrived(room.ticket, ending.computed, tokens, ending.state, memory, link))


def _or_fail(found: "T | TransferRefused | None") -> "T":
    if isinstance(found, TransferRefused):
        raise TransferFailed(found.reason)
    return cast(T, found)
