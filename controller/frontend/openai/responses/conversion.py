"""Converts bodies of OpenAI's Responses API into chats, so that one parser and one path serve both.

    items ──▶ turns, one per item ──▶ `parse_any_chat` ──▶ stored turns before them ──▶ `joined` ──▶ messages of the chat

A turn is a chat message that may be a part of one: an assistant's reasoning, text and calls are separate items. They
are joined only once the previous response is known. Until then, a reference to a stored item is a turn too.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from controller.frontend.errors import invalid, quoted, unsupported
from controller.frontend.openai.request_models import Json
from controller.frontend.openai.request_parser import (
    ParsedRequest,
    ResponseOptions,
    parse_any_chat,
    refuse,
    validated,
)
from controller.frontend.openai.responses import models

Turn = dict[str, Any]
REFERENCE = "item_reference"
LOGPROBS = "message.output_text.logprobs"
EFFORT_VARIABLES = ("reasoning_effort", "enable_thinking", "thinking")
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def parse_responses(data: object) -> ParsedRequest:
    """Parse a decoded body of /v1/responses. If a field is invalid, raise ApiError (400) that names the field."""
    body = validated(models.ResponsesBody, data)
    unknown = refuse(body.model_extra, models.REFUSED_BY_RESPONSES, models.IGNORED_BY_RESPONSES)
    for name, part in (("text", body.text), ("reasoning", body.reasoning)):
        unknown += tuple(f"{name}.{one}" for one in (part.model_extra if part is not None else None) or ())
    turns = _turns(body)
    chat: Json = {"model": body.model, "messages": turns, **_options(body)}
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is not None:
        chat["reasoning_effort"] = effort
        if effort == "none":
            chat["chat_template_kwargs"] = {"enable_thinking": False, "thinking": False}
    options = ResponseOptions(
        shown=_shown(body),
        previous=body.previous_response_id or "",
        store=body.store is not False,
        instructed=body.instructions is not None,
    )
    return msgspec.structs.replace(
        parse_any_chat(chat),
        api="responses",
        response=options,
        template_reads={} if effort is None else {"reasoning.effort": EFFORT_VARIABLES},
        unknown=unknown,
    )


def _options(body: models.ResponsesBody) -> Json:
    """Return the fields of a chat body, except the messages and the reasoning."""
    chat: Json = {
        "stream": bool(body.stream),
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "parallel_tool_calls": body.parallel_tool_calls,
        "user": body.user,
    }
    if body.tools:
        chat["tools"] = [_function(place, tool) for place, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _format(body.text.format)
    return {name: value for name, value in chat.items() if value is not None}


def _turns(body: models.ResponsesBody) -> list[Turn]:
    """Return the instructions and the input as turns."""
    turns: list[Turn] = []
    if body.instructions is not None:
        turns.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*turns, {"role": "user", "content": body.input}]
    return turns + [turn_of(item, f"input.{place}") for place, item in enumerate(body.input)]


def turn_of(item: models.InputItem, where: str) -> Turn:
    """Return an item as a turn. Raise ApiError (400), which names the place `where`, if the item is not valid."""
    match item.type:
        case "message":
            if item.role is None:
                raise invalid(f"{where}: a message needs a role", where)
            return {"role": item.role, "content": _content(item.content, item.role, f"{where}.content")}
        case "reasoning":
            content = _content(item.content, "assistant", f"{where}.content")
            return {"role": "assistant", "content": "", "reasoning_content": content}
        case "function_call":
            if not item.call_id or not item.name:
                raise invalid(f"{where}: a function_call needs call_id and name", where)
            function = {"name": item.name, "arguments": item.arguments or "{}"}
            call = {"id": item.call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            if not item.call_id:
                raise invalid(f"{where}: a function_call_output needs call_id", where)
            output = _content(item.output, "tool", f"{where}.output")
            return {"role": "tool", "tool_call_id": item.call_id, "content": output}
        case "item_reference":
            if not item.id:
                raise invalid(f"{where}: an item_reference needs id", where)
            return {"role": REFERENCE, "content": "", "id": item.id}
    raise unsupported(where, f"items of type {quoted(item.type)!r}")


def _content(
    content: str | Sequence[models.ItemPart] | None, role: str, where: str
) -> str | list[dict[str, str]]:
    """Return a content as a text, or as parts if there are several, except of an assistant."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [_text(part, f"{where}.{place}") for place, part in enumerate(content)]
    if role == "assistant" or len(texts) < 2:  # templates without parts expect a text
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _text(part: models.ItemPart, where: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in (*TEXTS, "refusal"):
        raise unsupported(where, f"parts of type {quoted(part.type)!r}")
    if text is None:
        raise invalid(f"{where}: a part of type {part.type} needs its text", where)
    return text


def turns_of_output(output: Iterable[object]) -> list[Turn]:
    """Return the output items of a response as turns."""
    return [turn_of(models.InputItem.model_validate(item), "output") for item in output]


def joined(turns: Iterable[Turn]) -> list[Turn]:
    """Return turns as the messages of a chat: an assistant's reasoning, text and calls become one message."""
    found: list[Turn] = []
    for turn in turns:
        last = found[-1] if found else None
        if last is None or turn["role"] != "assistant" or last["role"] != "assistant":
            found.append(dict(turn))
        elif "tool_calls" in turn:
            last["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]
        elif last["content"] or "tool_calls" in last or "reasoning_content" in turn:
            found.append(dict(turn))
        else:
            last["content"] = turn["content"]
    return found


def _function(place: int, tool: models.FunctionTool) -> Json:
    where = f"tools.{place}"
    if tool.type != "function":
        raise unsupported("tools", f"{where} is a tool of the type {quoted(tool.type)!r}")
    if not tool.name:
        raise invalid(f"{where}: a function needs a name", "tools")
    function: Json = {"name": tool.name}
    for name, value in (("description", tool.description), ("parameters", tool.parameters)):
        if value is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Json) -> object:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, dict):
        raise unsupported("tool_choice", "only none, auto, required, or a function")
    return choice


def _format(given: Json) -> Json:
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: given[key] for key in given if key != "type"}}


def _shown(body: models.ResponsesBody) -> Json:
    """Return the fields of the request that its response repeats."""
    text = body.text.model_dump(exclude_none=True) if body.text is not None else {}
    tools = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": bool(tool.strict),
        }
        for tool in body.tools or ()
    ]
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
