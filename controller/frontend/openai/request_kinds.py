"""The table of body parsers, by kind of body."""

from collections.abc import Callable
from typing import Any

from controller.frontend.openai import request_parser as parser
from controller.frontend.openai.messages.conversion import parse_count_tokens, parse_messages
from controller.frontend.openai.request_parser import ParsedRequest
from controller.frontend.openai.responses.conversion import parse_responses

KINDS: dict[str, tuple[Callable[[object], Any], type]] = {
    "chat_completions": (parser.parse_any_chat, ParsedRequest),
    "completions": (parser.parse_completion, ParsedRequest),
    "messages": (parse_messages, ParsedRequest),
    "count_tokens": (parse_count_tokens, ParsedRequest),
    "responses": (parse_responses, ParsedRequest),
    "tokenize": (parser.parse_tokenize, parser.TokenizeRequest),
    "detokenize": (parser.parse_detokenize, parser.DetokenizeRequest),
    "json": (lambda data: data, object),
}
"""By kind of body: the parser of the decoded body, and the type of its result."""


def parse_body(kind: str, body: bytes) -> Any:
    """Parse a body of this kind (a key of KINDS). If a field is invalid, raise ApiError (400) that names the field."""
    if kind == "chat_completions":
        return parser.read_chat(body)
    return KINDS[kind][0](parser.read_json(body))
