"""How an answer reaches its client: as events of a stream, or gathered and sent whole.

A writer is fed the tokens that a worker gave; it turns them into text, ends at stop strings, and carries
logprobs. The streaming writer has a fast path: without stop strings and logprobs, over a byte-level
vocabulary, a token's event is three byte strings of which two never change and the third stands in a table;
so the events of many tokens are one join, and no token is detokenised or encoded as JSON (`ByteTable` has the figures).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

from controller.frontend.openai.response_format import (
    ResponseFormat,
    around,
    ending,
    opening,
    show_logprobs,
)
from controller.frontend.openai.sse import SseStream
from controller.frontend.openai.text.incremental_detokenizer import IncrementalDetokenizer
from controller.frontend.openai.text.tokenizer import ByteDetokenizer
from controller.frontend.openai.text.vocabulary import check_tokens
from events.wire import Logprob


class ResponseWriter(Protocol):
    """One answer, as it is written for its client."""

    stopped: bool  # a stop string has been reached

    @property
    def reached(self) -> int:
        """How many of the tokens the client may have seen already."""
        ...

    def write(self, tokens: Sequence[int], logprobs: Sequence[Logprob] | None) -> int:
        """Take tokens and return how many of them were used: a stop string may end the answer among them. Raise InvalidOutput if
        one is outside the vocabulary: none of them is written."""
        ...

    def write_text(self, text: str, tokens: int) -> None:
        """Take a text that came without tokens; it counts as so many."""
        ...

    def finish(self, reason: str) -> None:
        """Write what is left, and why the answer ends: `reason` is OpenAI's finish_reason."""
        ...

    def flush(self) -> None:
        """Send what one turn of the loop has brought."""
        ...

    def keep_alive(self) -> None:
        """Let the client, if he can hear anything yet, know that more will come."""
        ...

    def rewind(self, count: int) -> None:
        """Forget all tokens after the first `count`, none of which the client has seen."""
        ...


class StreamingWriter:
    """Writes each token as it comes, as an event of its own."""

    __slots__ = (
        "_begun",
        "_bytes",
        "_detokenizer",
        "_format",
        "_index",
        "_offset",
        "_prefix",
        "_seam",
        "_stream",
        "_suffix",
        "_table",
        "_written",
        "flush",
        "stopped",
    )

    def __init__(self, format: ResponseFormat, stream: SseStream, index: int) -> None:
        """Write the answer with this index among the request's answers."""
        self._format = format
        self._stream = stream
        self.flush: Callable[[], None] = stream.flush
        self._index = index
        self._begun = not format.chat
        self._written = 0
        self._offset = 0  # characters of the tokens whose logprobs were shown
        self.stopped = False
        before, self._suffix = around(format.chat, index, format.after)
        self._prefix = format.before + before
        self._seam = self._suffix + self._prefix
        table = format.tokens.table
        fast = table is not None and not format.stops and format.logprobs is None
        self._table = table if fast else None
        # None until a token comes that has no text, or ends within a character
        self._bytes: ByteDetokenizer | None = None
        # None until something comes that is not for the fast path
        self._detokenizer: IncrementalDetokenizer | None = None

    @property
    def reached(self) -> int:
        return self._written

    def _begin(self) -> None:
        """Begin a chat answer: the first chunk names the role."""
        self._begun = True
        self._stream.parts += (self._format.before, opening(self._index), self._format.after)

    def write(self, tokens: Sequence[int], logprobs: Sequence[Logprob] | None) -> int:
        if not self._begun:
            self._begin()
        table, whole = self._table, self._bytes
        if table is None:
            return self._write_slowly(tokens, logprobs)
        texts = _texts(table.json, tokens) if whole is None or not whole.pending else None
        if texts is None:
            check_tokens(tokens, len(table))
            whole = self._bytes = whole or ByteDetokenizer(table)
            texts = [json.dumps(text).encode() for token in tokens if (text := whole.feed(token))]
        if texts:
            self._stream.parts += (self._prefix, self._seam.join(texts), self._suffix)
        self._written += len(tokens)
        return len(tokens)

    def _started_detokenizer(self) -> IncrementalDetokenizer:
        self._detokenizer = self._detokenizer or self._format.detokenizer()
        return self._detokenizer

    def _write_slowly(self, tokens: Sequence[int], logprobs: Sequence[Logprob] | None) -> int:
        format, detokenizer = self._format, self._started_detokenizer()
        check_tokens(tokens, format.tokens.size)
        for place, token in enumerate(tokens):
            text = detokenizer.feed(token)
            shown = None
            if format.logprobs is not None and logprobs is not None and place < len(logprobs):
                shown = show_logprobs(format, [token], [logprobs[place]], self._offset)
                self._offset += len(format.tokens.text_of(token))
            if text or shown is not None:
                self._stream.parts.append(format.chunk(self._index, text, shown, None))
            self._written += 1
            if detokenizer.stopped:
                self.stopped = True
                return place + 1
        return len(tokens)

    def write_text(self, text: str, tokens: int) -> None:
        if not self._begun:
            self._begin()
        if self._bytes is not None:
            self._bytes.flush()  # an unfinished character: the text says it whole
        detokenizer = self._started_detokenizer()
        shown = detokenizer.feed_text(text, tokens)
        if shown:
            self._stream.parts.append(self._format.chunk(self._index, shown, None, None))
        self._written += tokens
        self.stopped = detokenizer.stopped

    def finish(self, reason: str) -> None:
        if not self._begun:
            self._begin()
        rest = self._bytes.flush() if self._bytes is not None else ""
        if self._detokenizer is not None:
            rest += self._detokenizer.end()
        if rest:
            self._stream.parts.append(self._format.chunk(self._index, rest, None, None))
        format = self._format
        self._stream.parts += (format.before, ending(format.chat, self._index, reason), format.after)

    def keep_alive(self) -> None:
        self._stream.keep_alive()

    def rewind(self, count: int) -> None:
        assert count >= self._written, "what a client has seen cannot be taken back"


class BufferedWriter:
    """Gathers the answer, and gives it whole."""

    def __init__(self, format: ResponseFormat) -> None:
        self._format = format
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []
        self._detokenizer = format.detokenizer() if format.stops else None
        self._text: list[str] = []
        self.stopped = False
        self.reason = ""

    @property
    def reached(self) -> int:
        return 0

    def write(self, tokens: Sequence[int], logprobs: Sequence[Logprob] | None) -> int:
        check_tokens(tokens, self._format.tokens.size)
        used = len(tokens)
        if self._detokenizer is not None:
            for place, token in enumerate(tokens):
                self._text.append(self._detokenizer.feed(token))
                if self._detokenizer.stopped:
                    self.stopped, used = True, place + 1
                    break
        self._tokens += tokens[:used]
        self._logprobs += (logprobs or ())[:used]
        return used

    def write_text(self, text: str, tokens: int) -> None:
        if self._detokenizer is None:
            self._detokenizer = self._format.detokenizer()
            self._text = [self._detokenizer.feed(token) for token in self._tokens]
        self._text.append(self._detokenizer.feed_text(text, tokens))
        self.stopped = self._detokenizer.stopped

    def finish(self, reason: str) -> None:
        self.reason = reason
        if self._detokenizer is None:
            self._detokenizer = self._format.detokenizer()
            self._text = [self._detokenizer.feed(token) for token in self._tokens]
        self._text.append(self._detokenizer.end())

    def flush(self) -> None:
        pass

    def keep_alive(self) -> None:
        pass

    def rewind(self, count: int) -> None:
        tokens, self._tokens = self._tokens[:count], []
        logprobs, self._logprobs = self._logprobs[:count], []
        self._text, self.stopped = [], False
        self._detokenizer = self._format.detokenizer() if self._format.stops else None
        self.write(tokens, logprobs)

    def choice(self, index: int) -> dict[str, Any]:
        """Return the finished answer as one choice of the response."""
        format, text = self._format, "".join(self._text)
        shown = (
            show_logprobs(format, self._tokens, self._logprobs, 0) if format.logprobs is not None else None
        )
        out: dict[str, Any] = {"index": index, "finish_reason": self.reason, "logprobs": shown}
        if format.chat:
            return out | {"message": {"role": "assistant", "content": text, "refusal": None}}
        return out | {"text": text}


def _texts(table: Mapping[int, bytes], tokens: Sequence[int]) -> Sequence[bytes] | None:
    """Return what the table has for these tokens; None if it lacks one of them."""
    try:
        if len(tokens) > 1:
            found: Sequence[bytes] = itemgetter(*tokens)(table)  # a third of a comprehension's time
            return found
        return [table[token] for token in tokens]
    except KeyError:
        return None
