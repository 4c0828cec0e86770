"""Where does a request's body end, in the bytes that come? What lies behind it is not the request's.

Only the end is looked for. What the body says, and whether it is well formed, is the business of aiohttp's parser, which reads
the same bytes: a body that it will refuse has no end here.
"""

import re

LINE_MAX = 64  # bytes of a chunk's size or of a trailer that are looked at
_ENDLESS = 2**63
_size = re.compile(rb"[ \t]*([0-9a-fA-F]{1,15})[ \t]*(?:;|$)").match


class BodyEnd:
    """The end of one body, as far as it has come."""

    __slots__ = ("_chunked", "_left", "_line", "_trailers", "whole")

    def __init__(self, length: int, chunked: bool) -> None:
        """Begin with a body of so many bytes, or, if it is `chunked`, with one whose own lines say how many."""
        self.whole = not length and not chunked
        self._chunked = chunked
        self._left = 0 if chunked else length  # of this chunk, and of the line's end behind it
        self._line = b""  # the beginning of a line that has not ended
        self._trailers = False  # the last chunk has been seen

    def take(self, data: bytes) -> int:
        """Return how many of these bytes, which come next, belong to it."""
        at = 0
        while at < len(data) and not self.whole:
            if self._left:
                step = min(self._left, len(data) - at)
                at += step
                self._left -= step
                self.whole = not self._left and not self._chunked
            else:
                at = self._take_line(data, at)
        return at

    def _take_line(self, data: bytes, at: int) -> int:
        end = data.find(b"\n", at) + 1
        self._line = (self._line + data[at : min(end or len(data), at + LINE_MAX)])[:LINE_MAX]
        if not end:
            return len(data)
        line, self._line = self._line.rstrip(b"\r\n"), b""
        if self._trailers:
            self.whole = not line
        elif (found := _size(line)) is None:
            self._left = _ENDLESS
        elif size := int(found[1], 16):
            self._left = size + len(b"\r\n")
        else:
            self._trailers = True
        return end
