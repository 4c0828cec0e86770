"""When a process gives memory back: while it has much more than it once had, and less and less often where that is of no use."""

from events.process.heap import HeapTrim, resident_bytes, trim_heap

MB = 2**20


class Heap:
    """A process of so many megabytes, of which some are free."""

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
        """Return when it gave back in this time."""
        before = len(self.trims)
        for _ in range(seconds):
            self.now += 1
            await self.trim.look(self.now)
        return self.trims[before:]


async def test_what_was_freed_is_given_back_soon_after_it_was() -> None:
    heap = Heap()
    assert not await heap.passes(60)
    heap.resident += 1000 * MB  # in use
    assert len(await heap.passes(120)) <= 10, "it is tried now and then"
    heap.free = 1000 * MB
    assert len(await heap.passes(60)) == 1
    assert heap.resident == 100 * MB
    assert not await heap.passes(60)


async def test_who_grows_again_is_looked_at_soon() -> None:
    heap = Heap()
    heap.resident += 100 * MB
    await heap.passes(200)
    heap.resident += 100 * MB
    heap.free = 100 * MB
    assert await heap.passes(5) and heap.resident == 200 * MB


def test_a_process_knows_what_it_has() -> None:
    trim_heap()
    assert resident_bytes() == 0 or resident_bytes() > MB
