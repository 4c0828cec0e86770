"""What the bodies of /tokenize and /detokenize may have. Their shapes are vLLM's."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from controller.frontend.requests.bodies import MESSAGES_MAX, TOOLS_MAX, ChatMessage, Token

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
