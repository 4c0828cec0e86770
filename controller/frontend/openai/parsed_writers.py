"""Response writers of chats with reasoning or tool calls, which parse an answer before they show it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from controller.frontend.openai.sse import SseStream
from controller.frontend.openai.tools.output_delta import OutputDelta, ParsedOutput, collect
from controller.frontend.openai.tools.output_parser import OutputParser
from controller.frontend.openai.writers import (
    AnswerContext,
    BufferedWriter,
    ResponseFormat,
    StreamingWriter,
)
from events.wire import Logprob

Json = dict[str, Any]


def shown(deltas: Iterable[OutputDelta], format: ResponseFormat) -> Iterator[OutputDelta]:
    """Yield the deltas to show to the client.

    Reasoning is left out if the client excluded it. Tool calls after the first are left out if the client permits only
    one.
    """
    parsed = format.parsed
    parallel = parsed.tool_use is None or parsed.tool_use.parallel
    for delta in deltas:
        if delta.kind == "reasoning" and not parsed.include_reasoning:
            continue
        if delta.kind == "tool_call" and delta.call > 0 and not parallel:
            continue
        yield delta


def delta_fields(delta: OutputDelta) -> Json:
    """Return a delta as the fields of a `delta` object in a streamed chat."""
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning": delta.text, "reasoning_content": delta.text}
    call: Json = {"index": delta.call}
    if delta.name:
        call |= {"id": delta.id, "type": "function"}
    function = {"name": delta.name, "arguments": delta.text} if delta.name else {"arguments": delta.text}
    return {"tool_calls": [call | {"function": function}]}


def message_fields(output: ParsedOutput) -> Json:
    """Return a whole answer as the message of a chat.

    The field `content` is null if the answer consists of tool calls or reasoning only.
    """
    found: Json = {"role": "assistant", "content": output.content, "refusal": None}
    if not output.content and (output.calls or output.reasoning):
        found["content"] = None
    if output.reasoning:
        found |= {"reasoning": output.reasoning, "reasoning_content": output.reasoning}
    if output.calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in output.calls
        ]
    return found


class ParsedStreamingWriter(StreamingWriter):
    """Writes an answer to a stream, parsed into content, reasoning and tool calls.

    A token without visible text gets an event only if its logprobs or token ids were requested.
    """

    __slots__ = ("_parser",)

    def __init__(
        self,
        format: ResponseFormat,
        stream: SseStream,
        index: int,
        context: AnswerContext,
        parser: OutputParser,
    ) -> None:
        """Write the answer that has this index among the request's answers."""
        super().__init__(format, stream, index, context)
        self._parser = parser
        self._table = None  # its texts need no parsing

    def _write_one(self, text: str, tokens: list[int], logprobs: Sequence[Logprob]) -> None:
        self._write_deltas(self._parser.feed(text), tokens, logprobs)

    def _write_deltas(
        self, deltas: Iterable[OutputDelta], tokens: list[int], logprobs: Sequence[Logprob]
    ) -> None:
        """Write each delta as an event. Only the first event contains the logprobs and ids of the tokens."""
        format, parsed = self._format, self._format.parsed
        named = (
            format.show_logprobs(tokens, logprobs, 0) if parsed.logprobs is not None and logprobs else None
        )
        parts = [delta_fields(delta) for delta in shown(deltas, format)]
        if not parts and (named is not None or (tokens and parsed.token_ids)):
            parts = [{}]
        for part in parts:
            self._event(part, named, None, tokens)
            named, tokens = None, []

    def _end_of_text(self, reason: str) -> str:
        deltas, reason = self._parser.finish(reason)
        self._write_deltas(deltas, [], ())
        return reason


class ParsedBufferedWriter(BufferedWriter):
    """Collects an answer, and parses it once it is complete."""

    def __init__(
        self, format: ResponseFormat, context: AnswerContext, parser: Callable[[], OutputParser]
    ) -> None:
        """Start without tokens. `parser` creates the parser of the answer."""
        self._parser = parser
        super().__init__(format, context)

    def choice(self, index: int) -> Json:
        out = super().choice(index)
        parser = self._parser()
        deltas = parser.feed("".join(self._text))
        last, out["finish_reason"] = parser.finish(out["finish_reason"])
        out["message"] = message = message_fields(collect(shown([*deltas, *last], self._format)))
        if echoed := self._context.prompt_text:
            message["content"] = echoed + (message["content"] or "")
        return out
