"""From tokens to the text that may be sent: detokenised as it grows, and checked for stop strings.

A stop string may begin in one token and end in another, on another worker: text that could be its beginning
is held back until it is clear. Nothing of a stop string is ever sent.
"""

from collections.abc import Sequence

from controller.frontend.text.tokenizer import Detokenizer


class StopChecker:
    """Holds back the end of a text while it could be the beginning of a stop string."""

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for any of `stops`, of which there is at least one, and none is empty."""
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Return what may be sent now. Unarmed (before `min_tokens`), nothing stops and nothing is held."""
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


class IncrementalDetokenizer:
    """The text of one answer, as it grows. `tokens` counts those that were fed."""

    __slots__ = ("_detokenizer", "_min_tokens", "_stop_checker", "tokens")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int) -> None:
        """Begin an answer. `stops` count from the token with the number `min_tokens` on."""
        self._detokenizer = detokenizer
        self._stop_checker = StopChecker(stops) if stops else None
        self._min_tokens = min_tokens
        self.tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: nothing more may be sent."""
        return self._stop_checker is not None and self._stop_checker.stopped

    def feed(self, token: int) -> str:
        """Return the text that may be sent since this token has come."""
        self.tokens += 1
        return self._checked(self._detokenizer.feed(token))

    def feed_text(self, text: str, tokens: int) -> str:
        """Return what may be sent of a text that came without tokens; it counts as `tokens`.

        Bytes of an unfinished character, from tokens before it, are dropped: the text has it whole.
        """
        self._detokenizer.flush()
        self.tokens += tokens
        return self._checked(text)

    def _checked(self, text: str) -> str:
        if self._stop_checker is None:
            return text
        return self._stop_checker.feed(text, armed=self.tokens >= self._min_tokens)

    def end(self) -> str:
        """Return what is left to send when the answer ends otherwise than by a stop string."""
        if self.stopped:
            return ""
        text = self._checked(self._detokenizer.flush())
        if self.stopped or self._stop_checker is None:
            return text
        return text + self._stop_checker.rest()
