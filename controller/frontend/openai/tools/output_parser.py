"""Parses a model's output incrementally into deltas of content, reasoning and tool calls.

    parser = OutputParser(tool_format, reasoning_format, tools=…, in_reasoning=…, id_seed=request_id)
    parser.resume(text_so_far)           # after a move to another worker: no delta repeats what the client has
    deltas = parser.feed(piece)          # for each new piece of text
    deltas, reason = parser.finish("stop")

The parser's state depends only on the text so far, not on the pieces in which the text arrived. So if another worker
continues an answer, no state needs to be saved. `feed` takes time proportional to the length of its piece. The parser
withholds only a possible beginning of a marker, text that can still become a call, and arguments of unknown type. The
type of such an argument is known at its end.
"""

from collections.abc import Mapping
from functools import partial

from controller.frontend.openai.tools.argument_types import Schema
from controller.frontend.openai.tools.call_reader import CallReader
from controller.frontend.openai.tools.channel_reader import ChannelReader
from controller.frontend.openai.tools.json_reader import copy_value
from controller.frontend.openai.tools.output_delta import DeltaSink, OutputDelta
from controller.frontend.openai.tools.reasoning_formats import ReasoningFormat
from controller.frontend.openai.tools.text_source import Steps, TextSource, markers_of
from controller.frontend.openai.tools.tool_formats import ToolFormat


class OutputParser:
    """Parses the text of one answer."""

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning_format: ReasoningFormat | None = None,
        *,
        tools: Mapping[str, Schema] | None = None,
        in_reasoning: bool = False,
        named: str = "",
        id_seed: str = "",
    ) -> None:
        """Start before the first text. Markers of calls or of reasoning are content if their format is None.

        Args:
            tool_format: The format of the calls; None with `tool_choice: none`.
            reasoning_format: The format of the reasoning.
            tools: The functions of the request with the JSON schemas of their parameters, for typed arguments.
            in_reasoning: Whether the answer begins inside the reasoning: `ReasoningFormat.begins_in_reasoning`.
            named: The function that a named `tool_choice` requires; empty if there is none. The function's arguments
                are then the answer's content. In harmony, the call is written like any other call instead.
            id_seed: Determines the ids of the calls, in formats in which the model writes no ids.
        """
        self._format = tool_format
        self._thinking = reasoning_format
        self._named = named
        self._source = TextSource()
        alphanumeric_ids = tool_format is not None and tool_format.alphanumeric_ids
        self._sink = DeltaSink(id_seed, alphanumeric_ids=alphanumeric_ids)
        self._openers = tool_format.openers() if tool_format and not named else ()
        self._calls = CallReader(self._source, self._sink, tool_format, tools or {}) if tool_format else None
        self._steps = self._read(in_reasoning)

    @property
    def calls_begun(self) -> int:
        """The number of calls announced so far."""
        return self._sink.calls

    @property
    def incomplete_calls(self) -> tuple[int, ...]:
        """The indexes of the calls without complete and valid arguments. A client must not run these calls."""
        return tuple(self._sink.incomplete)

    def feed(self, text: str) -> list[OutputDelta]:
        """Parse the next piece of text, and return its deltas."""
        if text:
            self._source.feed(text)
            next(self._steps, None)
        return self._sink.take()

    def resume(self, text: str) -> None:
        """Parse the text so far of an answer that another worker continues. The deltas of this text are dropped."""
        self.feed(text)

    def finish(self, reason: str = "stop") -> tuple[list[OutputDelta], str]:
        """Parse the end of the text. Return the last deltas and OpenAI's finish_reason.

        The finish_reason is `reason`, with one exception: if the answer has calls and all are complete, `stop` becomes
        `tool_calls`. The exception does not apply if the request named the function to call.
        """
        self._source.ended = True
        next(self._steps, None)
        self._sink.finish()
        chosen = reason == "stop" and not self._named and self._sink.calls > 0
        return self._sink.take(), "tool_calls" if chosen and not self._sink.incomplete else reason

    def _read(self, in_reasoning: bool) -> Steps[None]:
        if (self._format and self._format.channels) or (self._thinking and self._thinking.channels):
            calls = self._format is not None
            return (yield from ChannelReader(self._source, self._sink, calls=calls).read())
        marker = ""
        if in_reasoning and self._thinking:
            marker = yield from self._read_reasoning(self._thinking)
        if self._named:
            if not marker:
                yield from self._read_named()
            return
        yield from self._read_content(marker)

    def _read_reasoning(self, thinking: ReasoningFormat) -> Steps[str]:
        """Read the reasoning up to its end. Return the marker of a call that ended it, or "" if no call did."""
        calls = self._openers if thinking.ended_by_call else ()
        repeated = () if thinking.prose else thinking.start  # a model may repeat its prompt's marker
        markers = markers_of(*repeated, *thinking.end, *calls)
        emit = partial(self._sink.reasoning, trim=thinking.trim)
        while (marker := (yield from self._source.copy_until(markers, emit))) in repeated:
            pass
        self._sink.end_reasoning(trim_content=thinking.trim_content)
        return marker if marker in calls else ""

    def _read_content(self, marker: str) -> Steps[None]:
        """Read the rest of the answer: content, calls, and any further reasoning.

        If the rest begins with a call, `marker` is that call's marker, otherwise "".
        """
        sink, thinking = self._sink, self._thinking
        starts = thinking.start if thinking else ()
        ends = thinking.end if thinking and not thinking.prose else ()
        markers = markers_of(*self._openers, *starts, *ends)
        if not marker:
            marker = yield from self._read_leading()
        while True:
            if not marker:
                marker = yield from self._source.copy_until(markers, sink.content)
            if not marker:
                return
            fresh = not (sink.has_content or sink.calls)
            if self._calls and marker in self._openers:
                self._source.record(marker)
                marker = yield from self._calls.read(marker)
            elif thinking and marker in starts and (fresh or thinking.anywhere):
                marker = yield from self._read_reasoning(thinking)
                if not marker and fresh:
                    marker = yield from self._read_leading()
            else:
                if marker in starts or not fresh:  # else: the end of a reasoning that has ended before
                    sink.content(marker)
                marker = ""

    def _read_leading(self) -> Steps[str]:
        """Read calls without a marker, which some formats permit at the beginning of the content.

        In such a format, a certain first visible character begins the calls. Return the marker at which reading
        stopped, or "" if content follows.
        """
        leading = self._format.leading if self._format else ""
        if not (leading and self._calls):
            return ""
        if (yield from self._source.peek_visible(self._sink.content)) != leading:
            return ""
        for start in self._thinking.start if self._thinking else ():
            if start.startswith(leading) and (yield from self._source.take_if(start)):
                return start
        self._source.record()
        return (yield from self._calls.read(""))

    def _read_named(self) -> Steps[None]:
        """Read the arguments of the function that the request named. They are the whole content of the answer."""
        sink = self._sink
        if not (yield from self._source.peek_visible()):
            return
        sink.begin_call(self._named)
        complete = yield from copy_value(self._source, sink.arguments)
        yield from self._source.copy_until(markers_of(), sink.content if complete else sink.arguments)
        sink.end_call(complete=complete)
