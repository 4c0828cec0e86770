"""Text in, tokens out, and back: one `Tokens` per model, one `Detokenizer` per answer.

A detokeniser is exact and resumable: fed the same tokens in any portions, over any number of workers, it
gives the text that decoding them all at once gives. For byte-level vocabularies (Llama 3, Qwen, GPT, our own)
a token is a row of bytes, so it is a table and an incremental UTF-8 decoder. For the others it is
`tokenizers`' DecodeStream, which has no flush and is quadratic on long runs of incomplete bytes: both are
taken care of here.
"""

import asyncio
import codecs
import json
import os
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from controller.frontend.openai.text.chat_templates import ChatTemplate, load_template
from controller.frontend.openai.text.generation_defaults import read_defaults
from controller.frontend.openai.text.segment_cache import (
    KEPT_BYTES,
    TEXT_MAX,
    Beside,
    SegmentCache,
    in_thread,
)
from controller.frontend.openai.text.token_reach import reach_of
from events.errors import HoldfastError

BUILTIN = "builtin:sim"
BUILTIN_FILE = Path(__file__).with_name("builtin_sim_tokenizer.json")
# A batch of one text is nothing to share out among threads: it would only be handed to another one, and waited for
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
MARK = "\0"  # merges with nothing that follows it
LONG_TEXT = 16_384  # characters from which a text is tokenised off the loop
INCOMPLETE_TOKENS_MAX = 64  # a run of tokens that yields no text is cut here: no character is that long


class TokenizerMissing(HoldfastError):
    """The model's tokenizer cannot be read. It is a folder with tokenizer.json in it, or builtin:sim."""


class Detokenizer(Protocol):
    """The text of one answer, token by token."""

    def feed(self, token: int) -> str:
        """Return the text that this token completes: often one word, sometimes nothing."""
        ...

    def flush(self) -> str:
        """Return what is still held back, once no more tokens come."""
        ...


class ByteTable:
    """What each token of a byte-level vocabulary is: its bytes; its text, where those are whole characters.

    With its JSON at hand a streamed token's event takes 0.3 µs, and 3.5 with a detokenizer and an encoder.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        size = ids_of(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.bytes: list[bytes] = [b""] * size
        self.text: list[str | None] = [""] * size
        self.json: dict[int, bytes] = {}  # the text, if any, as a JSON string, ready to send
        for token in range(size):
            if token in added:
                data = b"" if added[token].special else added[token].content.encode()
            else:
                data = _bytes_of(tokenizer.id_to_token(token) or "")
            self._set(token, data)

    def _set(self, token: int, data: bytes) -> None:
        self.bytes[token] = data
        try:
            text: str | None = data.decode()
        except UnicodeDecodeError:
            text = None
        self.text[token] = text
        if text:
            self.json[token] = json.dumps(text).encode()

    def __len__(self) -> int:
        return len(self.bytes)


class ByteDetokenizer:
    """Detokenise by table. `pending` says whether bytes of an unfinished character are held back.

    Most answers have no token that ends within a character, and need no decoder.
    """

    __slots__ = ("_decoder", "pending", "table")

    def __init__(self, table: ByteTable) -> None:
        self.table = table
        self._decoder: codecs.IncrementalDecoder | None = None
        self.pending = False

    def feed(self, token: int) -> str:
        if not 0 <= token < len(self.table):
            return ""
        if not self.pending:
            text = self.table.text[token]
            if text is not None:
                return text
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._decoder.decode(self.table.bytes[token])
        self.pending = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self.pending = False
        return "" if self._decoder is None else self._decoder.decode(b"", True)


class StreamDetokenizer:
    """Detokenise with DecodeStream, bounded and with a flush."""

    __slots__ = ("_held", "_shown", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown: list[
            int
        ] = []  # a few tokens before the held ones: decoding depends on what stands before
        self._held: list[int] = []

    def feed(self, token: int) -> str:
        self._held.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except (
            Exception
        ):  # bare: the text so far reads otherwise now, as bytes of a character that never comes do
            return self._anew()
        if text is not None:
            self._shown, self._held = (self._shown + self._held)[-8:], []
            return str(text)
        return self._anew() if len(self._held) > INCOMPLETE_TOKENS_MAX else ""

    def _anew(self) -> str:
        """Give out what is held as it stands, and go on behind it."""
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


class Tokens:
    """One model's tokenizer and chat template, and its defaults for sampling."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        kept_bytes: int = KEPT_BYTES,
        defaults: Mapping[str, float] | None = None,
    ) -> None:
        """Take a tokenizer as it is read from its file. `kept_bytes`: of segments that were read lately."""
        self.defaults = defaults or {}
        self._tokenizer = tokenizer
        self.template = template
        self.size = ids_of(tokenizer)
        config = json.loads(tokenizer.to_str())
        self.table = ByteTable(tokenizer) if _is_byte_level(config) else None
        self.segments = SegmentCache.of(tokenizer, config, self._encode_each, kept_bytes)  # None: read whole
        self._reach = reach_of(tokenizer, config, _byte_of_char())

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of `text`; with `special`, those that the tokenizer puts around a plain prompt."""
        # Of all ways to encode, only those for batches can leave out where in the text each token stands (a fifth of the
        # time, and nobody asks), and let Python's other threads run meanwhile.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def _encode_each(self, texts: list[str]) -> list[Sequence[int]]:
        return [one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_next(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another: without the space that some put before a beginning."""
        before, whole = self.encode(MARK, special=False), self.encode(MARK + text, special=False)
        if whole[: len(before)] == before:
            return whole[len(before) :]
        return self.encode(text, special=False)

    def tokens_min(self, text: str, enough: int) -> int:
        """Return how many tokens a text has at least, by its length: exact enough to say whether these are more than `enough`."""
        return 0 if self._reach is None else self._reach.tokens_min(text, enough)

    async def encode_soon(
        self, text: str, *, special: bool, shared: bool = True, beside: Beside = in_thread
    ) -> list[int]:
        """Return the tokens of `text`, without holding the loop up if it has `LONG_TEXT` characters or more.

        `shared`: segments that earlier texts had may be taken from the cache, and this one's are kept for later ones.
        `beside` runs what takes long.
        """
        segments = self.segments
        if shared and segments is not None and (segments.bare or not special) and len(text) < TEXT_MAX:
            return await segments.read(text, LONG_TEXT, beside)
        if len(text) < LONG_TEXT:
            return self.encode(text, special=special)
        return await beside(len(text), partial(self.encode, text, special=special))

    def detokenizer(self) -> Detokenizer:
        """Return a detokeniser for one answer."""
        return ByteDetokenizer(self.table) if self.table is not None else StreamDetokenizer(self._tokenizer)

    def text_of(self, token: int) -> str:
        """Return one token's own text, as logprobs show it."""
        if self.table is not None:
            return self.bytes_of(token).decode("utf-8", "replace")
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def bytes_of(self, token: int) -> bytes:
        """Return one token's bytes; a special token's name."""
        if self.table is not None and 0 <= token < len(self.table) and self.table.bytes[token]:
            return self.table.bytes[token]
        return (self._tokenizer.id_to_token(token) or "").encode()

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of all of `tokens` at once, by the tokenizer itself: what every detokeniser must equal; with
        `special`, those that are no text are shown by their names."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def names_of(self, tokens: Sequence[int]) -> list[str]:
        """Return what the vocabulary calls each of `tokens`."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]


async def ready_tokens(name: str) -> Tokens:
    """Return a tokenizer; if it must be read first, off the loop: a large vocabulary takes seconds. Raise TokenizerMissing."""
    if name not in _loaded:
        _loaded[name] = await asyncio.to_thread(_load_alone, name)
    return _loaded[name]


def _load_alone(name: str) -> Tokens:
    """Read a tokenizer once, however many wait: all at once they would keep the loop's thread from running, too."""
    with _reading:
        return load_tokens(name)


@lru_cache(maxsize=32)
def load_tokens(name: str) -> Tokens:
    """Return the tokenizer and chat template of `name`: a folder, or "builtin:sim". Raise TokenizerMissing."""
    folder = None if name == BUILTIN else Path(name)
    return Tokens(load_tokenizer(name), load_template(folder), defaults=read_defaults(folder))


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer alone. Raise TokenizerMissing."""
    file = BUILTIN_FILE if name == BUILTIN else Path(name) / "tokenizer.json"
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerMissing(f"{name!r}: {error}. {TokenizerMissing.__doc__}") from error


_loaded: dict[str, Tokens] = {}
_reading = threading.Lock()


def ids_of(tokenizer: Tokenizer) -> int:
    """Return one more than the highest id: vocabularies may have holes, so their size is not enough."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _is_byte_level(config: dict[str, Any]) -> bool:
    decoder = config.get("decoder") or {}
    return bool(decoder.get("type") == "ByteLevel")


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Return the byte behind each printable stand-in of byte-level BPE: 188 stand for themselves, 68 are shifted."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(shifted)}


def _bytes_of(token: str) -> bytes:
    chars = _byte_of_char()
    if all(char in chars for char in token):
        return bytes(chars[char] for char in token)
    return token.encode()
