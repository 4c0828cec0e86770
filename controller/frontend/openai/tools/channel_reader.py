"""Reads harmony, the output format of gpt-oss: messages on channels, to the user or to a function.

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content<|return|>
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"key": "value"}<|call|>
"""

import re

from controller.frontend.openai.tools.json_reader import copy_value
from controller.frontend.openai.tools.output_delta import DeltaSink
from controller.frontend.openai.tools.text_source import Emit, Steps, TextSource, markers_of

HEADER_MAX = 1024  # characters
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BODY_ENDS = markers_of(*_ENDS, "<|start|>")
_HEADER_ENDS = markers_of("<|message|>", *_ENDS)
_ANY = markers_of("<|message|>", "<|start|>", *_ENDS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_BUILT_IN = re.compile(
    r"(assistant|python|browser|container)(\.|$)"
)  # recipients that are no functions of the request
_FRAME = re.compile(r"(<\|start\|>)?\s*(assistant)?\s*")  # a header that says nothing


class ChannelReader:
    """Reads harmony messages.

    The first row that fits a message says what the message is:

    to a function of the request                              a call
    on the channel `final`                                    content
    on `commentary` or without a channel, to no recipient     content
    any other, such as a call of a built-in tool              reasoning
    """

    def __init__(self, source: TextSource, sink: DeltaSink, *, calls: bool) -> None:
        """Read from `source`, and write deltas to `sink`. If `calls` is false, no message counts as a call."""
        self._source = source
        self._sink = sink
        self._calls = calls

    def read(self) -> Steps[None]:
        """Read all messages. Text without a header is content."""
        source, sink = self._source, self._sink
        while (yield from source.peek()):
            found = yield from source.text_until(_HEADER_ENDS, HEADER_MAX)
            if found is None:
                yield from source.copy_until(_ANY, sink.content)
            elif found[1] != "<|message|>":
                if not _FRAME.fullmatch(found[0]):
                    sink.content(found[0])
            else:
                yield from self._message(found[0])

    def _message(self, header: str) -> Steps[None]:
        found, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        channel, name = found[1] if found else "", recipient[1] if recipient else ""
        function = name.removeprefix("functions.")
        if function and self._calls and not _BUILT_IN.match(name):
            yield from self._call(function)
            return
        to_user = channel == "final" or (channel in ("commentary", "") and not name)
        emit: Emit = self._sink.content if to_user else self._sink.reasoning
        yield from self._source.copy_until(_BODY_ENDS, emit)

    def _call(self, function: str) -> Steps[None]:
        """Read the arguments of one call. Missing arguments become `{}`.

        The call is incomplete if its arguments are not a JSON object.
        """
        source, sink = self._source, self._sink
        char = yield from source.peek_visible()
        if not char:
            return
        sink.begin_call(function)
        for end in _ENDS:
            if char == "<" and (yield from source.take_if(end)):
                sink.arguments("{}")
                sink.end_call(complete=True)
                return
        complete = char == "{" and (yield from copy_value(source, sink.arguments))
        yield from source.copy_until(_BODY_ENDS, sink.content if complete else sink.arguments)
        sink.end_call(complete=complete)
