"""Which models are served, and what have the workers of one in common?"""

from msgspec import UNSET

from controller.frontend.director import Director
from controller.frontend.errors import ApiError, invalid, starting, unavailable, unknown_model
from controller.frontend.openai.response_models import ModelEntry
from controller.router.endpoints import EndpointGroup


def not_served(director: Director, model: str) -> ApiError:
    """Return what is said of a model that nobody serves now, as far as is known: 404 only where nobody is awaited with it."""
    if director.beginning:
        return starting()
    retry_s, unnamed = director.settings.retry_after_s, director.table.unnamed
    if model in director.table.known:
        return unavailable(f"no worker of {model} is there now", "no_routable_worker", retry_s)
    if unnamed:
        why = f"nobody serves the model {model!r} now, and {unnamed[0]} is awaited, which cannot say yet what it serves"
        return unavailable(why, "no_routable_worker", retry_s)
    return unknown_model(model)


def model_of(director: Director, name: str) -> str:
    """Return the known model that a name stands for: its own, an alias, or a further name of its servers. Raise ApiError: 404 for
    one that no worker serves."""
    aliases, further = director.settings.model_aliases, director.table.further
    model = aliases.get(name, name)
    for one in (name, model, further.get(name, name)):  # a model's own name goes first
        if one in director.table.known:
            return one
    raise not_served(director, model)


def served_names(director: Director) -> list[tuple[str, str]]:
    """Return every name under which a served model may be asked for, with the model."""
    served = director.table.served
    further = director.table.further | director.settings.model_aliases
    return [(model, model) for model in served] + [
        (name, model) for name, model in further.items() if model in served and name not in served
    ]


def chosen_model(director: Director, name: str | None) -> str:
    """Return a model that is known: the one of this name, or the only one that is served. Raise ApiError: 404 for one that nobody
    serves, 400 where a name is wanted."""
    if name:
        return model_of(director, name)
    served = director.table.served
    if len(served) != 1:
        raise invalid(f"which model? There are {', '.join(served) or 'none'}", "model")
    return served[0]


def group_of(director: Director, model: str) -> EndpointGroup:
    """Return the workers of a known model that new requests would go to, in service or not. Raise ApiError (503) if all of them
    are gone."""
    models = director.table.models
    endpoints = models.get(model, ())
    if not endpoints:
        raise not_served(director, model)
    first = next((endpoint for endpoint in endpoints if endpoint.routable), endpoints[0])
    return director.routing.group(model, first.lineage)


def model_entry(director: Director, name: str, model: str) -> ModelEntry:
    """Return what /v1/models says of a model that is served, under one of its names."""
    root = UNSET if name == model else model
    return ModelEntry(id=name, max_model_len=group_of(director, model).shown_context, root=root)
