"""POST /v1/messages/count_tokens. `OpenAiEndpoints` serves /v1/messages."""

import msgspec
from aiohttp import web

from controller.frontend.errors import ApiError, invalid
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.responses import json_answer
from controller.frontend.http.served_models import chosen_model, group_of
from controller.frontend.openai.completion import rendered
from controller.frontend.openai.field_names import in_terms_of
from controller.frontend.openai.request_head import add_warning, id_header, unknown_fields
from controller.frontend.openai.request_parser import ParsedRequest
from controller.frontend.openai.text.chat_templates import BadTemplate


class CountedTokens(msgspec.Struct):
    """The number of tokens of a prompt."""

    input_tokens: int


async def count_tokens(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.Response:
    """Handle a request. Raise ApiError if the request is invalid, or no worker serves the model."""
    try:
        parsed: ParsedRequest = await endpoints.intake.parsed("count_tokens", request)
        model = chosen_model(endpoints.director, parsed.model)
        group = group_of(endpoints.director, model)
        tokens = await endpoints.tokens_of(model, group.endpoints[0].lineage)
        text = rendered(parsed, tokens.template)
    except BadTemplate as error:
        raise invalid(str(error), "messages") from error
    except ApiError as error:
        raise in_terms_of("messages", error) from error
    found = await tokens.encode_soon(text, endpoints.intake.long_texts, special=False, shared=False)
    headers = id_header(request)
    if parsed.unknown:
        add_warning(headers, unknown_fields(parsed.unknown))
    return json_answer(msgspec.json.encode(CountedTokens(len(found))), headers)
