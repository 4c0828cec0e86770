"""From tokens to the text that may be sent: detokenised as it grows, and checked for stop strings.

A stop string may begin in one token and end in another, on another worker: text that could be its beginning
is held back until it is clear. Nothing of a stop string is ever sent.
"""

from collections.abc import Sequence
from functools import lru_cache

from controller.frontend.openai.text.tokenizer import Detokenizer


class StopChecker:
    """Holds back the end of a text while it could be the beginning of a stop string.

    Each character is looked at once for each stop string, however much of one has been said (Knuth, Morris and Pratt, 1977): a
    client who knows what is answered can have nearly all of a stop string be said, again and again.
    """

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for any of `stops`, of which there is at least one, and none is empty."""
        self._stops = [_Stop(stop) for stop in stops]
        self._held = ""
        self.stopped = False

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Return what may be sent now. Unarmed (before `min_tokens`), nothing stops and nothing is held."""
        if not armed:
            return self.rest() + text
        whole, known = self._held + text, len(self._held)
        found = min((known + at for stop in self._stops if (at := stop.feed(text)) is not None), default=None)
        if found is not None:
            self.stopped, self._held = True, ""
            return whole[:found]
        keep = max(stop.said for stop in self._stops)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def rest(self) -> str:
        """Return what was held back, once it is clear that no stop string comes."""
        held, self._held = self._held, ""
        for stop in self._stops:
            stop.said = 0
        return held


class _Stop:
    """One stop string, and how much of its beginning the text ends with."""

    __slots__ = ("_back", "_stop", "said")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._back = _borders(stop)
        self.said = 0  # characters

    def feed(self, text: str) -> int | None:
        """Go on with a text. Return where in it the stop string begins, below 0 if before it; None if it has not been said."""
        stop, said = self._stop, self.said
        if not said and stop[0] not in text:
            return None
        for at, character in enumerate(text):
            while said and stop[said] != character:
                said = self._back[said]
            if stop[said] == character:
                said += 1
                if said == len(stop):
                    return at + 1 - said
        self.said = said
        return None


@lru_cache(64)
def _borders(stop: str) -> tuple[int, ...]:
    """Return for each length of a beginning of `stop` how long the longest beginning is, shorter than it, with which it ends."""
    back = [0, 0]
    for character in stop[1:]:
        size = back[-1]
        while size and stop[size] != character:
            size = back[size]
        back.append(size + (stop[size] == character))
    return tuple(back)


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
