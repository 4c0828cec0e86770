"""Counts the structural elements of a JSON body, a slice at a time, before any object is built.

    bytes ──▶ strings removed ──▶ names, lists and objects, texts, values ──▶ within the limits, or refused

Decoding cannot be interrupted and costs up to a microsecond per value. So a body is refused as soon as a count exceeds its
limit, usually long before all of it has arrived. The scanner does not validate: the parser rejects invalid JSON.
"""

from controller.frontend.settings import AdmissionSettings

UNSCANNED_BYTES = 2**14  # a smaller body takes at most a millisecond to parse, whatever its content
SLICE_BYTES = 2**14  # maximum bytes per call of `feed`: takes under a millisecond
# A body within all of these limits is parsed on the event loop, in 5 ms at most.
CHEAP_BYTES = 2**19
CHEAP_TEXTS = 2**12
CHEAP_NESTED = 2**10
CHEAP_VALUES = 2**15


class BodyScan:
    """The counts of one body so far. 10,000 messages of one part each are within the limits of the settings."""

    __slots__ = ("_backslash", "_in_text", "_limits", "_quotes", "names", "nested", "size", "values")

    def __init__(self, limits: AdmissionSettings) -> None:
        self._limits = limits
        self._backslash = b""  # at the end of a slice: it escapes a character of the next slice
        self._in_text = False
        self._quotes = 0
        self.size = 0
        self.names = 0
        self.nested = 0
        self.values = 0

    @property
    def cheap(self) -> bool:
        """Whether the body can be parsed on the event loop."""
        few = self._quotes <= 2 * CHEAP_TEXTS and self.nested <= CHEAP_NESTED and self.values <= CHEAP_VALUES
        return few and self.size <= CHEAP_BYTES

    def feed(self, piece: bytes) -> str:
        """Count a slice of at most `SLICE_BYTES`. Return the exceeded limit as a phrase; empty if there is none."""
        limits = self._limits
        self.size += len(piece)
        if self._backslash or b"\\" in piece:
            piece = self._without_escapes(self._backslash + piece)
        if quotes := piece.count(b'"'):
            self._quotes += quotes
            if self._quotes > 2 * limits.body_texts_max:
                return f"{limits.body_texts_max} texts and names"
            piece = self._outside(piece.split(b'"'))
        elif self._in_text:
            return ""
        self.names += piece.count(b":")
        self.nested += piece.count(b"[") + piece.count(b"{")
        self.values += piece.count(b",")
        if self.names > limits.body_names_max:
            return f"{limits.body_names_max} names"
        if self.nested > limits.body_lists_max:
            return f"{limits.body_lists_max} lists and objects"
        return f"{limits.body_values_max} values" if self.values > limits.body_values_max else ""

    def _outside(self, parts: list[bytes]) -> bytes:
        """Return the text outside strings, from parts separated by quotation marks."""
        outside = b"".join(parts[self._in_text :: 2])
        self._in_text ^= len(parts) % 2 == 0
        return outside

    def _without_escapes(self, piece: bytes) -> bytes:
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._backslash = b"\\" if piece.endswith(b"\\") else b""
        return piece[: len(piece) - len(self._backslash)]
