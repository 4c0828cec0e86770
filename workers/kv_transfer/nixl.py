"""KV transfers over NIXL: RDMA, NVLink or whatever else UCX finds between two hosts. Its one home; the extra `[nixl]`.

What one would get wrong: an agent answers one thread at a time, and nobody may wait for another's transfer; memory must be
registered on both sides, so that what is sent goes through a buffer of our own; the state of a transfer is polled, there is
nothing to wait on. And a transfer that was given up is not over: UCX goes on reading the source's buffer, and over TCP it
writes what still comes to the target's address, registered or not. Memory that was unmapped there would end the process.
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
FORSAKEN_MAX = 256  # each has a file descriptor


class NoNixl(UsageError):
    """KV transfers over NIXL need the extra: pip install -e '.[nixl]'."""


class _Offer(msgspec.Struct, array_like=True, frozen=True):
    agent: bytes  # NIXL's own description of the target and its registered memory
    address: int


class Nixl:
    """A `Transport`: this process's agent."""

    name = "nixl"

    def __init__(self, worker: str) -> None:
        """Start the agent; it takes seconds to load. Raise NoNixl."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise NoNixl(f"{error}. {NoNixl.__doc__}") from error
        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self._agent: Any = nixl_agent(worker, nixl_agent_config(sync_mode=strict))
        self._registered: dict[int, Any] = {}  # by address
        # Addresses that somebody may still write to; who is so late that this many have come since is gone.
        self._forsaken: deque[memoryview] = deque(maxlen=FORSAKEN_MAX)
        self._unfinished: list[NixlRemote] = []  # their buffers may still be read
        self.lock = threading.RLock()  # around every call of the library, by its regions too

    @property
    def unfinished(self) -> int:
        """How many transfers were given up whose buffers may still be read."""
        return len(self._unfinished)

    def offer(self, memory: memoryview) -> bytes:
        """Let sources write into this memory; return how. Raise TransferFailed."""
        address = _address(memory)
        with self.lock, _failing():
            self._registered[address] = self.register(address, len(memory))
            return msgspec.msgpack.encode(_Offer(self._agent.get_agent_metadata(), address))

    def withdraw(self, memory: memoryview, quiet: bool) -> None:
        if not quiet:  # the address stays ours; the receiver gives its memory back
            self._forsaken.append(memory)
        with self.lock, _failing():
            if (registered := self._registered.pop(_address(memory), None)) is not None:
                self.deregister(registered)

    def remote(self, offer: bytes, deadline_s: float) -> "NixlRemote":
        """Return the memory that a target offers. Raise TransferFailed."""
        try:
            known = msgspec.msgpack.decode(offer, type=_Offer)
        except msgspec.MsgspecError as error:
            raise TransferFailed(
                f"the target offers its memory in words that NIXL does not know: {error}"
            ) from error
        with self.lock, _failing():
            self._unfinished = [one for one in self._unfinished if not self._over(one)]
            peer = self._agent.add_remote_agent(known.agent)
        return NixlRemote(self, peer, known.address, deadline_s)

    def _over(self, remote: "NixlRemote") -> bool:
        """Let go of a transfer that was given up, if it has come to its end."""
        if self.state(remote.handle) == "PROC":
            return False
        self.deregister(remote.registered)
        return True

    def register(self, address: int, size: int) -> Any:
        """Let the library write from here, or to here. Raises what it raises."""
        return self._agent.register_memory([(address, size, 0, "")], mem_type="DRAM")

    def deregister(self, registered: Any) -> None:
        """Undo `register`."""
        self._agent.deregister_memory(registered)

    def give_up(self, remote: "NixlRemote") -> None:
        """Deregister a region's buffer later, when its transfer, which goes on, has come to its end."""
        self._unfinished.append(remote)

    def begin_write(self, source: int, peer: Any, target: int, size: int) -> Any:
        """Begin a transfer to this address of that agent, and return its handle. Raise TransferFailed."""
        with self.lock, _failing():
            ours = self._agent.get_xfer_descs([(source, size, 0)], mem_type="DRAM")
            theirs = self._agent.get_xfer_descs([(target, size, 0)], mem_type="DRAM")
            handle = self._agent.initialize_xfer("WRITE", ours, theirs, peer)
            self._agent.transfer(handle)
            return handle

    def state(self, handle: Any) -> str:
        """Return PROC, DONE or ERR, and release what is over."""
        with self.lock:
            try:
                state: str = self._agent.check_xfer_state(handle)
            except Exception:  # a disconnected peer, among others
                state = "ERR"
            if state != "PROC":
                with _failing():
                    self._agent.release_xfer_handle(handle)
            return state


class NixlRemote:
    """A `Remote`: a region of another agent, written through a buffer that is registered here."""

    def __init__(self, nixl: Nixl, peer: Any, address: int, deadline_s: float) -> None:
        """Write at this address of that agent, until `deadline_s` (time.monotonic)."""
        self._nixl = nixl
        self._peer = peer
        self._address = address
        self._deadline_s = deadline_s
        self._buffer = np.empty(CHUNK_BYTES, np.uint8)
        self._own = self._buffer.ctypes.data
        self._broken = False
        self._lock = threading.Lock()
        self.handle: Any = None  # of the transfer under way
        with nixl.lock, _failing():
            self.registered: Any = nixl.register(self._own, CHUNK_BYTES)

    def write(self, offset: int, data: memoryview) -> None:
        """Write there, and return when it has arrived. Raise TransferFailed."""
        with self._lock:
            if self.registered is None or self.handle is not None:
                raise TransferFailed("it is not open")
            self._buffer[: len(data)] = np.frombuffer(data, np.uint8)
            self.handle = self._nixl.begin_write(self._own, self._peer, self._address + offset, len(data))
            while (state := self._nixl.state(self.handle)) == "PROC":
                if self._broken or time.monotonic() > self._deadline_s:
                    raise TransferFailed("NIXL did not get done in time")
                time.sleep(POLL_S)
            self.handle = None
            if state != "DONE":
                raise TransferFailed("NIXL says that a transfer failed")

    def break_off(self) -> None:
        self._broken = True

    def close(self) -> None:
        with (
            self._lock,
            self._nixl.lock,
            _failing(),
        ):  # its agent and its lock are ours too: one library, one state
            registered, self.registered = self.registered, None
            if registered is None:
                return
            if self.handle is not None:
                self.registered = registered
                self._nixl.give_up(self)
            else:
                self._nixl.deregister(registered)


class _failing:
    """Makes what NIXL raises a TransferFailed: it has a dozen classes of errors without a common one."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, TransferFailed):
            raise TransferFailed(f"NIXL: {type(error).__name__}: {error}") from error


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
