"""Recognises texts that arrive as bytes and may end inside a character.

A token of a byte-level vocabulary may end inside a UTF-8 character. The bytes of the unfinished character are *pending*. They
are checked against the characters that they can still become.

A residual begins at a whole character. So when a request moves, its tokens after the last whole character are dropped, and the
next worker generates them again.
"""

from dataclasses import dataclass

from events.grammar.automaton import DState
from events.grammar.model import LAST
from events.grammar.recogniser import State
from events.grammar.refusals import TextRejected


@dataclass(frozen=True, slots=True)
class Utf8State:
    """The state after some bytes.

    It consists of the recogniser's state after the last whole character, and of the bytes of an unfinished character.
    """

    state: State
    pending: bytes = b""

    @property
    def accepting(self) -> bool:
        """Whether the bytes so far are a text of the grammar."""
        return self.state.accepting and not self.pending

    def advance(self, data: bytes) -> "Utf8State":
        """Return the state after more bytes.

        Raise TextRejected if no text of the grammar continues with these bytes.
        """
        text, pending = split(self.pending + data)
        state = self.state.advance(text)
        if pending and not continues(state, pending):
            raise TextRejected(len(text))
        return Utf8State(state, pending)

    def allowed(self, data: bytes) -> bool:
        """Return whether some text of the grammar continues with these bytes."""
        try:
            text, pending = split(self.pending + data)
            return self.state.allowed(text) and (not pending or continues(self.state.advance(text), pending))
        except TextRejected:
            return False


def split(data: bytes) -> tuple[str, bytes]:
    """Return the whole characters in `data`, and the bytes of an unfinished character at its end.

    Raise TextRejected if the bytes are not UTF-8.
    """
    end = len(data) - unfinished(data)
    try:
        text = data[:end].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise TextRejected(len(data[: error.start].decode("utf-8", "surrogatepass"))) from None
    return text, data[end:]


def unfinished(data: bytes) -> int:
    """Return how many bytes at the end of `data` belong to an unfinished character."""
    for back in range(1, min(4, len(data) + 1)):
        lead = data[-back]
        if lead >= 0xC0:
            return back if _length(lead) > back else 0
        if lead < 0x80:
            return 0
    return 0


def completions(pending: bytes) -> tuple[int, int] | None:
    """Return the first and the last code point with a UTF-8 encoding that begins with these bytes.

    Return None if there is no such code point.
    """
    length = _length(pending[0])
    if length > 4:
        return None
    value = pending[0] & (0x7F >> length)
    for byte in pending[1:]:
        if not 0x80 <= byte < 0xC0:
            return None
        value = value << 6 | byte & 0x3F
    left = 6 * (length - len(pending))
    first = max(value << left, (0x80, 0x800, 0x10000)[length - 2])
    last = min((value << left) | ((1 << left) - 1), LAST)
    return (first, last) if first <= last else None


def _length(lead: int) -> int:
    """Return how many bytes the character with this first byte has.

    Return 5 for a byte of 0xF8 or above, with which no character begins.
    """
    return 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4 if lead < 0xF8 else 5


def continues(state: State, pending: bytes) -> bool:
    """Return whether a character that begins with these bytes may follow in `state`."""
    bounds = completions(pending)
    return bounds is not None and any(reads_between(one, *bounds) for _, one in state.configurations)


def reads_between(state: DState, first: int, last: int) -> bool:
    """Return whether a state can read at least one character with a code point from `first` to `last`, both included."""
    if any(first <= ord(char) <= last for char in state.singles):
        return True
    return any(low <= last and high >= first for group, _ in state.ranges for low, high in group.ranges)
