"""Decompression returns the original body or refuses it, and never exceeds its limit."""

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.frontend.openai.intake import DecompressedTooLarge, inflated


def bare(data: bytes) -> bytes:
    """Return data in the format that many clients call deflate."""
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


@given(st.binary(max_size=100), st.integers(1, 9000), st.integers(1, 3))
def test_the_original_data_is_returned(data: bytes, times: int, files: int) -> None:
    data *= times
    for encoding, packed in (("gzip", gzip.compress(data)), ("deflate", zlib.compress(data))):
        assert inflated(packed, encoding, len(data)) == data
        if data:
            with pytest.raises(DecompressedTooLarge):
                inflated(packed, encoding, len(data) - 1)
    assert inflated(gzip.compress(data) * files, "gzip", files * len(data)) == data * files
    if (packed := bare(data))[0] & 0xF != 8:
        assert inflated(packed, "deflate", len(data)) == data


@given(st.binary(min_size=1, max_size=300), st.data())
def test_truncated_data_is_refused(data: bytes, draw: st.DataObject) -> None:
    packed = gzip.compress(data)
    cut = packed[: draw.draw(st.integers(1, len(packed) - 1))]
    with pytest.raises((ValueError, DecompressedTooLarge)):
        inflated(cut, "gzip", 10**6)


@pytest.mark.slow
@pytest.mark.parametrize("lies", [True, False])
def test_a_decompression_bomb_costs_no_more_than_the_limit(lies: bool) -> None:
    packed = gzip.compress(bytes(200 * 2**20), 9)
    if lies:
        packed = packed[:-4] + bytes(4)
    tracemalloc.start()
    try:
        with pytest.raises(DecompressedTooLarge):
            inflated(packed, "gzip", 2**20)
        assert tracemalloc.get_traced_memory()[1] < 2 * 2**20 + len(packed)
    finally:
        tracemalloc.stop()
