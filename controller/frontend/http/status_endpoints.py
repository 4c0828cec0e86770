"""Endpoints for served models, version, health, metrics and busy thresholds.

/busy_threshold reads and sets the load above which a model's workers count as busy, in Dynamo's format:

    GET     the thresholds of every model that has any
    POST    {"model": …, "active_decode_blocks_threshold": 0.85, …}: given values are set, null leaves a value unchanged.
            If all are null, the model's values are returned

New values are written to the journal and apply on every frontend of the fleet. An error has the body {"error": "…"}.
"""

from collections.abc import Mapping
from importlib import metadata

import msgspec
from aiohttp import web
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from controller.deciders.thresholds import BusyThresholds
from controller.frontend.errors import ApiError, quoted, starting
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.responses import JSON, json_answer
from controller.frontend.http.served_models import ModelEntry, model_entry, not_served, served_names
from controller.frontend.openai.request_models import BusyThresholdBody
from events.process.exposition import packed

VERSION = metadata.version("holdfast")


class Version(msgspec.Struct):
    """The version of Holdfast."""

    version: str


class ServerLoad(msgspec.Struct):
    """The load of a frontend, in vLLM's form."""

    server_load: int  # completion requests in progress, also queued ones


class ModelList(msgspec.Struct):
    """All served models."""

    data: list[ModelEntry]
    object: str = "list"


async def models(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """List the served models. Raise ApiError (503) while this frontend does not know yet which models are served."""
    director = endpoints.director
    if not director.live and not director.table.served:
        raise starting()
    entries = [model_entry(director, *names) for names in served_names(director).items()]
    return json_answer(msgspec.json.encode(ModelList(entries)))


async def model(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Describe a served model.

    If no worker serves the model, raise ApiError: 503 if a worker may serve the model soon, otherwise 404.
    """
    director, name = endpoints.director, request.path.removeprefix("/v1/models/")
    found = served_names(director).get(name)
    if found is None:
        raise not_served(director, name)
    return json_answer(msgspec.json.encode(model_entry(director, name, found)))


async def version(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Return the version of Holdfast."""
    return json_answer(msgspec.json.encode(Version(VERSION)))


async def load(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Return the number of completion requests in progress at this frontend."""
    return json_answer(msgspec.json.encode(ServerLoad(endpoints.answering)))


async def ping(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Return 200 while requests can be served, otherwise 503."""
    return web.Response(status=200 if endpoints.ready else 503)


async def health(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Report the health of this frontend, with a message and the state of each worker. The HTTP status is 200 or 503."""
    monitor = endpoints.director.routing.monitor
    if endpoints.ready:
        status, message = "healthy", "serving requests"
    elif endpoints.draining:
        status, message = "shutting_down", "finishing running streams, accepting no new requests"
    elif monitor.servable:
        status, message = "not_ready", "the port is about to open"
    else:
        status, message = "not_ready", "no worker in service is reachable yet"
    body = {"status": status, "message": message, "workers": monitor.roll()}
    return web.json_response(body, status=200 if status == "healthy" else 503)


async def live(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Return 200 while the process is alive."""
    return web.json_response({"status": "live", "message": "Service is live"})


async def metrics(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Return the metrics in Prometheus' text format."""
    accepts = ",".join(request.headers.getall("Accept-Encoding", ()))
    body, coded = packed(endpoints.director.render_metrics(), accepts)
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4", **coded})


async def thresholds(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Return the busy thresholds of every model for which a threshold is set."""
    monitor, known = endpoints.director.routing.monitor, endpoints.director.table.known
    found = [(model, monitor.thresholds(model)) for model in sorted(known)]
    return web.json_response({"thresholds": [_shown(model, one) for model, one in found if one]})


async def set_thresholds(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Set the busy thresholds of a model. If the body contains no threshold, return the current ones."""
    director = endpoints.director
    if request.content_type != JSON:
        return _error(415, f"Expected request with `Content-Type: {JSON}`")
    try:
        body = BusyThresholdBody.model_validate(await endpoints.intake.parsed("json", request))
        given = body.thresholds
    except ApiError as error:
        return _error(error.status, str(error))
    except ValidationError as error:
        return _error(422, "; ".join(_sentence(one) for one in error.errors()))
    except ValueError as error:
        return _error(400, str(error))
    monitor = director.routing.monitor
    now = monitor.thresholds(body.model)
    if not given:
        return web.json_response(_shown(body.model, now))
    if body.model not in director.table.known:
        name = quoted(body.model)
        return _error(404, f"Model '{name}' not found. Thresholds can only be set for discovered models.")
    director.set_thresholds(body.model, given)
    return web.json_response(_shown(body.model, given.over(now)))


def _shown(model: str, thresholds: BusyThresholds) -> Mapping[str, object]:
    return {
        "model": model,
        "active_decode_blocks_threshold": thresholds.active_decode_blocks,
        "active_prefill_tokens_threshold": thresholds.active_prefill_tokens,
        "active_prefill_tokens_threshold_frac": thresholds.active_prefill_tokens_frac,
    }


def _error(status: int, why: str) -> web.Response:
    return web.json_response({"error": why}, status=status)


def _sentence(error: ErrorDetails) -> str:
    place = ".".join(str(part) for part in error["loc"])
    return f"{place}: {error['msg']}" if place else error["msg"]
