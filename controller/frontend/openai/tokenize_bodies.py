"""What the bodies of /tokenize and /detokenize may have. Their shapes are vLLM's."""

from typing import Any

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from controller.frontend.errors import invalid
from controller.frontend.openai.refused_fields import refuse
from controller.frontend.openai.request_models import MESSAGES_MAX, TOOLS_MAX, ChatMessage, Token, validated
from controller.frontend.openai.request_parser import plain_message, read_json

TEXT_CHARS_MAX = 2**20
TOKENS_MAX = 2**18  # of a list: four times as many characters, or so


class TokenizerBody(BaseModel):
    """What all of them share."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = Field(default=None, description="may be left out where only one is served")


class TokenizePromptBody(TokenizerBody):
    """POST /tokenize, of a text."""

    prompt: str = Field(max_length=TEXT_CHARS_MAX, description="the text")
    add_special_tokens: bool = Field(
        default=True, description="with those that the tokenizer puts around a prompt"
    )
    return_token_strs: bool | None = Field(
        default=None, description="give what the vocabulary calls each token"
    )


class TokenizeChatBody(TokenizerBody):
    """POST /tokenize, of a conversation."""

    messages: list[ChatMessage] = Field(
        min_length=1, max_length=MESSAGES_MAX, description="the conversation so far"
    )
    add_generation_prompt: bool = Field(
        default=True, description="with what the chat template puts before an answer"
    )
    add_special_tokens: bool = Field(
        default=False, description="with those that the tokenizer puts around a prompt"
    )
    return_token_strs: bool | None = Field(
        default=None, description="give what the vocabulary calls each token"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="names that the chat template may read"
    )
    tools: list[dict[str, Any]] | None = Field(
        default=None, max_length=TOOLS_MAX, description="for the chat template"
    )


class DetokenizeBody(TokenizerBody):
    """POST /detokenize."""

    tokens: list[Token] = Field(max_length=TOKENS_MAX, description="token ids")


REFUSED_BY_TOKENIZE: dict[str, tuple[Any, ...]] = {
    "chat_template": (None,),
    "continue_final_message": (None, False),
}


class TokenizeRequest(Struct, kw_only=True, frozen=True):
    """What a body of /tokenize asks for: the tokens of a text, or of a conversation."""

    model: str | None
    text: str | None = None  # None: it has messages
    messages: list[dict[str, Any]] = []
    template_names: dict[str, Any] = {}  # for the chat template
    special: bool
    token_strs: bool
    unknown: tuple[str, ...] = ()


class DetokenizeRequest(Struct, kw_only=True, frozen=True):
    """What a body of /detokenize asks for."""

    model: str | None
    tokens: list[int]
    unknown: tuple[str, ...] = ()


def read_tokenize(body: bytes) -> TokenizeRequest:
    """Return what a body asks for. Raise ApiError (400), naming the field."""
    data = read_json(body)
    if isinstance(data, dict) and "messages" in data:
        if "prompt" in data:
            raise invalid("either prompt, or messages", "prompt")
        return _tokenize_chat(validated(TokenizeChatBody, data))
    asked = validated(TokenizePromptBody, data)
    return TokenizeRequest(
        model=asked.model,
        text=asked.prompt,
        special=asked.add_special_tokens,
        token_strs=bool(asked.return_token_strs),
        unknown=refuse(asked.model_extra, REFUSED_BY_TOKENIZE),
    )


def _tokenize_chat(asked: TokenizeChatBody) -> TokenizeRequest:
    unknown = refuse(asked.model_extra, REFUSED_BY_TOKENIZE)
    names: dict[str, Any] = {"tools": asked.tools} if asked.tools else {}
    names |= asked.chat_template_kwargs or {}
    names["add_generation_prompt"] = asked.add_generation_prompt
    return TokenizeRequest(
        model=asked.model,
        messages=[plain_message(place, message) for place, message in enumerate(asked.messages)],
        template_names=names,
        special=asked.add_special_tokens,
        token_strs=bool(asked.return_token_strs),
        unknown=unknown,
    )


def read_detokenize(body: bytes) -> DetokenizeRequest:
    """Return what a body asks for. Raise ApiError (400), naming the field."""
    asked = validated(DetokenizeBody, read_json(body))
    return DetokenizeRequest(model=asked.model, tokens=asked.tokens, unknown=refuse(asked.model_extra, {}))
