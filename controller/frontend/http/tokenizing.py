"""What are the tokens of a text, and the text of tokens? POST /tokenize and POST /detokenize, as vLLM answers them.

The tokenizer is the model's, here in the frontend: whatever engine the model's workers have, the answer is the same.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from pydantic import BaseModel

from controller.frontend.director import Director
from controller.frontend.errors import invalid, unavailable
from controller.frontend.http.served_models import chosen_model, group_of
from controller.frontend.requests.bodies import validated
from controller.frontend.requests.intake import Intake
from controller.frontend.requests.reading import id_header, unknown_fields
from controller.frontend.requests.refused_fields import refuse
from controller.frontend.requests.schema import plain_message, read_json
from controller.frontend.requests.tokenize_bodies import (
    REFUSED_BY_TOKENIZE,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizePromptBody,
)
from controller.frontend.responses.small_answers import Detokenized, Tokenized
from controller.frontend.text.chat_templates import BadTemplate
from controller.frontend.text.tokenizer import LONG_TEXT, TokenizerMissing, Tokens
from controller.router.endpoints import EndpointGroup

B = TypeVar("B", bound=BaseModel)


class TokenizerEndpoints:
    """Answers with the tokenizers of what this director routes to."""

    def __init__(
        self, director: Director, tokens: Callable[[str], Awaitable[Tokens]], intake: Intake
    ) -> None:
        """`tokens` returns a tokenizer by its name, or raises TokenizerMissing."""
        self._director = director
        self._tokens = tokens
        self._intake = intake

    async def tokenize(self, request: web.BaseRequest) -> web.Response:
        """Answer POST /tokenize. Raise ApiError."""
        data = await self._json(request)
        chat = isinstance(data, dict) and "messages" in data
        if chat and "prompt" in data:
            raise invalid("either prompt, or messages", "prompt")
        asked = validated(TokenizeChatBody, data) if chat else validated(TokenizePromptBody, data)
        unknown = refuse(asked.model_extra, REFUSED_BY_TOKENIZE)
        tokens, group = await self._tokenizer(asked.model)
        text = asked.prompt if isinstance(asked, TokenizePromptBody) else _rendered(asked, tokens)
        special, read = asked.add_special_tokens, self._intake.long_texts.read
        found = await tokens.encode_soon(text, special=special, shared=False, beside=read)
        names = tokens.names_of(found) if asked.return_token_strs else None
        return _answer(request, Tokenized(len(found), group.context_tokens, found, names), unknown)

    async def detokenize(self, request: web.BaseRequest) -> web.Response:
        """Answer POST /detokenize. Raise ApiError."""
        asked = validated(DetokenizeBody, await self._json(request))
        unknown = refuse(asked.model_extra, {})
        tokens, _ = await self._tokenizer(asked.model)
        highest = max(asked.tokens, default=0)
        if highest >= tokens.size:
            raise invalid(f"tokens: the token {highest} is not below {tokens.size}", "tokens")
        if len(asked.tokens) < LONG_TEXT:
            text = tokens.decode(asked.tokens, special=True)
        else:
            decode = partial(tokens.decode, asked.tokens, special=True)
            text = await self._intake.long_texts.read(len(asked.tokens), decode)
        return _answer(request, Detokenized(text), unknown)

    async def _json(self, request: web.BaseRequest) -> Any:
        return read_json(await self._intake.body(request))

    async def _tokenizer(self, name: str | None) -> tuple[Tokens, EndpointGroup]:
        model = chosen_model(self._director, name)
        group = group_of(self._director, model)
        try:
            return await self._tokens(group.endpoints[0].lineage[1]), group
        except TokenizerMissing as error:
            raise unavailable(f"the tokenizer of {model} cannot be read", "tokenizer_missing", 30) from error


def _rendered(asked: TokenizeChatBody, tokens: Tokens) -> str:
    """Return a conversation as the model would read it. Raise ApiError (400)."""
    if tokens.template is None:
        raise invalid("this model has no chat template; give a prompt", "messages", "no_chat_template")
    messages = [plain_message(place, message) for place, message in enumerate(asked.messages)]
    names: dict[str, Any] = {"tools": asked.tools} if asked.tools else {}
    names |= asked.chat_template_kwargs or {}
    names["add_generation_prompt"] = asked.add_generation_prompt
    try:
        return tokens.template.render(messages, **names)
    except BadTemplate as error:
        raise invalid(str(error), "messages") from error


def _answer(request: web.BaseRequest, answer: msgspec.Struct, unknown: tuple[str, ...]) -> web.Response:
    headers = id_header(request)
    if unknown:
        headers["Warning"] = unknown_fields(unknown)
    body = msgspec.json.encode(answer)
    return web.Response(body=body, content_type="application/json", headers=headers)
