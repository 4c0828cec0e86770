"""From tokens to what is said: text, with the stop strings' window.

A stop string may begin in one token and end in another, on another worker: text that could be its beginning
is held back until it is clear. Nothing of a stop string is ever said.
"""

from collections.abc import Sequence

from controller.frontend.tokens import Detokenizer


class StopWindow:
    """Holds back the end of a text while it could be the beginning of a stop string."""

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Return what may be said now. Unarmed (before `min_tokens`), nothing stops and nothing is held."""
        if not armed:
            return self.rest() + text
        whole = self._held + text
        found = min((at for stop in self._stops if (at := whole.find(stop)) >= 0), default=-1)
        if found >= 0:
            self.stopped, self._held = True, ""
            return whole[:found]
        keep = max(_overlap(whole, stop) for stop in self._stops)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def rest(self) -> str:
        """Return what was held back, once it is clear that no stop string comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper beginning of `stop` with which `text` ends."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class Speech:
    """The text of one answer, as it grows. `tokens` counts those that were fed."""

    __slots__ = ("_detokenizer", "_min_tokens", "_window", "tokens")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._window = StopWindow(stops) if stops else None
        self._min_tokens = min_tokens
        self.tokens = 0

    @property
    def stopped(self) -> bool:
        return self._window is not None and self._window.stopped

    def feed(self, token: int) -> str:
        """Return the text that this token makes sayable."""
        self.tokens += 1
        return self._through(self._detokenizer.feed(token))

    def feed_text(self, text: str, tokens: int) -> str:
        """Return what is sayable of a text that came without tokens; it counts as `tokens`.

        Bytes of an unfinished character, from tokens before it, are dropped: the text says it whole.
        """
        self._detokenizer.flush()
        self.tokens += tokens
        return self._through(text)

    def _through(self, text: str) -> str:
        if self._window is None:
            return text
        return self._window.feed(text, armed=self.tokens >= self._min_tokens)

    def end(self) -> str:
        """Return what is left to say when the answer ends otherwise than by a stop string."""
        if self.stopped:
            return ""
        text = self._through(self._detokenizer.flush())
        if self.stopped or self._window is None:
            return text
        return text + self._window.rest()
