"""POST /tokenize and POST /detokenize: the tokens of a text and the text of tokens, as vLLM answers them.

The tokenizer is the model's, here in the frontend: whatever engine the model's workers have, the answer is the same.
"""

from functools import partial

import msgspec
from aiohttp import web

from controller.frontend.director import Director
from controller.frontend.errors import invalid, unavailable
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.served_models import chosen_model, group_of
from controller.frontend.openai.request_head import id_header, unknown_fields
from controller.frontend.openai.request_parser import DetokenizeRequest, TokenizeRequest
from controller.frontend.openai.response_models import Detokenized, Tokenized
from controller.frontend.openai.text.chat_templates import BadTemplate
from controller.frontend.openai.text.tokenizer import LONG_TEXT, TokenizerMissing, Tokens
from controller.router.endpoints import EndpointGroup


class TokenizerEndpoints:
    """Answers with the tokenizers of what this director routes to."""

    def __init__(self, director: Director, openai: OpenAiEndpoints) -> None:
        """Read bodies and texts within the bounds of `openai`."""
        self._director = director
        self._tokens = openai.tokens
        self._intake = openai.intake

    async def tokenize(self, request: web.BaseRequest) -> web.Response:
        """Answer POST /tokenize. Raise ApiError."""
        asked: TokenizeRequest = await self._intake.parsed("tokenize", request)
        tokens, group = await self._tokenizer(asked.model)
        text = _rendered(asked, tokens) if asked.text is None else asked.text
        threads = self._intake.long_texts
        found = await tokens.encode_soon(text, special=asked.special, shared=False, threads=threads)
        names = tokens.names_of(found) if asked.token_strs else None
        return _answer(request, Tokenized(len(found), group.shown_context, found, names), asked.unknown)

    async def detokenize(self, request: web.BaseRequest) -> web.Response:
        """Answer POST /detokenize. Raise ApiError."""
        asked: DetokenizeRequest = await self._intake.parsed("detokenize", request)
        tokens, _ = await self._tokenizer(asked.model)
        highest = max(asked.tokens, default=0)
        if highest >= tokens.size:
            raise invalid(f"tokens: the token {highest} is not below {tokens.size}", "tokens")
        if len(asked.tokens) < LONG_TEXT:
            text = tokens.decode(asked.tokens, special=True)
        else:
            decode = partial(tokens.decode, asked.tokens, special=True)
            text = await self._intake.long_texts.read(len(asked.tokens), decode)
        return _answer(request, Detokenized(text), asked.unknown)

    async def _tokenizer(self, name: str | None) -> tuple[Tokens, EndpointGroup]:
        model = chosen_model(self._director, name)
        group = group_of(self._director, model)
        try:
            return await self._tokens(group.endpoints[0].lineage[1]), group
        except TokenizerMissing as error:
            raise unavailable(f"the tokenizer of {model} cannot be read", "tokenizer_missing", 30) from error


def _rendered(asked: TokenizeRequest, tokens: Tokens) -> str:
    """Return a conversation as the model would read it. Raise ApiError (400)."""
    if tokens.template is None:
        raise invalid("this model has no chat template; give a prompt", "messages", "no_chat_template")
    try:
        return tokens.template.render(asked.messages, **asked.template_names)
    except BadTemplate as error:
        raise invalid(str(error), "messages") from error


def _answer(request: web.BaseRequest, answer: msgspec.Struct, unknown: tuple[str, ...]) -> web.Response:
    headers = id_header(request)
    if unknown:
        headers["Warning"] = unknown_fields(unknown)
    body = msgspec.json.encode(answer)
    return web.Response(body=body, content_type="application/json", headers=headers)
