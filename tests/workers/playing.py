"""A KV transport between two parts of one process."""

from workers.kv_transfer.messages import Remote, TransferFailed


class Playing:
    """The transport. `fault` selects what fails."""

    name = "playing"

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.offered: dict[bytes, memoryview] = {}
        self.open = 0
        self.late: list[memoryview] = []  # withdrawn while a source might still write to it

    def offer(self, memory: memoryview) -> bytes:
        if self.fault == "offer":
            raise TransferFailed("this memory cannot be offered")
        self.offered[key := str(len(self.offered) + 1).encode()] = memory
        return key

    def withdraw(self, memory: memoryview, quiet: bool) -> None:
        self.late += [] if quiet else [memory]
        self.offered = {key: kept for key, kept in self.offered.items() if kept is not memory}

    def remote(self, offer: bytes, deadline_s: float) -> Remote:
        if self.fault == "remote":
            raise TransferFailed("the target's memory cannot be reached")
        self.open += 1
        return Written(self, self.offered[offer])


class Written:
    """Memory that `Playing` writes to."""

    def __init__(self, transport: Playing, memory: memoryview) -> None:
        self._transport = transport
        self._memory = memory
        self._closed = False

    def write(self, offset: int, data: memoryview) -> None:
        if self._transport.fault == "write":
            raise TransferFailed("the network is gone")
        flipped = bytes([data[0] ^ 1]) + bytes(data[1:]) if self._transport.fault == "flip" else data
        self._memory[offset : offset + len(data)] = flipped

    def break_off(self) -> None:
        pass

    def close(self) -> None:
        self._transport.open -= not self._closed
        self._closed = True
