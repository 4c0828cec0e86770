"""Which bytes of a region have arrived and were verified?

Chunks may come in any order and more than once. The intervals of what is there are kept merged: chunks that come in
order leave one interval, however many they are.
"""

from bisect import bisect_right

from workers.kv_transfer.messages import KvChunk

CHUNK_BYTES = 1 << 21  # measured with a source of two threads: 1 MiB and 4 MiB are a tenth slower
CHUNK_BYTES_MAX = 1 << 22
CHUNKS_MAX = 1 << 16


class Coverage:
    """The verified chunks of one reservation."""

    def __init__(self, size: int) -> None:
        """Expect chunks within this many bytes."""
        self.size = size
        self.bytes = 0
        self._chunks: dict[int, KvChunk] = {}
        self._begins: list[int] = []
        self._ends: list[int] = []

    @property
    def count(self) -> int:
        """How many different chunks there are."""
        return len(self._chunks)

    @property
    def prefix(self) -> int:
        """How many bytes there are without a gap, from the first."""
        return self._ends[0] if self._begins and self._begins[0] == 0 else 0

    def repeated(self, chunk: KvChunk) -> bool:
        """Say whether exactly this chunk is marked already."""
        return self._chunks.get(chunk.number) == chunk

    def objection(self, chunk: KvChunk) -> str:
        """Say why a chunk that is no repetition cannot be taken; empty if it can."""
        where = f"chunk {chunk.number}"
        if chunk.number in self._chunks:
            return f"{where} came twice, and differed"
        if not 0 <= chunk.number < CHUNKS_MAX:
            return f"{where} is not between 0 and {CHUNKS_MAX - 1}"
        if not 0 < chunk.bytes <= CHUNK_BYTES_MAX:
            return f"{where} has {chunk.bytes} bytes, not 1 to {CHUNK_BYTES_MAX}"
        end = chunk.offset + chunk.bytes
        if chunk.offset < 0 or end > self.size:
            return f"{where} lies beyond the region: bytes {chunk.offset} to {end} of {self.size}"
        after = bisect_right(self._begins, chunk.offset)
        if (after and self._ends[after - 1] > chunk.offset) or (
            after < len(self._begins) and self._begins[after] < end
        ):
            return f"{where} overlaps another"
        return ""

    def mark(self, chunk: KvChunk) -> None:
        """Note a chunk to which there is no objection."""
        begin, end = chunk.offset, chunk.offset + chunk.bytes
        self._chunks[chunk.number] = chunk
        self.bytes += chunk.bytes
        after = bisect_right(self._begins, begin)
        if after < len(self._begins) and self._begins[after] == end:
            self._begins[after] = begin
        else:
            self._begins.insert(after, begin)
            self._ends.insert(after, end)
        if after and self._ends[after - 1] == begin:
            self._ends[after - 1] = self._ends[after]
            del self._begins[after], self._ends[after]
