"""The writer of the events of a message or a response, which consist of parsed output instead of text.

    tokens ──▶ text ──▶ `OutputParser` ──▶ content, reasoning, tool calls ──▶ `AnswerEvents` of the API ──▶ stream
                                                                                    └──▶ the whole answer

A whole answer is built by the same steps as a stream, so that both always agree.
"""

from collections.abc import Iterable, Sequence

import msgspec

from controller.frontend.openai import writers
from controller.frontend.openai.choice import Choice, ResponseWriter
from controller.frontend.openai.formats import AnswerFormat, AnswerUsage, answer_usage
from controller.frontend.openai.parsed_writers import shown
from controller.frontend.openai.sse import SseStream
from controller.frontend.openai.tools.output_delta import OutputDelta
from controller.frontend.openai.tools.output_parser import OutputParser
from events.wire import Logprob

Json = dict[str, object]
ShownLogprob = Sequence[object]


def encoded_event(kind: str, body: Json) -> bytes:
    """Return a server-sent event with its name."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **body}))


class AnswerEvents:
    """The events of one answer in one API, and the whole answer. Each API has a subclass."""

    def __init__(self, stream: SseStream | None) -> None:
        """Start before the first event. Without a stream, the events are not written anywhere."""
        self.begun = False
        self._parts = stream.parts if stream is not None else None

    def emit(self, kind: str, **body: object) -> None:
        """Write an event to the stream."""
        if self._parts is not None:
            self._parts.append(encoded_event(kind, body))

    def begin(self, prompt: int, cached: int) -> None:
        """Begin the answer to a prompt of `prompt` tokens, of which `cached` were cached."""
        raise NotImplementedError

    def add(self, delta: OutputDelta, logprobs: ShownLogprob) -> None:
        """Add a piece of the answer. `logprobs` are those of its tokens, as far as they were requested."""
        raise NotImplementedError

    def finish(self, reason: str, stop: int | str | None) -> None:
        """Complete the answer's content. `reason` is OpenAI's finish_reason, `stop` the stop string or stop token."""
        raise NotImplementedError

    def end(self, usage: AnswerUsage) -> None:
        """End the answer after its content is complete."""
        raise NotImplementedError

    def whole(self) -> Json:
        """Return the whole answer as a response body."""
        raise NotImplementedError


def feed(
    events: AnswerEvents,
    format: writers.ResponseFormat,
    deltas: Iterable[OutputDelta],
    tokens: Sequence[int],
    logprobs: Sequence[Logprob],
) -> None:
    """Add parsed output to an answer. Only the first delta has the logprobs of the tokens."""
    named: ShownLogprob = ()
    if logprobs and format.parsed.logprobs is not None:
        named = format.show_logprobs(tokens, logprobs, 0)["content"]
    for delta in shown(deltas, format):
        events.add(delta, named)
        named = ()


def last_deltas(parser: OutputParser, reason: str) -> tuple[list[OutputDelta], str]:
    """Return the last output of an answer, and its finish_reason.

    The finish_reason is `tool_calls` if the answer has calls that the client can run, also if the request named the
    function to call.
    """
    deltas, reason = parser.finish(reason)
    if reason == "stop" and parser.calls_begun and not parser.incomplete_calls:
        reason = "tool_calls"
    return deltas, reason


class EventWriter(writers.StreamingWriter):
    """Writes an answer to a stream as the events of its API."""

    __slots__ = ("_events", "_parser")

    def __init__(
        self, format: writers.ResponseFormat, stream: SseStream, events: AnswerEvents, parser: OutputParser
    ) -> None:
        """Write the only answer to a request."""
        super().__init__(format, stream, 0)
        self._events = events
        self._parser = parser
        self._table = None  # its texts need no parsing

    def _begin(self) -> None:
        self._begun = True
        begin(self._events, self._stream.answers[0])

    def _write_one(self, text: str, tokens: list[int], logprobs: Sequence[Logprob]) -> None:
        feed(self._events, self._format, self._parser.feed(text), tokens, logprobs)

    def _end_of_text(self, reason: str) -> str:
        deltas, reason = last_deltas(self._parser, reason)
        feed(self._events, self._format, deltas, (), ())
        return reason

    def _end(self, reason: str, stop: int | str | None) -> None:
        self._events.finish(reason, stop)


def begin(events: AnswerEvents, answer: Choice) -> None:
    """Begin the events of an answer, unless they have begun."""
    if not events.begun:
        events.begun = True
        events.begin(len(answer.request.prompt), answer.cached_tokens or 0)


class EventFormat(AnswerFormat):
    """A format with events of parsed output. A request has one answer."""

    events: AnswerEvents
    _parser: OutputParser
    _is_built = False  # whether the events have all output of a response that is not streamed

    def writer(self, index: int, prompt: list[int], text: str, accepted: list[int]) -> ResponseWriter:
        self._parser = self.parser(index, text)
        if self.stream is None:
            return writers.BufferedWriter(self.shared)
        return EventWriter(self.shared, self.stream, self.events, self._parser)

    def last(self, answers: Sequence[Choice]) -> bytes:
        self.events.end(answer_usage(answers, 1))
        return b""  # the events are written already

    def body(self, answers: Sequence[Choice]) -> Json:
        writer, events, format = answers[0].writer, self.events, self.shared
        if self._is_built or not isinstance(writer, writers.BufferedWriter):
            return events.whole()
        self._is_built = True
        begin(events, answers[0])
        for text, tokens, logprobs in writer.pieces():
            feed(events, format, self._parser.feed(text), tokens, logprobs)
        deltas, reason = last_deltas(self._parser, writer.reason)
        feed(events, format, deltas, (), ())
        events.finish(reason, writer.stop)
        events.end(answer_usage(answers, 1))
        return events.whole()
