"""Response writers: convert the tokens of one answer into a stream of events or one whole response.

A writer accepts the tokens of a worker. It converts the tokens to text, ends at stop strings, and adds logprobs. With
a byte-level vocabulary, and without stop strings, logprobs and details, an event is three byte strings. Two of these
are constant, and the third is the token's JSON text from a `ByteTable`. So the writer only joins byte strings, and no
token is detokenized or encoded as JSON (`ByteTable` has the timings).

Few clients request more than text (`AnswerContext`). The format of details is vLLM's: `token_ids` in a choice;
`prompt_token_ids` with the first event, in the choice or, for a chat, next to it; `usage` next to the choice. An echo
is sent in one event with the first token. With an echo and logprobs, a worker returns one list of logprobs with an
attempt's first tokens: one for each prompt token, then one for each of these first tokens. The first prompt token has no
logprob, because nothing precedes it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import isfinite
from operator import itemgetter
from typing import Any

import msgspec

from controller.frontend.openai.choice import InvalidOutput, ResponseWriter
from controller.frontend.openai.request_parser import ParsedRequest
from controller.frontend.openai.sse import SseStream
from controller.frontend.openai.text.detokenizer import IncrementalDetokenizer
from controller.frontend.openai.text.tokenizer import Tokens
from events.wire import Logprob

# The constant parts of all answers are built once for each index among a request's answers. Otherwise each stream
# would encode four JSON objects instead of one (4 % of a request).
CHOICES_KEPT = 256
LOGPROB_MAX = 0.01  # tolerance for rounding in engines: a log probability is at most 0
TOP_MAX = 256  # largest number of alternative tokens per position
ROLE = {"role": "assistant", "content": ""}
Logprobs = Sequence[Logprob] | None
ShownLogprobs = dict[str, list[object]]
Json = dict[str, object]


class ResponseFormat(msgspec.Struct):
    """The part of a response that is the same for all of its answers. Immutable."""

    parsed: ParsedRequest
    tokens: Tokens
    request: str  # request id
    created: int  # seconds since 1970
    chat: bool = (
        False  # whether answers are messages of a chat; copied from `parsed`, because each event reads it
    )
    special: bool = False  # whether the text shows special tokens by their names
    fingerprint: str = ""  # the value of `system_fingerprint`; empty: the response has none
    before: bytes = b""  # bytes before the choices in every event of a stream
    after: bytes = b""  # bytes after the choices, except in an answer's last event and in the stream's
    ending: bytes = b""  # bytes after the choice in an answer's last event

    def __post_init__(self) -> None:
        self.chat = self.parsed.chat
        whole = self.response("chat.completion.chunk" if self.chat else "text_completion", ())
        self.before = b"data: " + msgspec.json.encode(whole)[:-2]
        # A stream's events contain "usage": null if the last one will contain the usage.
        self.after = b'],"usage":null}\n\n' if self.parsed.include_usage else b"]}\n\n"
        # as in vLLM, only the usage has the fingerprint or, without it, the end of each answer
        with_fingerprint = self.fingerprint and not self.parsed.include_usage
        self.ending = _with_fingerprint(self.fingerprint) if with_fingerprint else self.after

    def response(self, kind: str, choices: Sequence[object]) -> dict[str, object]:
        """Return a response, or one event of a stream, that contains these choices."""
        parsed = self.parsed
        id, model = ("chatcmpl-" if self.chat else "cmpl-") + self.request, parsed.called or parsed.model
        return {"id": id, "object": kind, "created": self.created, "model": model, "choices": choices}

    def detokenizer(self) -> IncrementalDetokenizer:
        """Return a new detokenizer for one answer, which stops at the request's stop strings."""
        parsed = self.parsed
        special = self.tokens.special if self.special else {}
        detokenizer, least = self.tokens.detokenizer(), parsed.sampling.min_tokens
        return IncrementalDetokenizer(
            detokenizer, parsed.stop, least, special, include_stop=parsed.include_stop
        )

    def name_of(self, token: int) -> str:
        """Return a token's name in logprobs: its text, or its id if the client requested ids."""
        return f"token_id:{token}" if self.parsed.logprobs_by_id else self.tokens.text_of(token)

    def characters(self, tokens: Sequence[int]) -> int:
        """Return the total number of characters in the texts of these tokens."""
        return sum(map(len, map(self.tokens.text_of, tokens)))

    def show_logprobs(self, tokens: Sequence[int], logprobs: Sequence[Logprob], offset: int) -> ShownLogprobs:
        """Return logprobs in the format of the endpoint, chat or completions.

        `offset` is the number of characters in the answer before these tokens. A completion's `top_logprobs` also
        contain the chosen token, like OpenAI's ("up to logprobs+1 elements"). With `logprobs: 0`, they contain only
        the chosen token.
        """
        k, name, pairs = self.parsed.logprobs or 0, self.name_of, list(zip(tokens, logprobs, strict=False))
        if self.chat:
            return {
                "content": [
                    self._named(token, lp.chosen)
                    | {"top_logprobs": [self._named(other, value) for other, value in lp.top[:k]]}
                    for token, lp in pairs
                ]
            }
        sizes = (len(self.tokens.text_of(token)) for token in tokens)
        offsets: list[object] = list(accumulate(sizes, initial=offset))
        return {
            "tokens": [name(token) for token in tokens],
            "token_logprobs": [lp.chosen for lp in logprobs],
            "top_logprobs": [
                {name(token): lp.chosen} | {name(other): value for other, value in lp.top[:k]}
                for token, lp in pairs
            ],
            "text_offset": offsets[:-1],
        }

    def _named(self, token: int, value: float) -> dict[str, object]:
        return {"token": self.name_of(token), "logprob": value, "bytes": list(self.tokens.bytes_of(token))}

    def total(self, usage: Mapping[str, object]) -> bytes:
        """Return the final event of a stream, with the token usage of the whole response."""
        more = {"usage": usage} | ({"system_fingerprint": self.fingerprint} if self.fingerprint else {})
        return b"%b],%b\n\n" % (self.before, msgspec.json.encode(more)[1:])


class AnswerContext(msgspec.Struct):
    """The prompt and the tokens of one answer, and the logprobs of the prompt."""

    prompt: list[int] = []  # prompt tokens
    prompt_text: str = ""  # the text to echo
    template_text: str = ""  # the prompt that the chat template has written, if the client requested it
    accepted: list[int] = []  # all accepted tokens of the answer, in a list that grows with every step
    logprobs: bool = False  # whether the logprobs of the prompt are requested
    prompt_logprobs: Sequence[Logprob] = ()  # empty until they arrive

    def split_logprobs(self, logprobs: Logprobs, tokens: Sequence[int]) -> Logprobs:
        """Return the logprobs of the answer tokens, without those of the prompt.

        With the answer's first tokens, `logprobs` may begin with the logprobs of the prompt. These are stored in this
        object.
        """
        if not self.logprobs or self.accepted or logprobs is None:
            return logprobs
        read = len(self.prompt)
        # a worker of the previous release returns no logprobs of the prompt
        if len(logprobs) < read + len(tokens):
            return logprobs
        self.prompt_logprobs = logprobs[:read]
        return logprobs[read:]

    def echoed_logprobs(
        self, format: ResponseFormat, tokens: Sequence[int], own: Sequence[Logprob]
    ) -> ShownLogprobs:
        """Return the logprobs of the echoed prompt and of the answer tokens after it.

        The first prompt token has no logprob. If the worker's release does not support prompt logprobs, no prompt token
        has a logprob.
        """
        read, prompt = len(self.prompt), self.prompt_logprobs
        silent = 1 if len(prompt) == read else read
        blank = [Logprob(0.0)] * silent
        shown = format.show_logprobs([*self.prompt, *tokens], [*blank, *prompt[silent:], *own], 0)
        for name in ("token_logprobs", "top_logprobs"):
            shown[name][:silent] = [None] * silent
        return shown

    def shown_prompt_logprobs(self, format: ResponseFormat) -> list[Json | None] | None:
        """Return the logprobs of the prompt in the format of vLLM's `prompt_logprobs`.

        The first prompt token has none. The result is None if the worker's release does not support prompt logprobs.
        """
        if not self.prompt_logprobs:
            return None
        text_of, top = format.tokens.text_of, format.parsed.prompt_logprobs or 0
        found: list[Json | None] = [None]
        for token, one in zip(self.prompt[1:], self.prompt_logprobs[1:], strict=True):
            best = one.top[:top]
            rank = one.rank or next((n for n, (other, _) in enumerate(one.top, 1) if other == token), None)
            ranked = {token: (one.chosen, rank)}
            ranked |= {other: (value, n) for n, (other, value) in enumerate(best, 1) if other != token}
            found.append(
                {
                    str(other): {"logprob": value, "rank": place, "decoded_token": text_of(other)}
                    for other, (value, place) in ranked.items()
                }
            )
        return found


PLAIN = AnswerContext()
"""The context of answers without details, the usual case."""


def usage(read: int, made: int) -> dict[str, object]:
    """Return the `usage` object for these numbers of prompt tokens and answer tokens."""
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def event(body: object) -> bytes:
    """Return a body as one server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(body)


def _choice(
    chat: bool,
    index: int,
    content: dict[str, str],
    logprobs: ShownLogprobs | None = None,
    finish: str | None = None,
    stop: int | str | None = None,
) -> dict[str, object]:
    """Return one choice of an event.

    `content` becomes the choice's delta in a chat, and fields of the choice in a completion. `stop` is the stop string
    or the stop token that ended the answer.
    """
    part = {"delta": content} if chat else content
    ending = {} if finish is None else {"stop_reason": stop}
    return {"index": index, **part, "logprobs": logprobs, "finish_reason": finish, **ending}


@lru_cache(CHOICES_KEPT)
def _around(chat: bool, index: int, after: bytes) -> tuple[bytes, bytes]:
    """Return the bytes of an event before and after a token's text.

    The beginning that all events share is left out. `after` is the ending that all events share.
    """
    mark = "\x00"
    choice = _choice(chat, index, {"content" if chat else "text": mark})
    before, behind = msgspec.json.encode(choice).split(json.dumps(mark).encode())
    return before, behind + after


@lru_cache(CHOICES_KEPT)
def _with_fingerprint(fingerprint: str) -> bytes:
    """Return the bytes after the choice in an event with a `system_fingerprint`."""
    return b'],"system_fingerprint":%b}\n\n' % msgspec.json.encode(fingerprint)


@lru_cache(CHOICES_KEPT)
def _after_last_text(chat: bool, index: int, reason: str) -> bytes:
    """Return the bytes of an answer's last event between the text and the ending that all answers share."""
    mark = "\x00"
    choice = _choice(chat, index, {"content" if chat else "text": mark}, None, reason)
    return msgspec.json.encode(choice).split(json.dumps(mark).encode())[1]


@lru_cache(CHOICES_KEPT)
def _without_text(chat: bool, index: int, reason: str | None) -> bytes:
    """Return as JSON the choice of the event that ends an answer with this reason.

    If `reason` is None, return the choice of the event that starts a chat answer.
    """
    content = ROLE if reason is None else {} if chat else {"text": ""}
    return msgspec.json.encode(_choice(chat, index, content, None, reason))


class _DetailedEvent(msgspec.Struct):
    """The content of one event with details."""

    encoded: bytes  # its choice as JSON
    content: dict[str, str]
    logprobs: ShownLogprobs | None
    tokens: Sequence[int]
    has_prompt: bool  # it was the first event that may contain the prompt's tokens


class StreamingWriter(ResponseWriter):
    """Writes the tokens of one answer to a stream when they arrive, each as an event, with the requested details.

    The end of an answer is part of the event with the last text, if that event has not been sent yet.
    """

    __slots__ = (
        "_begun", "_context", "_detokenizer", "_format", "_index", "_latest", "_offset", "_prefix", "_prompt_due", "_seam",
        "_shows_tokens", "_stop_token", "_stream", "_suffix", "_table", "_written", "flush", "reached", "stopped",
    )  # fmt: skip

    def __init__(
        self, format: ResponseFormat, stream: SseStream, index: int, context: AnswerContext = PLAIN
    ) -> None:
        """Write the answer that has this index among the request's answers."""
        parsed = format.parsed
        self._format = format
        self._stream = stream
        self.flush = stream.flush  # type: ignore[method-assign]  # saves one call per event-loop iteration
        self._index = index
        self._begun = not format.chat
        self._context = context
        self._prompt_due = context is not PLAIN  # no event has contained the prompt yet
        self._written = 0  # tokens
        self.reached = 0  # tokens, without the last ones if they are only a part of a character
        self._shows_tokens = parsed.logprobs is not None or parsed.token_ids
        self._offset = 0  # characters of the tokens with logprobs written so far
        self.stopped = False
        self._stop_token: int | None = None
        self._latest: _DetailedEvent | None = None  # the last event with details
        before, self._suffix = _around(format.chat, index, format.after)
        self._prefix = format.before + before
        self._seam = self._suffix + self._prefix
        fast = context is PLAIN and not (parsed.stop or format.special) and parsed.logprobs is None
        self._table = format.tokens.table if fast else None
        # None until the table cannot handle a token
        self._detokenizer: IncrementalDetokenizer | None = None

    def write(self, tokens: Sequence[int], logprobs: Logprobs) -> int:
        if not self._begun:
            self._begin()
        table, detokenizer = self._table, self._detokenizer
        if table is None:
            return self._write_each(tokens, logprobs)
        texts = _texts(table.json, tokens) if detokenizer is None or not detokenizer.pending else None
        if texts is None:
            check_tokens(tokens, len(table))
            texts = [json.dumps(text).encode() for token in tokens if (text := self._text_of(token))]
        else:
            self._written = self.reached = self._written + len(tokens)
        if texts:
            self._stream.parts += (self._prefix, self._seam.join(texts), self._suffix)
        return len(tokens)

    def _text_of(self, token: int) -> str:
        """Return the text that may be sent after this token, and count the token."""
        detokenizer = self._started_detokenizer()
        text = detokenizer.feed(token)
        self._written += 1
        if self._shows_tokens or not detokenizer.pending:
            self.reached = self._written
        return text

    def _begin(self) -> None:
        """Start a chat answer: the first chunk contains the role."""
        self._begun, format = True, self._format
        if self._context is PLAIN:
            self._stream.parts += (format.before, _without_text(True, self._index, None), format.after)
        else:
            self._event(ROLE)
            if self._context.prompt_text:
                self._event({"content": self._context.prompt_text})
            self._latest = None

    def _started_detokenizer(self) -> IncrementalDetokenizer:
        self._detokenizer = self._detokenizer or self._format.detokenizer()
        return self._detokenizer

    def _write_each(self, tokens: Sequence[int], logprobs: Logprobs) -> int:
        check_tokens(tokens, self._format.tokens.size)
        detokenizer = self._started_detokenizer()
        logprobs = self._context.split_logprobs(logprobs, tokens)
        if self._format.parsed.silent:
            return len(tokens)
        for index, token in enumerate(tokens):
            text = self._text_of(token)
            self._write_one(text, [token], logprobs[index : index + 1] if logprobs is not None else ())
            if detokenizer.stopped:
                self.stopped = True
                return index + 1
        return len(tokens)

    def write_text(self, text: str, tokens: int) -> None:
        if not self._begun:
            self._begin()
        detokenizer = self._started_detokenizer()
        self._written = self.reached = self._written + tokens
        self._write_one(detokenizer.feed_text(text, tokens), [], ())
        self.stopped = detokenizer.stopped

    def finish(self, reason: str) -> None:
        if not self._begun:
            self._begin()
        rest = self._detokenizer.end() if self._detokenizer is not None else ""
        if rest or self._prompt_due:
            self._write_one(rest, [], ())
        stop = self._stop_token if self._detokenizer is None else self._detokenizer.stop or self._stop_token
        self._end(self._end_of_text(reason), stop)

    def _end(self, reason: str, stop: int | str | None) -> None:
        """Write the last event. `stop` is the stop string or the stop token that ended the answer."""
        format, context, parsed = self._format, self._context, self._format.parsed
        if context is PLAIN and stop is None and self._latest is None:
            parts = self._stream.parts
            if parts and parts[-1] is self._suffix:
                parts[-1] = _after_last_text(format.chat, self._index, reason) + format.ending
            else:
                parts += (format.before, _without_text(format.chat, self._index, reason), format.ending)
            return
        # a stop token, which has no text and was not written
        hidden = [] if parsed.silent else context.accepted[self._written :]
        self._written = self.reached = self._written + len(hidden)
        finish, latest, parts = "length" if parsed.silent else reason, self._latest, self._stream.parts
        if latest is not None and not hidden and len(parts) > 2 and parts[-2] is latest.encoded:
            del parts[-3:]
            self._prompt_due = latest.has_prompt
            self._event(latest.content, latest.logprobs, finish, latest.tokens, stop)
        else:
            self._event({} if format.chat else {"text": ""}, None, finish, hidden, stop)

    def _end_of_text(self, reason: str) -> str:
        """Write what a subclass has withheld until the end of the text. Return the finish_reason to show."""
        return reason

    def end_at(self, token: int) -> None:
        self._stop_token = token

    def keep_alive(self) -> None:
        self._stream.keep_alive()

    def rewind(self, count: int) -> None:
        assert count >= self.reached, "cannot rewind tokens that the client has received"
        if count < self._written and self._detokenizer is not None:
            self._detokenizer.drop(self._written - count)
        self._written = min(count, self._written)

    def _write_one(self, text: str, tokens: list[int], logprobs: Sequence[Logprob]) -> None:
        """Write one event with this text, unless the event would show nothing.

        If the prompt must be echoed and has not been sent yet, the prompt precedes the text.
        """
        format, context, parsed = self._format, self._context, self._format.parsed
        shown: ShownLogprobs | None = None
        if self._prompt_due and parsed.echo:
            text = context.prompt_text + text
            if parsed.echoes_logprobs:
                shown = context.echoed_logprobs(format, tokens, logprobs)
                self._offset = format.characters(context.prompt)
        elif parsed.logprobs is not None and logprobs:
            shown = format.show_logprobs(tokens, logprobs, self._offset)
        if shown is not None:
            self._offset += format.characters(tokens)
        if text or shown is not None or (tokens and parsed.token_ids):
            self._event({"content" if format.chat else "text": text}, shown, None, tokens)

    def _event(
        self,
        content: dict[str, str],
        logprobs: ShownLogprobs | None = None,
        finish: str | None = None,
        tokens: Sequence[int] = (),
        stop: int | str | None = None,
    ) -> None:
        format, context, parsed = self._format, self._context, self._format.parsed
        choice = _choice(format.chat, self._index, content, logprobs, finish, stop)
        after = format.after if finish is None else format.ending
        beside: dict[str, object] = {}
        if parsed.token_ids:
            choice["token_ids"] = tokens
            if self._prompt_due:
                (beside if format.chat else choice)["prompt_token_ids"] = context.prompt
        if self._prompt_due and context.template_text:
            beside["prompt_text"] = context.template_text
        if parsed.continuous_usage:
            beside["usage"] = usage(len(context.prompt), self._written)
            after = b"]}\n\n"
        if beside:
            after = b"]," + msgspec.json.encode(beside)[1:-1] + after[1:]
        encoded = msgspec.json.encode(choice)
        self._latest = _DetailedEvent(encoded, content, logprobs, tokens, self._prompt_due)
        self._prompt_due = False
        self._stream.parts += (format.before, encoded, after)


class BufferedWriter(ResponseWriter):
    """Collects an answer for a response that is not streamed, with the requested details."""

    def __init__(self, format: ResponseFormat, context: AnswerContext = PLAIN) -> None:
        self._format = format
        self._context = context
        self.reason = ""
        self._stop_token: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []
        self._text: list[str] = []
        self._detokenizer = self._format.detokenizer()
        self.stopped = False

    def write(self, tokens: Sequence[int], logprobs: Logprobs) -> int:
        logprobs = self._context.split_logprobs(logprobs, tokens)
        return len(tokens) if self._format.parsed.silent else self._gather(tokens, logprobs)

    def _gather(self, tokens: Sequence[int], logprobs: Logprobs) -> int:
        check_tokens(tokens, self._format.tokens.size)
        used = 0
        for token in tokens:
            used += 1
            self._text.append(self._detokenizer.feed(token))
            if self._detokenizer.stopped:
                self.stopped = True
                break
        self._tokens += tokens[:used]
        self._logprobs += (logprobs or ())[:used]
        return used

    def write_text(self, text: str, tokens: int) -> None:
        self._text.append(self._detokenizer.feed_text(text, tokens))
        self.stopped = self._detokenizer.stopped

    def end_at(self, token: int) -> None:
        self._stop_token = token

    def finish(self, reason: str) -> None:
        self.reason = "length" if self._format.parsed.silent else reason
        self._text.append(self._detokenizer.end())

    def rewind(self, count: int) -> None:
        tokens, logprobs = self._tokens[:count], self._logprobs[:count]
        self._begin()
        self._gather(tokens, logprobs)

    @property
    def stop(self) -> int | str | None:
        """The stop string or the stop token that ended the answer; None if neither did."""
        return self._detokenizer.stop or self._stop_token

    def pieces(self) -> Iterator[tuple[str, list[int], Sequence[Logprob]]]:
        """Yield the text in the pieces that a stream would have had: each with its token, and the token's logprob."""
        for place, text in enumerate(self._text):
            yield text, self._tokens[place : place + 1], self._logprobs[place : place + 1]

    def choice(self, index: int) -> dict[str, Any]:
        """Return the finished answer as one choice of the response."""
        format, parsed, context = self._format, self._format.parsed, self._context
        text, shown = "".join(self._text), None
        if parsed.echoes_logprobs:
            shown = context.echoed_logprobs(format, self._tokens, self._logprobs)
        elif parsed.logprobs is not None:
            shown = format.show_logprobs(self._tokens, self._logprobs, 0)
        out: dict[str, Any] = {
            "index": index,
            "finish_reason": self.reason,
            "stop_reason": self.stop,
            "logprobs": shown,
        }
        if parsed.prompt_logprobs is not None:
            out["prompt_logprobs"] = context.shown_prompt_logprobs(format)
        if context.template_text:
            out["prompt_text"] = context.template_text
        if format.chat:
            out["message"] = {"role": "assistant", "content": context.prompt_text + text, "refusal": None}
        else:
            out["text"] = context.prompt_text + text
        if parsed.token_ids:
            out["token_ids"] = [] if parsed.silent else list(context.accepted)
            if not format.chat:
                out["prompt_token_ids"] = context.prompt
        return out


def _texts(table: Mapping[int, bytes], tokens: Sequence[int]) -> Sequence[bytes] | None:
    """Return the JSON texts of these tokens from the table, or None if the table lacks one of the tokens."""
    try:
        if len(tokens) > 1:
            # takes a third of the time of a comprehension
            found: Sequence[bytes] = itemgetter(*tokens)(table)
            return found
        return [table[token] for token in tokens]
    except KeyError:
        return None


def check_tokens(tokens: Sequence[int], vocabulary: int) -> None:
    """Raise InvalidOutput if a token id is negative, or not below `vocabulary`.

    The request driver checks only the first tokens of an attempt. Response writers check all later tokens, because
    the fastest writer finds invalid ids anyway when it looks tokens up in a table of the vocabulary.
    """
    if len(tokens) == 1 and 0 <= tokens[0] < vocabulary:
        return  # min and max of one token take four times as long
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
        raise InvalidOutput("a token outside the vocabulary")


def check_logprobs(logprobs: Sequence[Logprob], vocabulary: int) -> None:
    """Raise InvalidOutput if the logprobs of a chunk are impossible, or a token id is not below `vocabulary`.

    A logprob that is not a number or is above 0 counts as the worker's fault.
    """
    for one in logprobs:
        if not (isfinite(one.chosen) and one.chosen <= LOGPROB_MAX) or len(one.top) > TOP_MAX:
            raise InvalidOutput("a logprob that is not a number, or above 0")
        for token, logprob in one.top:
            if not 0 <= token < vocabulary:
                raise InvalidOutput("an alternative outside the vocabulary")
            if logprob != logprob or logprob > LOGPROB_MAX:  # -inf is valid: the token cannot be drawn
                raise InvalidOutput("a logprob that is not a number, or above 0")
