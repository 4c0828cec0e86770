"""Reads tool calls in one tool format from a model's output, beginning at a marker.

A call is announced to the client when its name and the beginning of its arguments are known. If a text proves to be no
call, and no call was announced for it, the text and its markers are content. If a call proves malformed after its
announcement, the call remains incomplete.
"""

import re
from collections.abc import Mapping

from controller.frontend.openai.tools.argument_types import (
    STRING,
    ArgumentType,
    Schema,
    convert_text,
    convert_value,
)
from controller.frontend.openai.tools.json_reader import (
    NAME_MAX,
    copy_value,
    decode_string,
    is_object,
    load_json,
    read_string,
    to_json,
)
from controller.frontend.openai.tools.output_delta import DeltaSink
from controller.frontend.openai.tools.python_literals import literal_to_json, read_argument
from controller.frontend.openai.tools.text_source import Emit, Steps, TextSource, markers_of
from controller.frontend.openai.tools.tool_formats import ParameterTags, ToolFormat

HELD_MAX = 1 << 20  # characters that are withheld because they may be either content or a call
KEYS_MAX = 100  # keys of a JSON object before its call is announced
ARGUMENT_KEYS = ("arguments", "parameters")
_KNOWN_KEYS = {"name", "type", "id", "function", *ARGUMENT_KEYS}
_WORD = re.compile(r"[\w.]")
_TAG_NAME = re.compile(r"[^\s<>\"']+")
_IDENTIFIER = re.compile(r"[^\W\d][\w.]*")


def discard(text: str) -> None:
    """Ignore text that belongs to a call's markup."""


class CallParts:
    """Reads tool calls from a source of text.

    Unless stated otherwise, a method that returns a string returns the marker at which it stopped, or "" if content
    follows.
    """

    def __init__(
        self, source: TextSource, sink: DeltaSink, tool_format: ToolFormat, tools: Mapping[str, Schema]
    ) -> None:
        """Read from `source`, and write deltas to `sink`.

        `tools` maps the names of the request's functions to the schemas of their parameters.
        """
        self._source = source
        self._sink = sink
        self._format = tool_format
        self._tools = tools
        self._types: dict[str, ArgumentType] = {}  # of the functions that were called
        self._openers = tool_format.openers()

    def _fall_back(self) -> None:
        """Pass the recorded text on as content, because it was no call."""
        self._sink.content(self._source.take_recorded())

    def _announce(self, name: str, own_id: str = "") -> None:
        self._source.take_recorded()
        self._sink.begin_call(name, own_id)

    def _end_broken(self) -> Steps[str]:
        """End a malformed call as incomplete.

        If calls of this format have an end marker, the text up to the next marker is passed on as the call's arguments.
        """
        marker = ""
        if self._format.call_end:
            ends = markers_of(
                self._format.call_end, self._format.section_end, *self._openers, *self._format.call_start
            )
            marker = yield from self._source.copy_until(ends, self._sink.arguments)
        self._sink.end_call(complete=False)
        return "" if marker == self._format.call_end else marker

    def _end_unfinished(self, calls: int) -> Steps[str]:
        """End a JSON object that is not complete.

        If more than `calls` calls have begun, the object was announced and is a malformed call. If not, it is content.
        """
        if self._sink.calls > calls:
            return (yield from self._end_broken())
        self._fall_back()
        return ""

    def _end_of_call(self, closers: str = "]}") -> Steps[None]:
        """Skip white space and characters of `closers` after a call's arguments, then the call's end marker.

        If calls of this format have no end marker, do nothing.
        """
        if end := self._format.call_end:
            while (char := (yield from self._source.peek_visible())) and char in closers:
                self._source.take(1)
            yield from self._source.take_if(end)


class CallReader(CallParts):
    """Reads calls. Each read returns the marker at which it stopped, or "" if content follows."""

    # --- sections -----------------------------------------------------------------------------------

    def read(self, marker: str) -> Steps[str]:
        """Read the calls that follow `marker`. If `marker` is empty, the calls begin with the next character.

        Return the marker at which reading stopped, or "" if content follows.
        """
        source, style, calls = self._source, self._format, self._sink.calls
        if marker not in style.section_start:
            stopped = yield from self._one()
            return (yield from self._section(stopped, calls)) if style.section_start else stopped
        first = yield from source.peek_visible()
        for start in style.call_start:
            if first and start.startswith(first) and (yield from source.take_if(start)):
                stopped = yield from self._one()
                return (yield from self._section(stopped, calls))
        self._fall_back()
        return ""

    def _section(self, marker: str, calls: int) -> Steps[str]:
        """Read the rest of a section of calls after its first call.

        `marker` is the marker after the first call. `calls` is the number of calls before the section.
        """
        style = self._format
        markers = markers_of(*style.call_start, style.section_end, *style.section_start)
        while True:
            if not marker:
                marker = yield from self._source.copy_until(markers, self._sink.content)
            if marker == style.section_end:
                if self._sink.calls == calls:
                    self._sink.content(marker)
                return ""
            if marker not in style.call_start:
                return marker
            self._source.record(marker)
            marker = yield from self._one()

    def _one(self) -> Steps[str]:
        """Read one call, or several calls that share a marker."""
        style = self._format
        if style.tags:
            return (yield from self._tagged_call(style.tags))
        if style.pythonic:
            yield from self._pythonic_calls()
            return ""
        char = yield from self._source.peek_visible()
        if char == "[" and not style.strict_keys:
            return (yield from self._json_array())
        if char == "{":
            return (yield from self._json_objects())
        if style.header:
            return (yield from self._header_call(style.header))
        self._fall_back()
        return ""

    # --- JSON objects with a name and arguments --------------------------------------------------------------------

    def _json_objects(self) -> Steps[str]:
        """Read one or more calls that are JSON objects, with the format's separator between them."""
        source, separator = self._source, self._format.separator
        while True:
            calls = self._sink.calls
            closed = yield from self._json_call()
            if not closed:
                return (yield from self._end_unfinished(calls))
            self._sink.end_call(complete=True)
            yield from self._end_of_call()
            if not separator:
                return ""
            source.record()
            if (yield from source.peek_visible()) == separator:
                source.take(1)
            if (yield from source.peek_visible()) != "{":
                self._fall_back()
                return ""

    def _json_array(self) -> Steps[str]:
        """Read a JSON array of calls."""
        source, read = self._source, 0
        source.take(1)
        while True:
            calls = self._sink.calls
            char = yield from source.peek_visible()
            if char == "," and read:
                source.take(1)
                char = yield from source.peek_visible()
            if char == "]" and read:
                source.take_recorded()
                source.take(1)
                yield from self._end_of_call()
                return ""
            closed = char == "{" and (yield from self._json_call())
            if not closed:
                return (yield from self._end_unfinished(calls))
            read += 1
            self._sink.end_call(complete=True)
            source.record()

    def _json_call(self) -> Steps[bool]:
        """Read one call, `{"name": …, "arguments": …}`, and announce it. Return whether the JSON object is complete."""
        source, sink = self._source, self._sink
        name, held, announced = "", list[str](), False
        source.take(1)
        for _ in range(KEYS_MAX):
            char = yield from source.peek_visible()
            if char == ",":
                source.take(1)
                char = yield from source.peek_visible()
            if char == "}":
                if not announced and not (name and self._format.arguments_optional):
                    return False
                source.take(1)
                if not announced:
                    self._announce(name)
                    sink.arguments("{}")
                return True
            key = yield from self._json_key()
            if key is None or (self._format.strict_keys and key not in _KNOWN_KEYS):
                return False
            if key == "name" and not name:
                name = (yield from read_string(source)) or ""
                valid = bool(name)
            elif key in ARGUMENT_KEYS and not announced and not held:
                if (yield from source.peek()) != "{":
                    valid = yield from self._encoded_arguments(held.append)
                elif name:
                    announced = True
                    self._announce(name)
                    valid = yield from copy_value(source, sink.arguments)
                else:
                    valid = yield from copy_value(source, held.append, HELD_MAX - source.recorded)
            else:
                valid = yield from copy_value(source, discard, HELD_MAX - source.recorded)
            if not valid:
                return False
            if name and held and not announced:
                announced = True
                self._announce(name)
                sink.arguments("".join(held))
        return False

    def _json_key(self) -> Steps[str | None]:
        """Read a key of a JSON object and the colon after it. Return the key, or None if key or colon is missing."""
        key = yield from read_string(self._source)
        if key is None or (yield from self._source.peek_visible()) != ":":
            return None
        self._source.take(1)
        yield from self._source.peek_visible()
        return key

    def _encoded_arguments(self, emit: Emit) -> Steps[bool]:
        """Read arguments that are null, or a JSON string that contains a JSON object as text.

        Pass the text of the object to `emit`, or `{}` for null. Return False if the arguments are anything else.
        """
        parts: list[str] = []
        if not (yield from copy_value(self._source, parts.append, HELD_MAX - self._source.recorded)):
            return False
        written = "".join(parts)
        text = "{}" if written == "null" else decode_string(written)
        if text is None or not is_object(text):
            return False
        emit(text)
        return True

    # --- a header with the name, then arguments ---------------------------------------------------------------------

    def _header_call(self, header: re.Pattern[str]) -> Steps[str]:
        source, sink, style = self._source, self._sink, self._format
        found = yield from source.text_until(markers_of(*style.header_ends), NAME_MAX)
        matched = header.fullmatch(found[0].strip()) if found else None
        if found is None or matched is None:
            self._fall_back()
            return ""
        named = matched.groupdict()
        brace = found[1] == "{"
        char = "{" if brace else (yield from source.peek_visible())
        if not char or (char != "{" and not style.call_end):
            self._fall_back()
            return ""
        self._announce(named["name"], named.get("id") or "")
        if char == "{":
            if brace:
                sink.arguments("{")
            closed = yield from copy_value(source, sink.arguments, inside="{" if brace else "")
            if not closed:
                return (yield from self._end_broken())
            yield from self._end_of_call("`]}")
            sink.end_call(complete=True)
            return ""
        return (yield from self._other_arguments())

    def _other_arguments(self) -> Steps[str]:
        """Read the text after a call's header, where no JSON object begins.

        If the text is the call's end marker, the arguments are `{}`. With any other text, the call is malformed.
        """
        end = self._format.call_end
        if (yield from self._source.take_if(end)):
            self._sink.arguments("{}")
            self._sink.end_call(complete=True)
            return ""
        return (yield from self._end_broken())

    # --- tags for parameters -------------------------------------------------------------------------------------

    def _tagged_call(self, tags: ParameterTags) -> Steps[str]:
        source, sink, style = self._source, self._sink, self._format
        name, marker = yield from self._tagged_name(tags)
        if not marker:
            self._fall_back()
            return ""
        self._announce(name)
        kind = self._types.get(name)
        if kind is None:
            kind = self._types[name] = ArgumentType(self._tools.get(name))
        before = "{"
        while marker == tags.start:
            sink.arguments(before)
            marker = yield from self._parameter(tags, kind)
            before = ", "
            if marker == tags.end:
                ends = markers_of(tags.start, style.call_end, style.section_end)
                marker = yield from source.copy_until(ends, sink.content)
        if marker:
            sink.arguments("{}" if before == "{" else "}")
        sink.end_call(complete=bool(marker))
        return marker if marker == style.section_end else ""

    def _tagged_name(self, tags: ParameterTags) -> Steps[tuple[str, str]]:
        """Read a function's name and the tag after it, and return both. The tag is "" if the text is no call."""
        source, style = self._source, self._format
        name_ends = (tags.name_end or tags.start, style.call_end)
        found = yield from source.text_until(markers_of(*name_ends), NAME_MAX)
        name = found[0].strip() if found else ""
        if found is None or not _TAG_NAME.fullmatch(name):
            return name, ""
        if not tags.name_end:
            return name, found[1]
        if found[1] == tags.name_end and (first := (yield from source.peek_visible())):
            for tag in (tags.start, style.call_end, style.section_end):
                if tag.startswith(first) and (yield from source.take_if(tag)):
                    return name, tag
        return name, ""

    def _parameter(self, tags: ParameterTags, function: ArgumentType) -> Steps[str]:
        """Read one parameter of a call. Return the marker that ended its value.

        Return "" if the text ended or is malformed.
        """
        source, sink = self._source, self._sink
        separators = dict(tags.separators)
        found = yield from source.text_until(markers_of(*separators), NAME_MAX)
        if found is None:
            return ""
        key, is_string = found[0].strip(), separators[found[1]]
        sink.arguments(f"{to_json(key)}: ")
        if tags.trim_newlines and (yield from source.peek()) == "\n":
            source.take(1)
        ends = [tags.end, tags.start, self._format.call_end]
        markers = markers_of(*ends, *(f"\n{end}" for end in ends if tags.trim_newlines))
        kind = function.property(key)
        if is_string is not False and (kind is None or kind.types == STRING):
            sink.arguments('"')
            marker = yield from source.copy_until(markers, lambda text: sink.arguments(to_json(text)[1:-1]))
            if marker:
                sink.arguments('"')
            return marker.removeprefix("\n")
        parts: list[str] = []
        marker = yield from source.copy_until(markers, parts.append)
        if marker:
            sink.arguments(to_json(_typed("".join(parts), kind, is_string)))
        return marker.removeprefix("\n")

    # --- call expressions ------------------------------------------------------------------------------------------

    def _pythonic_calls(self) -> Steps[None]:
        """Read calls that are written as a Python list: `[name(key=value, …), …]`."""
        source = self._source
        if (yield from source.peek_visible()) != "[":
            self._fall_back()
            return
        source.take(1)
        more = True
        while more:
            calls = self._sink.calls
            closed = yield from self._expression()
            if not closed:
                if self._sink.calls > calls:
                    self._sink.end_call(complete=False)
                self._fall_back()
                return
            self._sink.end_call(complete=True)
            source.record()
            char = yield from source.peek_visible()
            more = char == ","
            if char and char in ",]":
                source.take(1)
                yield from source.peek_visible()
                if char == "]":
                    source.take_recorded()
        if not (self._format.call_end and (yield from source.take_if(self._format.call_end))):
            self._fall_back()

    def _expression(self) -> Steps[bool]:
        """Read one call, `name(key=value, …)`. Return whether it is complete and valid.

        The call is announced once its first value is known.
        """
        source, sink = self._source, self._sink
        yield from source.peek_visible()
        name = yield from source.take_while(_WORD, NAME_MAX)
        if not _IDENTIFIER.fullmatch(name) or (yield from source.peek_visible()) != "(":
            return False
        source.take(1)
        before = "{"
        while True:
            char = yield from source.peek_visible()
            if char == "," and before != "{":
                source.take(1)
                char = yield from source.peek_visible()
            if char == ")":
                source.take(1)
                if before == "{":
                    self._announce(name)
                sink.arguments("{}" if before == "{" else "}")
                return True
            key = yield from source.take_while(_WORD, NAME_MAX)
            if not key or (yield from source.peek_visible()) != "=":
                return False
            source.take(1)
            text = yield from read_argument(source, HELD_MAX)
            value = None if text is None else literal_to_json(text)
            if value is None:
                return False
            if before == "{":
                self._announce(name)
            source.record()
            sink.arguments(f"{before}{to_json(key)}: {value}")
            before = ", "


def _typed(text: str, kind: ArgumentType | None, is_string: bool | None) -> object:
    """Return the value of a parameter's text, converted to the types that the schema declares.

    `is_string` is True if the call marks the value as a string, False if it marks the value as JSON, and None if there
    is no mark. A value that is marked as JSON, or that no schema describes, is decoded as JSON if possible.
    """
    if is_string is not False and kind is not None:
        return convert_text(text, kind)
    try:
        value = load_json(text)
    except ValueError:
        value = text
    return convert_value(value, kind)
