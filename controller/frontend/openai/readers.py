"""The parsers of request bodies by name, and the types of what they return: for the event loop and for parser processes alike."""

from collections.abc import Callable
from typing import Any

from controller.frontend.openai.request_parser import ParsedRequest, read_chat, read_completion, read_json
from controller.frontend.openai.tokenize_bodies import (
    DetokenizeRequest,
    TokenizeRequest,
    read_detokenize,
    read_tokenize,
)

READERS: dict[str, tuple[Callable[[bytes], Any], Any]] = {
    "chat_completions": (read_chat, ParsedRequest),
    "completions": (read_completion, ParsedRequest),
    "tokenize": (read_tokenize, TokenizeRequest),
    "detokenize": (read_detokenize, DetokenizeRequest),
    "json": (read_json, Any),
}
