"""From tokens to the text of one answer: checked, detokenised as it grows, and cut at stop strings.

A detokenizer is exact and resumable: fed the same tokens in any portions, over any number of workers, it gives the text that
decoding them all at once gives. For byte-level vocabularies (Llama 3, Qwen, GPT, our own) a token is a row of bytes, so it is a
table and an incremental UTF-8 decoder. For the others it is `tokenizers`' DecodeStream, which has no flush and is quadratic on
long runs of incomplete bytes: both are taken care of here.

A stop string may begin in one token and end in another, on another worker. Text that could be its beginning is held back until
it is clear; nothing of a stop string is ever sent.
"""

import codecs
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from events.errors import HoldfastError

INCOMPLETE_TOKENS_MAX = 64  # a run of tokens that yields no text is cut here: no character is that long


class InvalidOutput(HoldfastError):
    """A worker's output cannot be its model's; the message names what is invalid."""


def check_tokens(tokens: Sequence[int], vocabulary: int) -> None:
    """Check that token ids are below `vocabulary`, and none is negative. Raise InvalidOutput.

    `GenerationOutput` checks the first tokens of an attempt; writers check all others, because the one that writes most tokens
    looks them up in a table of the vocabulary anyway.
    """
    if len(tokens) == 1 and 0 <= tokens[0] < vocabulary:
        return  # the least and the greatest of one take four times as long
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
        raise InvalidOutput("a token outside the vocabulary")


class ByteTable:
    """What each token of a byte-level vocabulary is: its bytes; its text, where those are whole characters.

    With its JSON at hand a streamed token's event takes 0.3 µs, and 3.5 with a detokenizer and an encoder.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """Read the tokens below `size`."""
        added = tokenizer.get_added_tokens_decoder()
        self.bytes: list[bytes] = [b""] * size
        self.text: list[str | None] = [""] * size
        self.json: dict[int, bytes] = {}  # the text, if any, as a JSON string, ready to send
        for token in range(size):
            if token in added:
                data = b"" if added[token].special else added[token].content.encode()
            else:
                data = _bytes_of(tokenizer.id_to_token(token) or "")
            self.bytes[token], self.text[token] = data, None
            with suppress(UnicodeDecodeError):
                text = self.text[token] = data.decode()
                if text:
                    self.json[token] = json.dumps(text).encode()

    def __len__(self) -> int:
        return len(self.bytes)


class ByteDetokenizer:
    """Detokenise by table. `pending` says whether bytes of an unfinished character are held back."""

    __slots__ = ("_decoder", "pending", "table")

    def __init__(self, table: ByteTable) -> None:
        self.table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.pending = False

    def feed(self, token: int) -> str:
        if not 0 <= token < len(self.table):
            return ""
        text = None if self.pending else self.table.text[token]
        if text is None:
            text = self._decoder.decode(self.table.bytes[token])
            self.pending = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self.pending = False
        return self._decoder.decode(b"", True)


class StreamDetokenizer:
    """Detokenise with DecodeStream, bounded and with a flush."""

    __slots__ = ("_held", "_shown", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        # A few tokens before the held ones: decoding depends on what stands before
        self._shown: list[int] = []
        self._held: list[int] = []

    def feed(self, token: int) -> str:
        self._held.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # bare: the text so far reads otherwise now, as incomplete bytes do
            return self._restart()
        if text is not None:
            self._shown, self._held = (self._shown + self._held)[-8:], []
            return str(text)
        return self._restart() if len(self._held) > INCOMPLETE_TOKENS_MAX else ""

    def _restart(self) -> str:
        """Return what is held as it is, and begin a new stream behind it."""
        text = self.flush()
        self._stream = DecodeStream(ids=self._shown, skip_special_tokens=True)
        return text

    def flush(self) -> str:
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._shown)
        whole, alone = self._tokenizer.decode(self._shown + self._held), self._tokenizer.decode(self._held)
        self._shown, self._held = (self._shown + self._held)[-8:], []
        return whole[len(before) :] if whole.startswith(before) else alone


Detokenizer = ByteDetokenizer | StreamDetokenizer


class StopChecker:
    """Holds back the end of a text while it could be the beginning of a stop string.

    Each character is compared once for each stop string, however much of one has matched (Knuth, Morris and Pratt, 1977): a
    client that knows the answer can make nearly all of a stop string match, again and again.
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
        keep = max(stop.matched for stop in self._stops)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def rest(self) -> str:
        """Return what was held back, once it is clear that no stop string comes."""
        held, self._held = self._held, ""
        for stop in self._stops:
            stop.matched = 0
        return held


class _Stop:
    """One stop string, and how much of its beginning the text ends with."""

    __slots__ = ("_back", "_stop", "matched")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._back = _borders(stop)
        self.matched = 0  # characters

    def feed(self, text: str) -> int | None:
        """Continue with a text. Return where in it the stop string begins, below 0 if before it; None if it is not complete."""
        stop, matched = self._stop, self.matched
        if not matched and stop[0] not in text:
            return None
        for at, character in enumerate(text):
            while matched and stop[matched] != character:
                matched = self._back[matched]
            if stop[matched] == character:
                matched += 1
                if matched == len(stop):
                    return at + 1 - matched
        self.matched = matched
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


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """Return the byte behind each printable stand-in of byte-level BPE: 188 stand for themselves, 68 are shifted."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(shifted)}


def _bytes_of(token: str) -> bytes:
    chars = byte_of_char()
    if all(char in chars for char in token):
        return bytes(chars[char] for char in token)
    return token.encode()
