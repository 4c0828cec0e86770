"""A text that arrives in pieces, and the read operations of which the output parsers consist.

Each read operation is a generator. It yields when it needs more text, and returns when it is done or the text has
ended. What it consumes depends only on the text, not on the pieces. A read operation that waits for more text leaves at
most a marker's length unread; `text_until` and `match` leave at most `limit` characters. So the time to append a piece
does not grow with the text.
"""

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], object]

SPACE_MAX = 1000  # white space that one read skips; more is unexpected text


class Markers:
    """A set of literal strings to find in a text that is still growing.

    A marker may end with another marker, but must not contain one anywhere else. If it did, the result would depend on
    the pieces in which the text arrives.
    """

    def __init__(self, markers: Sequence[str]) -> None:
        """Compile the markers. Empty ones are ignored."""
        markers = [marker for marker in markers if marker]
        longest_first = sorted(set(markers), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {marker[:end] for marker in markers for end in range(1, len(marker))}
        self._first = {marker[0] for marker in markers}
        self._hold_max = max(map(len, markers), default=1) - 1

    def beginning_at(self, text: str, start: int) -> int:
        """Return the index of the longest suffix of `text` that is the beginning of a marker.

        Return len(text) if there is none. The text before `start` is not searched.
        """
        start = max(start, len(text) - self._hold_max)
        if self._first.isdisjoint(text[start:]):
            return len(text)
        return next((at for at in range(start, len(text)) if text[at:] in self._beginnings), len(text))


@lru_cache(maxsize=512)
def markers_of(*markers: str) -> Markers:
    """Return these markers as a `Markers` object, from a cache."""
    return Markers(markers)


class TextSource:
    """A growing text and the position up to which it has been read. Optionally records what is read."""

    def __init__(self) -> None:
        """Start with no text."""
        self._text = ""
        self._at = 0
        self._recorded: list[str] | None = None
        self.recorded = 0  # characters recorded
        self.ended = False  # whether no more text will come

    def feed(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def record(self, before: str = "") -> None:
        """Start to record the text that is read, in case it turns out to be content.

        The record begins with the text `before`.
        """
        self._recorded = [before]
        self.recorded = len(before)

    def take_recorded(self) -> str:
        """Return the recorded text, and stop recording."""
        text = "".join(self._recorded or ())
        self._recorded, self.recorded = None, 0
        return text

    def _take(self, end: int) -> str:
        piece = self._text[self._at : end]
        self._at = end
        if self._recorded is not None:
            self._recorded.append(piece)
            self.recorded += len(piece)
        return piece

    def take(self, count: int) -> str:
        """Consume and return the next `count` characters. They must have arrived already."""
        return self._take(min(self._at + count, len(self._text)))

    def take_scanned(self, scan: Callable[[str, int, int], int], limit: int | None) -> str:
        """Consume and return the part of the unread text that `scan` accepts, at most `limit` characters.

        `scan` receives the text and the indexes of the start and the end, and returns the index at which it stopped.
        """
        end = len(self._text) if limit is None else min(len(self._text), self._at + limit)
        return self._take(scan(self._text, self._at, end))

    def peek(self) -> Steps[str]:
        """Return the next character without consuming it, or "" at the end of the text."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def peek_visible(self, emit: Emit | None = None) -> Steps[str]:
        """Skip white space, and return the next character without consuming it.

        Return "" at the end of the text. At most SPACE_MAX characters of white space are skipped; they are passed to
        `emit`.
        """
        for _ in range(SPACE_MAX):
            char = yield from self.peek()
            if not char.isspace():
                return char
            self._take(self._at + 1)
            if emit:
                emit(char)
        return (yield from self.peek())

    def take_if(self, literal: str) -> Steps[bool]:
        """Consume this literal if it comes next. Return whether it does."""
        while True:
            found = self._text[self._at : self._at + len(literal)]
            if found == literal:
                self._take(self._at + len(literal))
                return True
            if self.ended or not literal.startswith(found):
                return False
            yield

    def copy_until(self, markers: Markers, emit: Emit) -> Steps[str]:
        """Pass text to `emit` up to the first marker. Consume the marker and return it.

        If the text ends without a marker, return "".
        """
        while True:
            if found := markers.pattern.search(self._text, self._at):
                if found.start() > self._at:
                    emit(self._take(found.start()))
                return self._take(found.end())
            end = len(self._text) if self.ended else markers.beginning_at(self._text, self._at)
            if end > self._at:
                emit(self._take(end))
            if self.ended:
                return ""
            yield

    def text_until(self, markers: Markers, limit: int) -> Steps[tuple[str, str] | None]:
        """Consume and return a short text and the marker after it.

        Consume nothing and return None if there is no marker within `limit` characters.
        """
        while True:
            if found := markers.pattern.search(self._text, self._at, self._at + limit):
                return self._take(found.start()), self._take(found.end())
            if self.ended or len(self._text) - self._at >= limit:
                return None
            yield

    def match(self, pattern: re.Pattern[str], limit: int) -> Steps[str | None]:
        """Consume and return the text that matches the pattern here, within the next `limit` characters.

        Consume nothing and return None if the text does not match. The pattern must end with a delimiter, so that more
        text cannot make its match longer.
        """
        while True:
            if found := pattern.match(self._text, self._at, self._at + limit):
                return self._take(found.end())
            if self.ended or len(self._text) - self._at >= limit:
                return None
            yield

    def take_while(self, chars: re.Pattern[str], limit: int) -> Steps[str]:
        """Consume and return the next characters while each of them matches `chars`, at most `limit` characters."""
        taken = ""
        while len(taken) < limit:
            char = yield from self.peek()
            if not char or not chars.match(char):
                break
            taken += self._take(self._at + 1)
        return taken
