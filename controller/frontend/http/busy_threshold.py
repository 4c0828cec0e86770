"""The endpoint /busy_threshold: reads and sets the load above which a model's workers count as busy.

The format is Dynamo's (dynamo-facts 7.4).

    GET     the thresholds of every model that has any
    POST    {"model": …, "active_decode_blocks_threshold": 0.85, …}: given values are set, null leaves a value unchanged. If all
            are null, return the model's values

New values are written to the journal and apply on every frontend of the fleet. Errors are {"error": "…"}.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from controller.deciders.thresholds import BusyThresholds
from controller.frontend.errors import ApiError, quoted
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.responses import JSON
from controller.frontend.openai.request_models import BusyThresholdBody
from events.observations import BusyThresholdsSet


async def thresholds(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Return the thresholds of every model that has any."""
    monitor, known = endpoints.director.routing.monitor, endpoints.director.table.known
    found = [(model, monitor.thresholds(model)) for model in sorted(known)]
    return web.json_response({"thresholds": [_shown(model, one) for model, one in found if one]})


async def set_thresholds(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Set a model's thresholds, or return them if none are given."""
    director = endpoints.director
    if request.content_type != JSON:
        return _error(415, f"Expected request with `Content-Type: {JSON}`")
    try:
        body = BusyThresholdBody.model_validate(await endpoints.intake.parsed("json", request))
    except ApiError as error:
        return _error(error.status, str(error))
    except ValidationError as error:
        return _error(422, "; ".join(_sentence(dict(one)) for one in error.errors()))
    try:
        given = body.given
    except ValueError as error:
        return _error(400, str(error))
    monitor = director.routing.monitor
    now = monitor.thresholds(body.model)
    if not given:
        return web.json_response(_shown(body.model, now))
    if body.model not in director.table.known:
        name = quoted(body.model)
        return _error(404, f"Model '{name}' not found. Thresholds can only be set for discovered models.")
    director.set_thresholds(BusyThresholdsSet(frontend="", model=body.model, **asdict(given)))
    return web.json_response(_shown(body.model, given.over(now)))


def _shown(model: str, thresholds: BusyThresholds) -> Mapping[str, Any]:
    return {
        "model": model,
        "active_decode_blocks_threshold": thresholds.active_decode_blocks,
        "active_prefill_tokens_threshold": thresholds.active_prefill_tokens,
        "active_prefill_tokens_threshold_frac": thresholds.active_prefill_tokens_frac,
    }


def _error(status: int, why: str) -> web.Response:
    return web.json_response({"error": why}, status=status)


def _sentence(error: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"])
    return f"{place}: {error['msg']}" if place else str(error["msg"])
