"""A process returns memory while it has much more than its minimum, less often if that frees little."""

from controller.processes.collector import HeapTrim, resident_bytes, trim_heap

MB = 2**20


class Heap:
    """A simulated process with some free memory."""

    def __init__(self) -> None:
        self.resident = 100 * MB
        self.free = 0
        self.trims: list[float] = []
        self.now = 0.0
        self.trim = HeapTrim(lambda: self.resident, self._give_back)

    def _give_back(self) -> None:
        self.trims.append(self.now)
        self.resident -= self.free
        self.free = 0

    async def passes(self, seconds: int) -> list[float]:
        """Return the times at which memory was returned."""
        before = len(self.trims)
        for _ in range(seconds):
            self.now += 1
            await self.trim.look(self.now)
        return self.trims[before:]


async def test_freed_memory_is_returned_soon() -> None:
    heap = Heap()
    assert not await heap.passes(60)
    heap.resident += 1000 * MB  # in use
    assert len(await heap.passes(120)) <= 10, "it is tried now and then"
    heap.free = 1000 * MB
    assert len(await heap.passes(60)) == 1
    assert heap.resident == 100 * MB
    assert not await heap.passes(60)


async def test_a_process_that_grows_again_is_checked_soon() -> None:
    heap = Heap()
    heap.resident += 100 * MB
    await heap.passes(200)
    heap.resident += 100 * MB
    heap.free = 100 * MB
    assert await heap.passes(5) and heap.resident == 200 * MB


def test_a_process_knows_its_resident_size() -> None:
    trim_heap()
    assert resident_bytes() == 0 or resident_bytes() > MB
