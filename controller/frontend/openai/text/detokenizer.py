"""Incremental detokenization: checks tokens, converts them to text, and finds stop strings.

A detokenizer is exact and resumable: for the same tokens in any portions, from any number of workers, it returns the
same text as decoding all tokens at once. In a byte-level vocabulary (Llama 3, Qwen, GPT, Holdfast's own) a token is a
byte string, so detokenization needs only a table and an incremental UTF-8 decoder. Other vocabularies use the DecodeStream of
`tokenizers`, which has no flush and takes quadratic time on long runs of incomplete bytes. `StreamDetokenizer` works
around both limitations.

A stop string may begin in one token and end in another, even on another worker. Text that may be the beginning of a
stop string is held back until further text completes the stop string or rules it out. No part of a stop string is ever sent.
"""

import codecs
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from types import MappingProxyType

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from events.token_bytes import bytes_of

# a run of tokens without text is flushed at this length, because no character is that long
INCOMPLETE_TOKENS_MAX = 64


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
                data = bytes_of(tokenizer.id_to_token(token) or "")
            self.bytes[token], self.text[token] = data, None
            with suppress(UnicodeDecodeError):
                text = self.text[token] = data.decode()
                if text:
                    self.json[token] = json.dumps(text).encode()

    def __len__(self) -> int:
        return len(self.bytes)


class ByteDetokenizer:
    """Converts tokens to text with a ByteTable.

    `pending` is true while bytes of an incomplete character are held back.
    """

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

    def drop(self) -> None:
        """Forget the bytes of an incomplete character."""
        self.pending = False
        self._decoder.reset()


class StreamDetokenizer:
    """Converts tokens to text with the DecodeStream of `tokenizers`, and adds a limited buffer and a flush.

    `pending` is true while tokens without text are held back.
    """

    __slots__ = ("_held", "_shown", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        # a few tokens before the held tokens, because decoding depends on the preceding tokens
        self._shown: list[int] = []
        self._held: list[int] = []

    @property
    def pending(self) -> bool:
        return bool(self._held)

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
        """Return the text of the tokens that are held back, and start a new DecodeStream after them."""
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

    def drop(self) -> None:
        """Forget the held tokens, which have produced no text yet."""
        self._held = []
        self._stream = DecodeStream(ids=self._shown, skip_special_tokens=True)


Detokenizer = ByteDetokenizer | StreamDetokenizer


class _Stop:
    """One stop string, and how many of its first characters the end of the text so far matches."""

    __slots__ = ("_back", "matched", "text")

    def __init__(self, stop: str) -> None:
        self.text = stop
        self._back = _borders(stop)
        self.matched = 0

    def feed(self, text: str) -> int | None:
        """Add text. Return the index in `text` at which the stop string starts, or None if it is not complete yet.

        The index is negative if the stop string starts in earlier text.
        """
        stop, matched = self.text, self.matched
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
    """Return for each prefix of `stop`, from the shortest to the longest, the length of its longest border.

    A border of a text is a shorter text with which it begins and ends: the longest border of `ababa` is `aba`.
    """
    back = [0, 0]
    for character in stop[1:]:
        size = back[-1]
        while size and stop[size] != character:
            size = back[size]
        back.append(size + (stop[size] == character))
    return tuple(back)


class IncrementalDetokenizer:
    """Converts the tokens of one answer to text as they arrive, and stops at stop strings.

    The end of the text is held back while it may be the beginning of a stop string. The search takes linear time for
    each stop string (Knuth, Morris and Pratt, 1977). With a simpler search, a client could repeatedly match most of a
    stop string and make the search quadratic.
    """

    __slots__ = (
        "_detokenizer", "_held", "_include_stop", "_min_tokens", "_special", "_stops", "_tokens", "stop", "stopped",
    )  # fmt: skip

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        min_tokens: int,
        special: Mapping[int, str] = MappingProxyType({}),
        *,
        include_stop: bool = False,
    ) -> None:
        """Start an answer. Stop strings are ignored before token number `min_tokens`. None of them may be empty.

        `special` maps the ids of special tokens to the names that the text shows for them. With `include_stop`, the
        text includes the stop string that ended it.
        """
        self._include_stop = include_stop
        self.stop = ""  # the stop string that was found
        self._detokenizer = detokenizer
        self._special = special
        self._stops = [_Stop(stop) for stop in stops]
        self._min_tokens = min_tokens
        self._tokens = 0  # number of tokens so far
        self._held = ""
        self.stopped = False  # whether a stop string was found; if so, nothing more may be sent

    @property
    def pending(self) -> bool:
        """Whether bytes of an incomplete character are held back."""
        return self._detokenizer.pending

    def feed(self, token: int) -> str:
        """Add a token. Return the text that may be sent now."""
        self._tokens += 1
        text = self._with_special(token) if self._special else self._detokenizer.feed(token)
        return self._checked(text) if self._stops else text  # most answers have no stop strings

    def _with_special(self, token: int) -> str:
        name = self._special.get(token)
        return self._detokenizer.feed(token) if name is None else self._detokenizer.flush() + name

    def feed_text(self, text: str, tokens: int) -> str:
        """Add a text that came without tokens and counts as `tokens`. Return the text that may be sent now.

        Bytes of an incomplete character from earlier tokens are dropped, because the new text contains the whole
        character.
        """
        self._detokenizer.flush()
        self._tokens += tokens
        return self._checked(text)

    def drop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens, which have produced only a part of a character."""
        self._detokenizer.drop()
        self._tokens -= tokens

    def _checked(self, text: str) -> str:
        """Search text for stop strings. Return the text that may be sent now."""
        if not self._stops or self._tokens < self._min_tokens:
            return text
        whole, known = self._held + text, len(self._held)
        found = min(
            ((known + at, stop.text) for stop in self._stops if (at := stop.feed(text)) is not None),
            default=None,
        )
        if found is not None:
            at, self.stop = found
            self.stopped, self._held = True, ""
            return whole[: at + len(self.stop)] if self._include_stop else whole[:at]
        sent = len(whole) - max(stop.matched for stop in self._stops)
        self._held = whole[sent:]
        return whole[:sent]

    def end(self) -> str:
        """Return the remaining text of an answer that ends without a stop string."""
        if self.stopped:
            return ""
        text = self._checked(self._detokenizer.flush())
        return text + self._held
