"""Looks up served models by name or alias, and the group of workers that serves a model."""

import msgspec
from msgspec import UNSET

from controller.frontend.director import Director
from controller.frontend.errors import ApiError, invalid, starting, unavailable, unknown_model
from controller.router.endpoints import EndpointGroup


class ModelEntry(msgspec.Struct):
    """One served model."""

    id: str
    max_model_len: int  # maximum tokens of a prompt and its answer together
    object: str = "model"
    created: int = 0  # creation time is unknown
    owned_by: str = "holdfast"
    root: str | msgspec.UnsetType = msgspec.UNSET  # of an alias: the model that it refers to


def not_served(director: Director, model: str) -> ApiError:
    """Return the error for a model that no worker serves now: 503 if a worker may serve the model soon, otherwise 404."""
    if director.beginning:
        return starting()
    retry_s, unnamed = director.settings.retry_after_s, director.table.unnamed
    if model in director.table.known:
        return unavailable(f"no worker serves {model} at the moment", "no_routable_worker", retry_s)
    if unnamed:
        why = f"no worker serves the model {model!r}; {unnamed[0]} is starting and has not reported its models yet"
        return unavailable(why, "no_routable_worker", retry_s)
    return unknown_model(model)


def model_of(director: Director, name: str) -> str:
    """Return the known model for a name: the model's own name, an alias, or a name that its servers report.

    Raise ApiError if no worker serves the model: 503 if a worker may serve the model soon, otherwise 404.
    """
    aliases, further = director.settings.model_aliases, director.table.further
    model = aliases.get(name, name)
    for one in (name, model, further.get(name, name)):  # a model's own name has precedence over aliases
        if one in director.table.known:
            return one
    raise not_served(director, model)


def served_names(director: Director) -> dict[str, str]:
    """Return the model for each name under which a model is served. The models' own names come first."""
    served = director.table.served
    further = director.table.further | director.settings.model_aliases
    return {model: model for model in served} | {
        name: model for name, model in further.items() if model in served and name not in served
    }


def chosen_model(director: Director, name: str | None) -> str:
    """Return the known model of this name or, without a name, the only model that is served.

    Raise ApiError: 404 or 503 if no worker serves the named model, 400 if `name` is missing and not
    exactly one model is served.
    """
    if name:
        return model_of(director, name)
    served = director.table.served
    if len(served) != 1:
        raise invalid(f"model is required; served models: {', '.join(served) or 'none'}", "model")
    return served[0]


def group_of(director: Director, model: str) -> EndpointGroup:
    """Return a known model's workers of the lineage (model revision and tokenizer) that new requests get.

    If the model has several lineages, this is the first one with a worker in service. The result also contains workers
    that are out of service. Raise ApiError (503) if all workers of the model have left.
    """
    models = director.table.models
    endpoints = models.get(model, ())
    if not endpoints:
        raise not_served(director, model)
    first = next((endpoint for endpoint in endpoints if endpoint.routable), endpoints[0])
    return director.routing.group(model, first.lineage)


def model_entry(director: Director, name: str, model: str) -> ModelEntry:
    """Return the entry of /v1/models for a served model. `name` is one of the model's names."""
    root = UNSET if name == model else model
    return ModelEntry(id=name, max_model_len=group_of(director, model).shown_context, root=root)
