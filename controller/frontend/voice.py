"""How an answer reaches its client: as events of a stream, or gathered and sent whole.

A voice is fed the tokens that a worker gave; it turns them into text, ends at stop strings, and carries
logprobs. The streaming voice has a fast path: without stop strings and logprobs, over a byte-level
vocabulary, a token's event is three byte strings of which two never change and the third stands in a table;
so the events of many tokens are one join.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from typing import Any, Protocol

import msgspec

from controller.frontend.speech import Speech
from controller.frontend.sse import SseStream
from controller.frontend.tokens import ByteDetokenizer, Tokens
from events.wire import Logprob

CHOICES_KEPT = 256  # what is the same in all answers is made once for each place among a request's answers


class Voice(Protocol):
    """One answer, on its way to the client."""

    stopped: bool  # a stop string has been reached

    @property
    def reached(self) -> int:
        """How many of the tokens the client may have seen already."""
        ...

    def say(self, tokens: Sequence[int], logprobs: Sequence[Logprob] | None) -> int:
        """Take tokens and return how many of them were used: a stop string may end the answer among them."""
        ...

    def say_text(self, text: str, tokens: int) -> None:
        """Take a text that came without tokens."""
        ...

    def finish(self, reason: str) -> None:
        """Say what is left, and why the answer ends."""
        ...

    def flush(self) -> None:
        """Write what one turn of the loop has brought."""
        ...

    def rewind(self, count: int) -> None:
        """Forget all tokens after the first `count`, none of which the client has seen."""
        ...


class Form(msgspec.Struct):
    """What every part of one response shares. Nobody changes it."""

    id: str
    model: str
    created: int
    chat: bool
    usage: bool  # a stream's chunks carry "usage": null, because the last one will carry it
    tokens: Tokens
    stops: tuple[str, ...]
    min_tokens: int
    logprobs: int | None
    before: bytes = b""  # what stands before the choices in every event of a stream
    after: bytes = b""  # and behind them, where it is not the last event

    def __post_init__(self) -> None:
        name = "chat.completion.chunk" if self.chat else "text_completion"
        whole = {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": (),
        }
        self.before = b"data: " + msgspec.json.encode(whole)[:-2]
        self.after = b'],"usage":null}\n\n' if self.usage else b"]}\n\n"

    def speech(self) -> Speech:
        return Speech(self.tokens.detokenizer(), self.stops, self.min_tokens)

    def chunk(self, index: int, text: str | None, logprobs: Any, finish: str | None) -> bytes:
        """Return one event of a stream."""
        return b"%b%b%b" % (self.before, _choice(self.chat, index, text, logprobs, finish), self.after)

    def total(self, usage: Mapping[str, Any]) -> bytes:
        """Return the event that says what the whole answer took."""
        return b'%b],"usage":%b}\n\n' % (self.before, msgspec.json.encode(usage))


def _choice(chat: bool, index: int, text: str | None, logprobs: Any, finish: str | None) -> bytes:
    """Return one choice of an event."""
    choice: dict[str, Any] = {"index": index}
    if chat:
        choice["delta"] = {} if text is None else {"content": text}
    else:
        choice["text"] = text or ""
    choice |= {"logprobs": logprobs, "finish_reason": finish}
    return msgspec.json.encode(choice)


def event(body: dict[str, Any]) -> bytes:
    """Return a body as one server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(body)


class StreamVoice:
    """Says each token as it comes."""

    __slots__ = (
        "_bytes",
        "_form",
        "_index",
        "_offset",
        "_opened",
        "_prefix",
        "_said",
        "_seam",
        "_speech",
        "_stream",
        "_suffix",
        "_table",
        "flush",
        "stopped",
    )

    def __init__(self, form: Form, stream: SseStream, index: int) -> None:
        self._form = form
        self._stream = stream
        self.flush: Callable[[], None] = stream.flush
        self._index = index
        self._opened = not form.chat
        self._said = 0
        self._offset = 0  # characters of the tokens whose logprobs were shown
        self.stopped = False
        before, self._suffix = _around(form.chat, index, form.after)
        self._prefix = form.before + before
        self._seam = self._suffix + self._prefix
        table = form.tokens.table
        fast = table is not None and not form.stops and form.logprobs is None
        self._table = table if fast else None
        self._bytes: ByteDetokenizer | None = (
            None  # until a token comes that says nothing, or ends within a character
        )
        self._speech: Speech | None = None  # until something comes that the fast path does not say

    @property
    def reached(self) -> int:
        return self._said

    def _open(self) -> None:
        """Begin a chat answer: the first chunk names the role."""
        self._opened = True
        self._stream.parts += (self._form.before, _opening(self._index), self._form.after)

    def say(self, tokens: Sequence[int], logprobs: Sequence[Logprob] | None) -> int:
        if not self._opened:
            self._open()
        table, whole = self._table, self._bytes
        if table is None:
            return self._say_slowly(tokens, logprobs)
        texts = _texts(table.json, tokens) if whole is None or not whole.pending else None
        if texts is None:
            whole = self._bytes = whole or ByteDetokenizer(table)
            texts = [json.dumps(said).encode() for token in tokens if (said := whole.feed(token))]
        if texts:
            self._stream.parts += (self._prefix, self._seam.join(texts), self._suffix)
        self._said += len(tokens)
        return len(tokens)

    def _spoken(self) -> Speech:
        self._speech = self._speech or self._form.speech()
        return self._speech

    def _say_slowly(self, tokens: Sequence[int], logprobs: Sequence[Logprob] | None) -> int:
        form, speech = self._form, self._spoken()
        for place, token in enumerate(tokens):
            text = speech.feed(token)
            shown = None
            if form.logprobs is not None and logprobs is not None and place < len(logprobs):
                shown = show_logprobs(form, [token], [logprobs[place]], self._offset)
                self._offset += len(form.tokens.text_of(token))
            if text or shown is not None:
                self._stream.parts.append(form.chunk(self._index, text, shown, None))
            self._said += 1
            if speech.stopped:
                self.stopped = True
                return place + 1
        return len(tokens)

    def say_text(self, text: str, tokens: int) -> None:
        if not self._opened:
            self._open()
        if self._bytes is not None:
            self._bytes.flush()  # an unfinished character: the text says it whole
        speech = self._spoken()
        said = speech.feed_text(text, tokens)
        if said:
            self._stream.parts.append(self._form.chunk(self._index, said, None, None))
        self._said += tokens
        self.stopped = speech.stopped

    def finish(self, reason: str) -> None:
        if not self._opened:
            self._open()
        rest = self._bytes.flush() if self._bytes is not None else ""
        if self._speech is not None:
            rest += self._speech.end()
        if rest:
            self._stream.parts.append(self._form.chunk(self._index, rest, None, None))
        form = self._form
        self._stream.parts += (form.before, _ending(form.chat, self._index, reason), form.after)

    def rewind(self, count: int) -> None:
        assert count >= self._said, "what a client has seen cannot be unsaid"


class FoldVoice:
    """Gathers the answer, and gives it whole."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []
        self._loose = ""  # text that came without tokens
        self._speech = form.speech() if form.stops else None
        self._text: list[str] = []
        self.stopped = False
        self.reason = ""

    @property
    def reached(self) -> int:
        return 0

    def say(self, tokens: Sequence[int], logprobs: Sequence[Logprob] | None) -> int:
        used = len(tokens)
        if self._speech is not None:
            for place, token in enumerate(tokens):
                self._text.append(self._speech.feed(token))
                if self._speech.stopped:
                    self.stopped, used = True, place + 1
                    break
        self._tokens += tokens[:used]
        self._logprobs += (logprobs or ())[:used]
        return used

    def say_text(self, text: str, tokens: int) -> None:
        if self._speech is None:
            self._speech = self._form.speech()
            self._text = [self._speech.feed(token) for token in self._tokens]
        self._text.append(self._speech.feed_text(text, tokens))
        self.stopped = self._speech.stopped

    def finish(self, reason: str) -> None:
        self.reason = reason
        if self._speech is None:
            self._speech = self._form.speech()
            self._text = [self._speech.feed(token) for token in self._tokens]
        self._text.append(self._speech.end())

    def flush(self) -> None:
        pass

    def rewind(self, count: int) -> None:
        tokens, self._tokens = self._tokens[:count], []
        logprobs, self._logprobs = self._logprobs[:count], []
        self._text, self.stopped = [], False
        self._speech = self._form.speech() if self._form.stops else None
        self.say(tokens, logprobs)

    def choice(self, index: int) -> dict[str, Any]:
        """Return the finished answer as one choice of the response."""
        form, text = self._form, "".join(self._text)
        shown = show_logprobs(form, self._tokens, self._logprobs, 0) if form.logprobs is not None else None
        out: dict[str, Any] = {"index": index, "finish_reason": self.reason, "logprobs": shown}
        if form.chat:
            return out | {"message": {"role": "assistant", "content": text, "refusal": None}}
        return out | {"text": text}


def _texts(table: Mapping[int, bytes], tokens: Sequence[int]) -> Sequence[bytes] | None:
    """Return what the table has for these tokens; None if it lacks one of them."""
    try:
        if len(tokens) > 1:
            found: Sequence[bytes] = itemgetter(*tokens)(table)  # in a third of a comprehension's time
            return found
        return [table[token] for token in tokens]
    except KeyError:
        return None


@lru_cache(CHOICES_KEPT)
def _around(chat: bool, index: int, after: bytes) -> tuple[bytes, bytes]:
    """Return what stands in an event before a token's text, from its choice on, and what after it."""
    mark = "\x00"
    before, behind = _choice(chat, index, mark, None, None).split(json.dumps(mark).encode())
    return before, behind + after


@lru_cache(CHOICES_KEPT)
def _opening(index: int) -> bytes:
    """Return the choice that begins a chat answer."""
    delta = {"role": "assistant", "content": ""}
    return msgspec.json.encode({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})


@lru_cache(CHOICES_KEPT)
def _ending(chat: bool, index: int, reason: str) -> bytes:
    """Return the choice that says why an answer has ended."""
    return _choice(chat, index, None, None, reason)


def show_logprobs(
    form: Form, tokens: Sequence[int], logprobs: Sequence[Logprob], offset: int
) -> dict[str, Any]:
    """Return logprobs in the shape that the endpoint's clients expect."""
    k = form.logprobs or 0
    if form.chat:
        return {
            "content": [_chat_logprob(form.tokens, t, lp, k) for t, lp in zip(tokens, logprobs, strict=False)]
        }
    names = [form.tokens.text_of(token) for token in tokens]
    offsets = list(accumulate(map(len, names), initial=offset))[:-1]
    tops = [{form.tokens.text_of(t): value for t, value in lp.top[:k]} for lp in logprobs]
    chosen = [lp.chosen for lp in logprobs]
    return {"tokens": names, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}


def _chat_logprob(tokens: Tokens, token: int, logprob: Logprob, k: int) -> dict[str, Any]:
    top = [_named(tokens, other, value) for other, value in logprob.top[:k]]
    return _named(tokens, token, logprob.chosen) | {"top_logprobs": top}


def _named(tokens: Tokens, token: int, value: float) -> dict[str, Any]:
    return {"token": tokens.text_of(token), "logprob": value, "bytes": list(tokens.bytes_of(token))}
