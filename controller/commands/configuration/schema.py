"""Generates the JSON Schema of the configuration file from the settings and the flags of `up`."""

import argparse
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from pydantic.json_schema import GenerateJsonSchema

from controller.catalogue import notes_of
from controller.commands.configuration.described import TOP, of_up, of_worker
from controller.config.flags import fields_of, is_section
from controller.config.sections import section
from controller.config.variables import SECTIONS
from controller.processes.flag_types import not_negative, positive
from workers.config.settings import annotations

Schema = dict[str, Any]  # a JSON Schema, or a part of one

REF = "#/$defs/{}"
NUMBERS = (positive, not_negative)  # types of flags that are numbers


class _InSeconds(GenerateJsonSchema):
    """Generates JSON Schemas in which a duration is a number of seconds."""

    def timedelta_schema(self, schema: Any) -> Schema:
        """Return the JSON Schema of a duration: a number."""
        return {"type": "number"}

    def encode_default(self, dft: Any) -> Any:
        """Return a default in the form of the configuration file. A duration becomes a number of seconds."""
        return dft.total_seconds() if isinstance(dft, timedelta) else super().encode_default(dft)


def schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of the configuration file."""
    defs: Schema = {}
    tables = {role: _of_role(role, defs) for role in SECTIONS}
    top: Schema = {name: {"type": "string", "description": text} for name, (text, _) in TOP.items()}
    top["admin_hosts"]["type"] = ["string", "array"]
    for shape in defs.values():
        if "properties" in shape:
            shape["additionalProperties"] = False
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration file of Holdfast",
        "description": "Durations are in seconds.",
        "type": "object",
        "properties": {**top, "up": _of_up(), **tables, "worker": _of_worker()},
        "additionalProperties": False,
        "$defs": dict(sorted(defs.items())),
    }


def _of_role(role: str, defs: Schema) -> Schema:
    """Add the definitions of a role's settings models to `defs`, and return the reference to the role's own model."""
    model = section(role)
    made = model.model_json_schema(schema_generator=_InSeconds, ref_template=REF.format("{model}"))
    own = made.pop("$defs", {}) | {model.__name__: made}
    _describe(model, own)
    defs |= {name: _plain(shape) for name, shape in own.items()}
    return {"$ref": REF.format(model.__name__)}


def _describe(model: type, defs: Mapping[str, Any]) -> None:
    """Describe each field that has no description by the field's comment in the model's source code."""
    notes = notes_of(model)
    for name, kind in fields_of(model).items():
        field = defs[model.__name__]["properties"][name]
        if is_section(kind):
            _describe(kind, defs)
        elif note := notes.get(name):
            field.setdefault("description", note)


def _plain(shape: Any) -> Any:
    """Return a schema with two things removed: generated titles, and defaults of whole tables."""
    if isinstance(shape, list):
        return [_plain(one) for one in shape]
    if not isinstance(shape, dict):
        return shape
    kept = {key: _plain(value) for key, value in shape.items() if key != "default"}
    if isinstance(kept.get("title"), str):
        del kept["title"]
    if "default" in shape and not ("$ref" in shape and isinstance(shape["default"], dict)):
        kept["default"] = shape["default"]
    return kept


def _of_worker() -> Schema:
    properties = {}
    for name, default, text in of_worker():
        shape = msgspec.json.schema(annotations()[name], schema_hook=lambda kind: {"type": "string"})
        properties[name] = {**shape, "description": text}
        if default is not None:
            properties[name]["default"] = str(default) if isinstance(default, Path) else default
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _of_up() -> Schema:
    properties = {key: _flag(action) for key, action in of_up().items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _flag(action: argparse.Action) -> Schema:
    kind: Schema = {"type": "string"}
    if action.nargs == 0:
        kind = {"type": "boolean"}
    elif isinstance(action.default, list):
        kind = {"type": ["string", "array"], "items": {"type": "string"}}
    elif action.type in NUMBERS:
        kind = {"type": "number"}
    elif action.type is not None:
        kind = {"type": "integer"} if action.metavar != "N|auto" else {"type": ["integer", "string"]}
    if action.choices:
        kind["enum"] = list(action.choices)
    return kind | {"description": action.help}
