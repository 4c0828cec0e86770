"""Transfers KV caches with NIXL, over RDMA, NVLink or any other link that UCX finds between two hosts.

This is the only module that uses NIXL, an optional dependency (extra `[nixl]`). The library has these pitfalls:

- A NIXL agent serves one thread at a time, and no thread may wait for another thread's transfer.
- Memory must be registered with NIXL at the source and at the target. The source copies data into a registered buffer first.
- The state of a transfer must be polled.
- An aborted transfer continues for a while: UCX, the library below NIXL, still reads the source's buffer. Over TCP, UCX also
  writes late bytes into the target's memory, even after that memory was deregistered. If the target had unmapped the memory,
  its process would crash.
"""

import threading
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np

from events.errors import UsageError
from workers.kv_transfer.ledger import CHUNK_BYTES
from workers.kv_transfer.messages import TransferFailed

POLL_S = 50e-6
STILL_WRITABLE_MAX = 256  # limits the number of open file descriptors, one for each region


class NoNixl(UsageError):
    """KV transfers over NIXL need the extra: pip install -e '.[nixl]'."""


class _Offer(msgspec.Struct, array_like=True, frozen=True):
    agent: bytes  # NIXL's own description of the target's agent and its registered memory
    address: int  # of the offered memory in the target's process


class Nixl:
    """The `Transport` that uses NIXL, with one NIXL agent for the process."""

    name = "nixl"

    def __init__(self, worker: str) -> None:
        """Start a NIXL agent with the name `worker`. Loading NIXL takes seconds. Raise NoNixl if NIXL is not installed."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise NoNixl(f"{error}. {NoNixl.__doc__}") from error
        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self._agent: Any = nixl_agent(worker, nixl_agent_config(sync_mode=strict))
        self._registered: dict[int, object] = {}  # NIXL's registrations by the address of their memory
        # Memory of ended reservations that a source may still write to, oldest first. The oldest is unmapped when more than
        # STILL_WRITABLE_MAX are kept, because its source has had enough time to end.
        self._still_writable: deque[memoryview] = deque(maxlen=STILL_WRITABLE_MAX)
        self.unfinished: list[NixlRemote] = []  # aborted transfers that may still read their buffers
        self.lock = threading.RLock()  # held around every call of the library, also by `NixlRemote`

    def offer(self, memory: memoryview) -> bytes:
        """Register memory so that sources can write into it; return the encoded offer. Raise TransferFailed if NIXL fails."""
        address = _address(memory)
        with self.lock, _failing():
            self._registered[address] = self.register(address, len(memory))
            return msgspec.msgpack.encode(_Offer(self._agent.get_agent_metadata(), address))

    def withdraw(self, memory: memoryview, quiet: bool) -> None:
        if not quiet:  # keep the address allocated; the receiver frees the memory itself
            self._still_writable.append(memory)
        with self.lock, _failing():
            if (registered := self._registered.pop(_address(memory), None)) is not None:
                self.deregister(registered)

    def remote(self, offer: bytes, deadline_s: float) -> "NixlRemote":
        """Return write access to the memory that a target offers, until `deadline_s` (time.monotonic).

        Raise TransferFailed if the offer is invalid or NIXL fails.
        """
        try:
            known = msgspec.msgpack.decode(offer, type=_Offer)
        except msgspec.MsgspecError as error:
            raise TransferFailed(f"the target's memory offer is not a NIXL offer: {error}") from error
        with self.lock, _failing():
            self.unfinished = [one for one in self.unfinished if not self._deregister_if_over(one)]
            peer = self._agent.add_remote_agent(known.agent)
        return NixlRemote(self, peer, known.address, deadline_s)

    def _deregister_if_over(self, remote: "NixlRemote") -> bool:
        """Deregister the buffer of an aborted transfer if the transfer has ended; return False if it is still running."""
        if self.state(remote.handle) == "PROC":
            return False
        self.deregister(remote.registered)
        return True

    def register(self, address: int, size: int) -> object:
        """Register memory, so that NIXL can read and write it, and return the registration. Raise NIXL's errors unchanged."""
        return self._agent.register_memory([(address, size, 0, "")], mem_type="DRAM")

    def deregister(self, registered: object) -> None:
        """End a registration that `register` returned."""
        self._agent.deregister_memory(registered)

    def give_up(self, remote: "NixlRemote") -> None:
        """Keep the buffer of `remote` registered, because the aborted transfer from it is still running.

        A later call of `Nixl.remote` deregisters the buffer once the transfer has ended.
        """
        self.unfinished.append(remote)

    def begin_write(self, source: int, peer: object, target: int, size: int) -> object:
        """Start to write `size` bytes from the address `source` to the address `target` of the agent `peer`.

        Return the handle of the transfer. Raise TransferFailed if NIXL fails.
        """
        with self.lock, _failing():
            ours = self._agent.get_xfer_descs([(source, size, 0)], mem_type="DRAM")
            theirs = self._agent.get_xfer_descs([(target, size, 0)], mem_type="DRAM")
            handle = self._agent.initialize_xfer("WRITE", ours, theirs, peer)
            self._agent.transfer(handle)
            return handle

    def state(self, handle: object) -> str:
        """Return the state of a transfer: PROC (running), DONE or ERR. Release the transfer if it is over."""
        with self.lock:
            try:
                state: str = self._agent.check_xfer_state(handle)
            except Exception:  # for example a disconnected peer
                state = "ERR"
            if state != "PROC":
                with _failing():
                    self._agent.release_xfer_handle(handle)
            return state


class NixlRemote:
    """The `Remote` that uses NIXL. NIXL writes to another agent's memory, from a registered buffer of this process."""

    def __init__(self, nixl: Nixl, peer: object, address: int, deadline_s: float) -> None:
        """Prepare to write to memory of the agent `peer` that starts at `address`, until `deadline_s` (time.monotonic)."""
        self._nixl = nixl
        self._peer = peer
        self._address = address
        self._deadline_s = deadline_s
        self._buffer = np.empty(CHUNK_BYTES, np.uint8)
        self._own = self._buffer.ctypes.data
        self._broken = False
        self._lock = threading.Lock()
        self.handle: object = None  # of the running transfer
        with nixl.lock, _failing():
            self.registered: object = nixl.register(self._own, CHUNK_BYTES)

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at this offset of the region, and return when all of it has arrived.

        Raise TransferFailed if the transfer fails or the deadline passes first.
        """
        with self._lock:
            if self.registered is None or self.handle is not None:
                raise TransferFailed("the transfer is not open")
            self._buffer[: len(data)] = np.frombuffer(data, np.uint8)
            self.handle = self._nixl.begin_write(self._own, self._peer, self._address + offset, len(data))
            while (state := self._nixl.state(self.handle)) == "PROC":
                if self._broken or time.monotonic() > self._deadline_s:
                    raise TransferFailed("the NIXL transfer did not finish in time")
                time.sleep(POLL_S)
            self.handle = None
            if state != "DONE":
                raise TransferFailed("the NIXL transfer failed")

    def break_off(self) -> None:
        self._broken = True

    def close(self) -> None:
        # the agent's lock too, because deregistering calls the library
        with self._lock, self._nixl.lock, _failing():
            registered, self.registered = self.registered, None
            if registered is None:
                return
            if self.handle is not None:
                self.registered = registered
                self._nixl.give_up(self)
            else:
                self._nixl.deregister(registered)


class _failing:
    """Context manager that converts any error of NIXL into TransferFailed. NIXL's errors have no common base class."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, TransferFailed):
            raise TransferFailed(f"NIXL: {type(error).__name__}: {error}") from error


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
