"""GET, DELETE and cancel of a stored response. `OpenAiEndpoints` serves POST /v1/responses."""

import msgspec
from aiohttp import web

from controller.frontend.errors import unsupported
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.responses import json_answer
from controller.frontend.openai.request_head import credentials, id_header
from controller.frontend.openai.responses.store import StoredResponse

PATH = "/v1/responses/"


class DeletedResponse(msgspec.Struct):
    """The confirmation that a response was deleted."""

    id: str
    object: str = "response.deleted"
    deleted: bool = True


async def retrieve(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.Response:
    """Return a response. Raise ApiError if it is not available."""
    if request.query.get("stream", "false").lower() == "true":
        raise unsupported("stream", "a stored response is returned as a whole")
    found = await _found(endpoints, request, "get")
    return json_answer(found.body, id_header(request))


async def cancel(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.Response:
    """Cancel a response in progress, and return it. A response that has ended is returned unchanged."""
    found = await _found(endpoints, request, "cancel")
    return json_answer(found.body, id_header(request))


async def delete(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.Response:
    """Delete a response. Raise ApiError if it is not available."""
    found = await _found(endpoints, request, "delete")
    return json_answer(msgspec.json.encode(DeletedResponse(found.id)), id_header(request))


async def _found(endpoints: OpenAiEndpoints, request: web.BaseRequest, verb: str) -> StoredResponse:
    keys = endpoints.keys
    owner = keys.named(credentials(request.headers)) if keys is not None else ""
    id = request.path.removeprefix(PATH).removesuffix("/cancel")
    return await endpoints.responses.find(verb, id, owner)
