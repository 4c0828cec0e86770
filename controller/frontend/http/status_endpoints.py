"""Endpoints for served models, version, health and metrics."""

import msgspec
from aiohttp import web

from controller.frontend.errors import starting
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.openapi import VERSION
from controller.frontend.http.responses import json_answer
from controller.frontend.http.served_models import model_entry, not_served, served_names
from controller.frontend.openai.response_models import ModelList, Version
from events.process.exposition import packed


async def models(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """List the served models. Raise ApiError (503) while they are not known."""
    director = endpoints.director
    if not director.live and not director.table.served:
        raise starting()
    entries = [model_entry(director, *names) for names in served_names(director)]
    return json_answer(msgspec.json.encode(ModelList(entries)))


async def model(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Describe a served model. Raise ApiError (404, 503) if it is not served."""
    director, name = endpoints.director, request.path.removeprefix("/v1/models/")
    found = dict(served_names(director)).get(name)
    if found is None:
        raise not_served(director, name)
    return json_answer(msgspec.json.encode(model_entry(director, name, found)))


async def version(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Return the version of Holdfast."""
    return json_answer(msgspec.json.encode(Version(VERSION)))


async def ping(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Return 200 while requests can be served."""
    return web.Response(status=200 if endpoints.ready else 503)


async def health(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Return whether requests can be served, with a message, and the state of each worker."""
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
