"""The record of received chunks behaves like a plain set of bytes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.kv_transfer.ledger import CHUNK_BYTES_MAX, CHUNKS_MAX, Coverage
from workers.kv_transfer.messages import KvChunk

SIZE = 12


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, SIZE), st.integers(0, 5)), max_size=20))
def test_chunks_are_recorded_like_a_set_of_bytes(places: list[tuple[int, int]]) -> None:
    coverage, there = Coverage(SIZE), set[int]()
    for number, (offset, size) in enumerate(places):
        chunk = KvChunk("t", number, offset, size, 0)
        wanted = set(range(offset, offset + size))
        fits = bool(wanted) and not wanted & there and wanted <= set(range(SIZE))
        assert (coverage.objection(chunk) == "") == fits
        if fits:
            coverage.mark(chunk)
            there |= wanted
            assert coverage.repeated(chunk) and coverage.objection(chunk)
        assert coverage.bytes == len(there)
        assert coverage.prefix == next(n for n in range(SIZE + 1) if n not in there)


def test_chunks_are_bounded_in_size_and_number() -> None:
    coverage = Coverage(1 << 40)
    assert coverage.objection(KvChunk("t", CHUNKS_MAX - 1, 0, CHUNK_BYTES_MAX, 0)) == ""
    assert "between" in coverage.objection(KvChunk("t", CHUNKS_MAX, 0, 1, 0))
    assert "bytes" in coverage.objection(KvChunk("t", 0, 0, CHUNK_BYTES_MAX + 1, 0))
