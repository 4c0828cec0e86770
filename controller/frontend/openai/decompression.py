"""A compressed body, as far as it is wanted: a megabyte of gzip may say a gigabyte."""

import zlib

PIECE_BYTES = 2**18  # at once: other threads have their turn in between
RATIO_MAX = 1032  # of deflate: 258 bytes take two bits
SMALL_BYTES = 2**18  # what comes out of a small one: a millisecond
_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class InflatesTooFar(Exception):
    """More comes out of a body than may."""


def inflated(data: bytes, encoding: str, most: int) -> bytes:
    """Return what a body says that is compressed by gzip, or by deflate with or without zlib's frame, and never make more of
    it than `most` bytes. Raise InflatesTooFar; ValueError if nobody can read it."""
    if encoding not in _WINDOW:
        raise ValueError(f"it is compressed by {encoding[:40]!r}: send it as it is, or by gzip or deflate")
    bare = encoding == "deflate" and data[:1] and data[0] & 0xF != 8  # many send it without its frame
    window = -zlib.MAX_WBITS if bare else _WINDOW[encoding]
    if window > zlib.MAX_WBITS and most < int.from_bytes(data[-4:], "little") <= RATIO_MAX * len(data):
        raise InflatesTooFar  # gzip's last word is how much it says (RFC 1952 §2.3.1), where that is possible
    found: list[bytes] = []
    left, stream = most, zlib.decompressobj(window)
    try:
        while data:
            piece = stream.decompress(data, PIECE_BYTES)
            found.append(piece)
            left -= len(piece)
            if left < 0:
                raise InflatesTooFar
            data = stream.unused_data if stream.eof else stream.unconsumed_tail
            if stream.eof and data:
                stream = zlib.decompressobj(window)  # files of gzip may follow one another
        found.append(stream.flush())
    except zlib.error as error:
        raise ValueError(f"its {encoding} cannot be read: {error}") from error
    if found and not stream.eof:
        raise ValueError(f"its {encoding} ends too early")
    return b"".join(found)
