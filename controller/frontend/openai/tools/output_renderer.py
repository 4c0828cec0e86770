"""The inverse of the output parser: writes content, reasoning and tool calls in a model's format.

The simulated engine writes its answers with this module, and tests parse these answers. Output that a format cannot
express is refused.
"""

import json
from collections.abc import Mapping
from typing import Any

from controller.frontend.openai.tools.json_reader import to_json
from controller.frontend.openai.tools.output_delta import ParsedCall, ParsedOutput
from controller.frontend.openai.tools.reasoning_formats import ReasoningFormat
from controller.frontend.openai.tools.tool_formats import ParameterTags, ToolFormat


def render_output(
    output: ParsedOutput,
    tool_format: ToolFormat | None,
    reasoning_format: ReasoningFormat | None = None,
    *,
    in_reasoning: bool = False,
) -> str:
    """Return an answer as the text that a model would write in these formats.

    `in_reasoning` states that the answer's prompt ends with the start marker of the reasoning. Raise ValueError if the
    output has calls or reasoning but no format for them, or if a call's arguments are not a JSON object.
    """
    if (output.calls and not tool_format) or (output.reasoning and not reasoning_format):
        raise ValueError("no format for the calls or the reasoning of this output")
    if (tool_format and tool_format.channels) or (reasoning_format and reasoning_format.channels):
        return _channels(output)
    reasoning = ""
    if reasoning_format and (output.reasoning or in_reasoning):
        start = "" if in_reasoning else reasoning_format.start[0]
        reasoning = f"{start}{output.reasoning}{reasoning_format.end[0]}"
    return reasoning + output.content + (_calls(output.calls, tool_format) if tool_format else "")


def _calls(calls: tuple[ParsedCall, ...], tool_format: ToolFormat) -> str:
    if not calls:
        return ""
    texts = []
    for index, call in enumerate(calls):
        arguments = json.loads(call.arguments)
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {call.name} are no JSON object")
        if tool_format.tags:
            texts.append(_tagged(call.name, arguments, tool_format, tool_format.tags))
        elif tool_format.pythonic:
            keywords = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            texts.append(f"{call.name}({keywords})")
        else:
            texts.append(
                tool_format.call.format(
                    name=call.name, json_name=to_json(call.name), arguments=call.arguments, index=index
                )
            )
    return tool_format.section.format(calls=tool_format.between.join(texts))


def _tagged(name: str, arguments: Mapping[str, Any], tool_format: ToolFormat, tags: ParameterTags) -> str:
    newline = "\n" if tags.trim_newlines else ""
    separators = {is_string: text for text, is_string in reversed(tags.separators)}
    lines = [f"{tool_format.call_start[0]}{name}{tags.name_end}"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else to_json(value)
        separator = separators.get(isinstance(value, str)) or separators[None]
        lines.append(f"{tags.start}{key}{separator}{newline}{text}{newline}{tags.end}")
    return "\n".join([*lines, tool_format.call_end])


def _channels(output: ParsedOutput) -> str:
    """Return an answer as harmony messages.

    The first message lacks its beginning, `<|start|>assistant`, because the prompt ends with it.
    """
    messages = []
    if output.reasoning:
        messages.append(f"<|channel|>analysis<|message|>{output.reasoning}<|end|>")
    if output.content:
        channel, end = ("commentary", "<|end|>") if output.calls else ("final", "<|return|>")
        messages.append(f"<|channel|>{channel}<|message|>{output.content}{end}")
    messages += [
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{call.arguments}<|call|>"
        for call in output.calls
    ]
    return "<|start|>assistant".join(messages)
