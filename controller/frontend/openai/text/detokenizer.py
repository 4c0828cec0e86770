"""Incremental detokenization: checks tokens, converts them to text, and finds stop strings.

A detokenizer is exact and resumable: for the same tokens in any portions, from any number of workers, it returns the
same text as decoding all tokens at once. In a byte-level vocabulary (Llama 3, Qwen, GPT, Holdfast's own) a token is a
byte string, so detokenization is a table and an incremental UTF-8 decoder. Other vocabularies use the DecodeStream of
`tokenizers`, which has no flush and takes quadratic time on long runs of incomplete bytes. `StreamDetokenizer` works
around both limitations.

A stop string may begin in one token and end in another, even on another worker. Text that may be the beginning of a
stop string is held back until the next text decides. No part of a stop string is ever sent.
"""

import codecs
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from events.errors import HoldfastError

# a run of tokens without text is flushed at this length, because no character is that long
INCOMPLETE_TOKENS_MAX = 64


class InvalidOutput(HoldfastError):
    """A worker's output cannot come from its model; the message names what is invalid."""


def check_tokens(tokens: Sequence[int], vocabulary: int) -> None:
    """Check that token ids are not negative and below `vocabulary`. Raise InvalidOutput if one is not.

    The driver checks the first tokens of an attempt. Writers check all others, because the fastest writer looks
    tokens up in a table of the vocabulary anyway.
    """
    if len(tokens) == 1 and 0 <= tokens[0] < vocabulary:
        return  # min and max of one token take four times as long
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
        raise InvalidOutput("a token outside the vocabulary")


class ByteTable:
    """The bytes of each token of a byte-level vocabulary, and the token's text if the bytes are whole characters.

    With the JSON text precomputed, the event of a streamed token takes 0.3 µs. With a detokenizer and an encoder it
    takes 3.5 µs.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """Build the table of the tokens with ids below `size`."""
        added = tokenizer.get_added_tokens_decoder()
        self.bytes: list[bytes] = [b""] * size
        self.text: list[str | None] = [""] * size
        self.json: dict[int, bytes] = {}  # each non-empty text as a JSON string
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
    """Converts tokens to text by table. `pending` is true while bytes of an incomplete character are held back."""

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
    """Converts tokens to text with DecodeStream, with a limited buffer and a flush."""

    __slots__ = ("_held", "_shown", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        # a few tokens before the held tokens, because decoding depends on the preceding tokens
        self._shown: list[int] = []
        self._held: list[int] = []

    def feed(self, token: int) -> str:
        self._held.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # raised without a type if the earlier text changes, as with incomplete bytes
            return self._restart()
        if text is not None:
            self._shown, self._held = (self._shown + self._held)[-8:], []
            return str(text)
        return self._restart() if len(self._held) > INCOMPLETE_TOKENS_MAX else ""

    def _restart(self) -> str:
        """Return the text of the held tokens, and start a new stream after them."""
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
    """Finds stop strings, and holds back the end of a text while it may be the beginning of a stop string.

    Each character is compared once per stop string, however much of the string has matched (Knuth, Morris and Pratt,
    1977). Otherwise a client could repeatedly match most of a stop string and make the search quadratic.
    """

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        """Search for `stops`: at least one string, and no empty one."""
        self._stops = [_Stop(stop) for stop in stops]
        self._held = ""
        self.stopped = False

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Add text and return the text that may be sent now.

        While `armed` is false (before `min_tokens`), stop strings are ignored.
        """
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
        """Return the text that is held back. Called when no further text follows that could complete a stop string."""
        held, self._held = self._held, ""
        for stop in self._stops:
            stop.matched = 0
        return held


class _Stop:
    """One stop string, and how many of its first characters the text ends with."""

    __slots__ = ("_back", "_stop", "matched")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._back = _borders(stop)
        self.matched = 0  # number of the stop string's characters that the text ends with

    def feed(self, text: str) -> int | None:
        """Add text. Return the index in it at which the stop string starts, or None if the string is not complete.

        The index is negative if the stop string starts in earlier text.
        """
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
    """Return for each prefix length of `stop` the length of the longest shorter prefix with which the prefix ends."""
    back = [0, 0]
    for character in stop[1:]:
        size = back[-1]
        while size and stop[size] != character:
            size = back[size]
        back.append(size + (stop[size] == character))
    return tuple(back)


class IncrementalDetokenizer:
    """Converts the tokens of one answer to text as they arrive, and stops at stop strings.

    `tokens` is the number of tokens so far.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_stop_checker", "tokens")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int) -> None:
        """Start an answer. Stop strings are searched from token number `min_tokens` on."""
        self._detokenizer = detokenizer
        self._stop_checker = StopChecker(stops) if stops else None
        self._min_tokens = min_tokens
        self.tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found, so that nothing more may be sent."""
        return self._stop_checker is not None and self._stop_checker.stopped

    def feed(self, token: int) -> str:
        """Add a token. Return the text that may be sent now."""
        self.tokens += 1
        return self._checked(self._detokenizer.feed(token))

    def feed_text(self, text: str, tokens: int) -> str:
        """Add a text that came without tokens and counts as `tokens`. Return the text that may be sent now.

        Bytes of an incomplete character from earlier tokens are dropped, because the new text contains the whole
        character.
        """
        self._detokenizer.flush()
        self.tokens += tokens
        return self._checked(text)

    def _checked(self, text: str) -> str:
        if self._stop_checker is None:
            return text
        return self._stop_checker.feed(text, armed=self.tokens >= self._min_tokens)

    def end(self) -> str:
        """Return the remaining text of an answer that ends without a stop string."""
        if self.stopped:
            return ""
        text = self._checked(self._detokenizer.flush())
        if self.stopped or self._stop_checker is None:
            return text
        return text + self._stop_checker.rest()


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """Map each printable character that stands for a byte in byte-level BPE to its byte: 188 stand for themselves, 68
    are shifted.
    """
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(shifted)}


def _bytes_of(token: str) -> bytes:
    chars = byte_of_char()
    if all(char in chars for char in token):
        return bytes(chars[char] for char in token)
    return token.encode()
