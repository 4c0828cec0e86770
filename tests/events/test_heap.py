"""A process returns memory while it has much more than its minimum, less often if that frees little."""

from controller.processes.collector import HeapTrim

MB = 2**20


class Heap(HeapTrim):
    """A simulated process with some free memory."""

    def __init__(self) -> None:
        self.used = 100 * MB
        self.free = 0
        self.trims: list[float] = []
        self.now = 0.0
        super().__init__()

    def resident(self) -> int:
        return self.used

    def trim(self) -> None:
        self.trims.append(self.now)
        self.used -= self.free
        self.free = 0

    async def passes(self, seconds: int) -> list[float]:
        """Return the times at which memory was returned."""
        before = len(self.trims)
        for _ in range(seconds):
            self.now += 1
            await self.look(self.now)
        return self.trims[before:]


async def test_freed_memory_is_returned_soon() -> None:
    heap = Heap()
    assert not await heap.passes(60)
    heap.used += 1000 * MB  # in use
    assert len(await heap.passes(120)) <= 10, "it is tried now and then"
    heap.free = 1000 * MB
    assert len(await heap.passes(60)) == 1
    assert heap.used == 100 * MB
    assert not await heap.passes(60)


async def test_a_process_that_grows_again_is_checked_soon() -> None:
    heap = Heap()
    heap.used += 100 * MB
    await heap.passes(200)
    heap.used += 100 * MB
    heap.free = 100 * MB
    assert await heap.passes(5) and heap.used == 200 * MB


def test_a_process_knows_its_resident_size() -> None:
    heap = HeapTrim()
    heap.trim()
    assert heap.resident() == 0 or heap.resident() > MB
