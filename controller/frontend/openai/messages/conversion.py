"""Converts bodies of Anthropic's Messages API into chats, so that one parser and one path serve both.

    system, blocks, tools with input_schema ──▶ messages, tool_calls, functions ──▶ `parse_any_chat` ──▶ ParsedRequest

A conversation that ends with an assistant's message is continued: the answer is the rest of that message.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from controller.frontend.errors import ApiError, invalid, quoted, unsupported
from controller.frontend.openai.messages import models
from controller.frontend.openai.request_models import PARTS_MAX, Json
from controller.frontend.openai.request_parser import ParsedRequest, parse_any_chat, refuse, validated

ChatMessage = dict[str, Any]
PLAIN = {"role", "content"}
THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables by which chat templates switch the thinking: Qwen's and GLM's name, DeepSeek's and Granite's name."""
BILLING = "x-anthropic-billing-header:"
"""The beginning of a system block that Claude Code changes with each request. It would prevent any cached prefix."""


def parse_messages(data: object) -> ParsedRequest:
    """Parse a decoded body of /v1/messages. If a field is invalid, raise ApiError (400) that names the field."""
    body = validated(models.MessagesBody, data)
    unknown = refuse(body.model_extra, models.REFUSED_BY_MESSAGES, models.IGNORED_BY_MESSAGES)
    own = {
        "max_tokens": body.max_tokens,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "user": body.metadata.user_id if body.metadata is not None else None,
    }
    return _parsed(body, {name: value for name, value in own.items() if value is not None}, unknown)


def parse_count_tokens(data: object) -> ParsedRequest:
    """Parse a decoded body of /v1/messages/count_tokens, which may have the other fields of /v1/messages too."""
    body = validated(models.CountTokensBody, data)
    unknown = refuse(body.model_extra, models.REFUSED_BY_MESSAGES, models.IGNORED_BY_COUNT_TOKENS)
    return _parsed(body, {}, unknown)


def _parsed(body: models.CountTokensBody, own: Json, unknown: tuple[str, ...]) -> ParsedRequest:
    chat: Json = {"model": body.model, "messages": _messages(body), **own}
    if body.tools:
        chat["tools"] = [_function(place, tool) for place, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        chat |= _tool_choice(body.tool_choice)
    if body.messages[-1].role == "assistant":
        if any(block.type == "tool_use" for block in _blocks(body.messages[-1].content)):
            where = f"messages.{len(body.messages) - 1}.content"
            raise invalid(f"{where}: tool_use in the last message needs a tool_result after it", where)
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    reads: dict[str, tuple[str, ...]] = {}
    thinking, config = body.thinking, body.output_config
    if thinking is not None:
        unknown += tuple(f"thinking.{name}" for name in thinking.model_extra or ())
        chat["include_reasoning"] = thinking.type != "disabled" and thinking.display != "omitted"
        if thinking.type != "adaptive":
            chat["chat_template_kwargs"] = dict.fromkeys(THINKING_VARIABLES, thinking.type == "enabled")
            reads["thinking"] = THINKING_VARIABLES
    if config is not None:
        unknown += tuple(f"output_config.{name}" for name in config.model_extra or ())
        if config.effort is not None:
            chat["reasoning_effort"] = config.effort
            reads["output_config.effort"] = ("reasoning_effort",)
        if config.format is not None:
            chat["response_format"] = _format(config.format)
    return msgspec.structs.replace(
        parse_any_chat(chat), api="messages", template_reads=reads, unknown=unknown
    )


def _messages(body: models.CountTokensBody) -> list[ChatMessage]:
    """Return the conversation as a chat. Consecutive texts of one role become one message, as in Anthropic's API."""
    found: list[ChatMessage] = []
    if body.system is not None:
        parts = [part for part in _texts(body.system, "system") if not part["text"].startswith(BILLING)]
        if parts:
            found.append({"role": "system", "content": parts})
    for place, message in enumerate(body.messages):
        where = f"messages.{place}.content"
        convert = _assistant if message.role == "assistant" else _user
        for converted in convert(message.role, _blocks(message.content), where):
            if found and _continues(found[-1], converted):
                found[-1]["content"] += converted["content"]
            else:
                found.append(converted)
    for one in found:
        texts = [part["text"] for part in one["content"]]
        if one["role"] == "assistant" or len(texts) == 1:  # templates without parts expect a text
            one["content"] = "".join(texts)
    return found


def _continues(last: ChatMessage, next: ChatMessage) -> bool:
    """Return whether two messages become one: both have the same role, and nothing but few enough texts."""
    plain = last.keys() == next.keys() == PLAIN and last["role"] == next["role"]
    return plain and len(last["content"]) + len(next["content"]) <= PARTS_MAX


def _blocks(content: str | Sequence[models.ContentBlock]) -> Sequence[models.ContentBlock]:
    return [models.ContentBlock(type="text", text=content)] if isinstance(content, str) else content


def _texts(content: str | Iterable[models.ContentPart] | None, where: str) -> list[dict[str, str]]:
    """Return a text, or text blocks, as parts of a chat message. Raise ApiError (400) for other blocks."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    return [_text(part.type, part.text, f"{where}.{place}") for place, part in enumerate(content)]


def _text(kind: str, text: str | None, where: str) -> dict[str, str]:
    if kind != "text":
        raise unsupported(where, f"blocks of type {quoted(kind)!r}")
    if text is None:
        raise invalid(f"{where}: a text block needs text", where)
    return {"type": "text", "text": text}


def _user(role: str, blocks: Sequence[models.ContentBlock], where: str) -> Iterator[ChatMessage]:
    """Yield a user's or a system's message as chat messages: one for each tool result, and one for each run of texts."""
    parts: list[dict[str, str]] = []
    for place, block in enumerate(blocks):
        at = f"{where}.{place}"
        if block.type != "tool_result":
            parts.append(_text(block.type, block.text, at))
            continue
        if not block.tool_use_id:
            raise invalid(f"{at}: a tool_result block needs tool_use_id", at)
        if parts:
            yield {"role": role, "content": parts}
            parts = []
        # parts are kept even if there is none, because a tool may return nothing
        content = _texts(block.content, f"{at}.content") or _texts("", at)
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if parts or not blocks:
        if not parts:
            raise invalid(f"{where}: a message must have content", where)
        yield {"role": role, "content": parts}


def _assistant(role: str, blocks: Sequence[models.ContentBlock], where: str) -> Iterator[ChatMessage]:
    """Yield an assistant's message as one chat message with its text, thinking and tool calls."""
    parts: list[dict[str, str]] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for place, block in enumerate(blocks):
        at = f"{where}.{place}"
        if block.type == "tool_use":
            if not block.id or not block.name:
                raise invalid(f"{at}: a tool_use block needs id and name", at)
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":  # only its author can read it
            parts.append(_text(block.type, block.text, at))
    message: ChatMessage = {"role": role, "content": parts or _texts("", where)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    yield message


def _function(place: int, tool: models.ToolParam) -> Json:
    where = f"tools.{place}"
    if tool.type not in (None, "custom"):
        raise unsupported("tools", f"{where} is a tool of the type {quoted(tool.type)!r}")
    if tool.input_schema is None:
        raise invalid(f"{where}: a tool needs input_schema", "tools")
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(choice: models.ToolChoiceParam) -> Json:
    chosen: object = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if choice.type == "tool":
        if not choice.name:
            raise invalid("tool_choice: type tool needs a name", "tool_choice")
        chosen = {"type": "function", "function": {"name": choice.name}}
    found: Json = {"tool_choice": chosen}
    if choice.disable_parallel_tool_use:
        found["parallel_tool_calls"] = False
    return found


def _format(given: Json) -> Json:
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise _bad_format()
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"]}}


def _bad_format() -> ApiError:
    return invalid("output_config.format must have type json_schema and a schema", "output_config")
