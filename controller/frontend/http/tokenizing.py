"""POST /tokenize and POST /detokenize, compatible with vLLM.

The frontend runs the model's own tokenizer, so the result is the same for all engines.
"""

from functools import partial

import msgspec
from aiohttp import web

from controller.frontend.errors import invalid
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.responses import json_answer
from controller.frontend.http.served_models import chosen_model, group_of
from controller.frontend.openai.request_head import id_header, unknown_fields
from controller.frontend.openai.request_parser import DetokenizeRequest, TokenizeRequest
from controller.frontend.openai.text.chat_templates import BadTemplate
from controller.frontend.openai.text.tokenizer import Tokens
from controller.router.endpoints import EndpointGroup


class Tokenized(msgspec.Struct):
    """The tokens of a text."""

    count: int
    max_model_len: int  # maximum tokens of a prompt and its answer together
    tokens: list[int]
    token_strs: list[str] | None = None  # each token's name in the vocabulary; None if not requested


class Detokenized(msgspec.Struct):
    """The text of tokens."""

    prompt: str


async def tokenize(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.Response:
    """Handle POST /tokenize. Raise ApiError if the request is invalid, or no worker serves the model."""
    body: TokenizeRequest = await endpoints.intake.parsed("tokenize", request)
    tokens, group = await _tokenizer(endpoints, body.model)
    text = _rendered(body, tokens) if body.text is None else body.text
    threads = endpoints.intake.long_texts
    found = await tokens.encode_soon(text, threads, special=body.special, shared=False)
    names = tokens.names_of(found) if body.token_strs else None
    return _answer(request, Tokenized(len(found), group.shown_context, found, names), body.unknown)


async def detokenize(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.Response:
    """Handle POST /detokenize. Raise ApiError if the request is invalid, or no worker serves the model."""
    body: DetokenizeRequest = await endpoints.intake.parsed("detokenize", request)
    tokens, _ = await _tokenizer(endpoints, body.model)
    threads = endpoints.intake.long_texts
    highest = max(body.tokens, default=0)
    if highest >= tokens.size:
        raise invalid(f"tokens: the token {highest} is not below {tokens.size}", "tokens")
    text = await threads.read(len(body.tokens), partial(tokens.decode, body.tokens, special=True))
    return _answer(request, Detokenized(text), body.unknown)


async def _tokenizer(endpoints: OpenAiEndpoints, name: str | None) -> tuple[Tokens, EndpointGroup]:
    model = chosen_model(endpoints.director, name)
    group = group_of(endpoints.director, model)
    return await endpoints.tokens_of(model, group.endpoints[0].lineage), group


def _rendered(body: TokenizeRequest, tokens: Tokens) -> str:
    """Render a conversation to a prompt with the model's chat template. Raise ApiError (400) if that is not possible."""
    if tokens.template is None:
        raise invalid("this model has no chat template; give a prompt", "messages", "no_chat_template")
    try:
        render = tokens.template.render_continued if body.continues else tokens.template.render
        return render(body.messages, **body.template_names)
    except BadTemplate as error:
        raise invalid(str(error), "messages") from error


def _answer(request: web.BaseRequest, answer: msgspec.Struct, unknown: tuple[str, ...]) -> web.Response:
    headers = id_header(request)
    if unknown:
        headers["Warning"] = unknown_fields(unknown)
    return json_answer(msgspec.json.encode(answer), headers)
