"""Generates the reference documents of the events and of the configuration file from the code.

    python -m controller.commands.write_docs

This command rewrites asyncapi.yaml, config.schema.json, schemas/ and the generated part of events.md in docs/reference. A test
checks that all these files equal the output of this module.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from controller.adapters.control_api import document
from controller.catalogue import SHAPES, CatalogueEntry, FieldEntry, entries, fields_of
from controller.commands.configuration.schema import schema
from events.decisions import HealthStatus

Schema = dict[str, Any]  # a JSON Schema, or a part of one

BEGIN = "<!-- generated: kinds (python -m controller.commands.write_docs) -->"
END = "<!-- end of generated -->"
VERSION = "v1"
CONFIG_SCHEMA = "config.schema.json"
CELL_MAX = 150  # maximum characters of a type in a table; a longer type is written below the table


def markdown() -> str:
    """Return the generated part of docs/reference/events.md, as Markdown."""
    lines = []
    for title, decided in (("Observations", False), ("Decisions", True)):
        lines += [f"### {title}", "", "| kind | emitted by | promise |", "|---|---|---|"]
        chosen = [entry for entry in entries() if entry.decided is decided]
        lines += [
            f"| [`{e.kind}`](#{e.kind}) | {e.emitter} | {_cell(_first_sentence(e.promise))} |" for e in chosen
        ]
        lines.append("")
    lines += ["### Schemas", "", "Every body is a JSON object. An optional field may be missing.", ""]
    for entry in entries():
        lines += [
            f"#### {entry.kind}",
            "",
            entry.promise,
            "",
            f"`{entry.subject}`",
            "",
            *_table(entry.fields),
            "",
        ]
    for shape in SHAPES:
        text = " ".join(inspect.cleandoc(shape.__doc__ or "").split())
        lines += [f"#### {shape.__name__}", "", text, "", *_table(tuple(fields_of(shape))), ""]
    lines += ["#### HealthStatus", "", "One of " + ", ".join(f"`{s}`" for s in HealthStatus) + ".", ""]
    lines += ["#### TopK", "", "`[[token, logprob], …]`, best first, of one position.", ""]
    return "\n".join(lines)


def schemas() -> dict[str, str]:
    """Return the JSON Schema of the body of every event kind, by file name such as `v1/worker_joined.json`.

    There is only the version `v1`. Within a version, fields are only added, and each added field has a default. A body of an
    older release therefore validates against a newer schema. A body of a newer release validates against an older schema,
    because the schema allows unknown fields.
    """
    return {f"{VERSION}/{entry.kind}.json": _written(_schema(entry)) for entry in entries()}


def config_schema() -> str:
    """Return the JSON Schema of the configuration file."""
    return _written(schema())


def _schema(entry: CatalogueEntry) -> Schema:
    (made,), shapes = msgspec.json.schema_components([entry.fact], ref_template="#/$defs/{name}")
    name = made["$ref"].rpartition("/")[2]
    for shape in SHAPES:
        if shape.__name__ in shapes:
            _noted(shapes[shape.__name__], tuple(fields_of(shape)))
    body = _noted(shapes.pop(name), entry.fields)
    body.pop("description", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:holdfast:event:{VERSION}:{entry.kind}",
        "title": entry.kind,
        "description": f"{entry.promise} Emitted by {entry.emitter}.",
        **{key: value for key, value in body.items() if key != "title"},
        **({"$defs": dict(sorted(shapes.items()))} if shapes else {}),
    }


def _noted(schema: Schema, fields: tuple[FieldEntry, ...]) -> Schema:
    """Add the note of each field to its schema as the description, and return the schema.

    Also add the format `date-time`, which msgspec omits for a datetime with an optional time zone."""
    for field in fields:
        described = schema["properties"][field.name]
        if field.type.partition(" ")[0] == "datetime":
            for one in described.get("anyOf", [described]):
                one |= {"format": "date-time"} if one.get("type") == "string" else {}
        if field.note:
            described["description"] = field.note
    return schema


def _written(schema: Schema) -> str:
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _table(fields: tuple[FieldEntry, ...]) -> list[str]:
    rows, below = [], []
    for field in fields:
        shown = f"`{_cell(field.type)}`"
        if len(shown) > CELL_MAX:
            below += ["", f"Type of `{field.name}`: `{field.type}`."]
            shown = "see below"
        rows.append(f"| `{field.name}` | {shown} | {'yes' if field.optional else ''} | {_cell(field.note)} |")
    return ["| field | type | optional | note |", "|---|---|---|---|", *rows, *below]


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.) ", text, maxsplit=1)[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def renewed(page: str) -> str:
    """Return `page` with its generated part replaced. Raise ValueError if the page has no generated part."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n\n{markdown()}\n{END}{after}"


def main() -> None:
    """Rewrite all generated documents in docs/reference."""
    docs = Path(__file__).resolve().parents[2] / "docs" / "reference"
    (docs / "asyncapi.yaml").write_text(document())
    for name, text in schemas().items():
        where = docs / "schemas" / name
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)
    (docs / CONFIG_SCHEMA).write_text(config_schema())
    page = docs / "events.md"
    page.write_text(renewed(page.read_text()))


if __name__ == "__main__":
    main()
