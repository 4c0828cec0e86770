"""Looks up served models and adapters by name or alias, and the group of workers that serves them."""

import msgspec

from controller.frontend.director import Director
from controller.frontend.errors import ApiError, invalid, starting, unavailable, unknown_model
from controller.router.endpoints import EndpointGroup


class ModelEntry(msgspec.Struct):
    """One served model or adapter."""

    id: str
    max_model_len: int  # maximum tokens of a prompt and its answer together
    object: str = "model"
    created: int = 0  # creation time is unknown
    owned_by: str = "holdfast"
    # of an alias: the model or adapter that it refers to; otherwise its own name, because its folder is not known
    root: str = ""
    parent: str | None = None  # of an adapter: its model


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
    """Return the known model or adapter for a name: its own name, an alias, or a name that its servers report.

    Raise ApiError if no worker serves it: 503 if a worker may serve the model soon, otherwise 404. No worker is waited for
    because of an adapter.
    """
    table, aliases = director.table, director.settings.model_aliases
    model = aliases.get(name, name)
    for one in (name, model, table.further.get(name, name)):  # an own name has precedence over aliases
        if one in table.known or one in table.adapters:
            return one
    raise not_served(director, model)


def served_names(director: Director) -> dict[str, str]:
    """Return the model or adapter for each name under which one is served. The own names come first."""
    served = [*director.table.served, *director.table.served_adapters]
    further = director.table.further | director.settings.model_aliases
    return {model: model for model in served} | {
        name: model for name, model in further.items() if model in served and name not in served
    }


def chosen_model(director: Director, name: str | None) -> str:
    """Return the known model or adapter of this name or, without a name, the only model that is served.

    Raise ApiError: 404 or 503 if no worker serves the named model, 400 if `name` is missing and not
    exactly one model is served.
    """
    if name:
        return model_of(director, name)
    served = director.table.served
    if len(served) != 1:
        raise invalid(f"model is required; served models: {', '.join(served) or 'none'}", "model")
    return served[0]


def group_of(director: Director, served: str) -> EndpointGroup:
    """Return the workers of a known model or adapter that have the lineage (model revision and tokenizer) that new requests get.

    If the model has several lineages, this is the first one with a worker in service. The result also contains workers
    that are out of service. Raise ApiError (503) if all workers of the model have left.
    """
    endpoints = director.table.serving(served)
    if not endpoints:
        raise not_served(director, served)
    first = next((endpoint for endpoint in endpoints if endpoint.routable), endpoints[0])
    return director.routing.group(served, first.lineage)


def model_entry(director: Director, name: str, served: str) -> ModelEntry:
    """Return the entry of /v1/models for a served model or adapter. `name` is one of its names."""
    adapter = director.table.adapter_of(served)
    parent = director.table.model_of(adapter) if adapter else None
    context = group_of(director, served).shown_context
    return ModelEntry(id=name, max_model_len=context, root=adapter or served, parent=parent)
