"""The page at /docs: the OpenAPI document as HTML, without scripts and without files of other sites."""

from collections.abc import Iterator
from html import escape
from typing import Any

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
}
_AT = "#/components/schemas/"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border:1px solid #8886;padding:.25rem .5rem;text-align:left;"
    "vertical-align:top}code{font-size:90%}:root{color-scheme:light dark}"
)


def docs_page(document: dict[str, Any]) -> str:
    """Return an OpenAPI document as an HTML page: its paths, and the fields of its schemas."""
    about = document["info"]
    title = f"{escape(about['title'])} {escape(about['version'])}"
    return "".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>',
            f"<body><h1>{title}</h1><p>{escape(about['description'])} ",
            'The same as JSON: <a href="/openapi.json">/openapi.json</a></p>',
            "<h2>Paths</h2><table><tr><th>path</th><th>what it does</th><th>body</th><th>response</th></tr>",
            *_paths(document["paths"]),
            "</table>",
            *_schemas(document["components"]["schemas"]),
            "</body></html>",
        ]
    )


def _paths(paths: dict[str, Any]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, made in methods.items():
            bodies: dict[str, Any] = made.get("requestBody", {}).get("content", {})
            body = " or ".join(_type(one["schema"]) for one in bodies.values())
            content = made["responses"]["200"].get("content", {})
            answers = dict.fromkeys(
                _type(one.get("schema")) or escape(media) for media, one in content.items()
            )
            yield f"<tr><td><code>{method.upper()} {escape(path)}</code></td><td>{escape(made['summary'])}</td>"
            yield f"<td>{body}</td><td>{', '.join(answers)}</td></tr>"


def _schemas(schemas: dict[str, Any]) -> Iterator[str]:
    for name, schema in schemas.items():
        required = schema.get("required", ())
        yield f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{escape(schema.get("description", ""))}</p>'
        yield "<table><tr><th>field</th><th>type</th><th>description</th></tr>"
        for field, one in schema.get("properties", {}).items():
            needed = " (required)" if field in required else ""
            yield f"<tr><td><code>{escape(field)}</code>{needed}</td><td>{_type(one)}</td>"
            yield f"<td>{escape(one.get('description', ''))}</td></tr>"
        yield "</table>"


def _type(schema: dict[str, Any] | None) -> str:
    """Return the type of a value as HTML, with a link if it is one of the document's schemas; empty if it is not known."""
    if not schema:
        return ""
    if at := schema.get("$ref"):
        name = escape(at.removeprefix(_AT))
        return f'<a href="#{name}">{name}</a>'
    for many in ("anyOf", "oneOf", "allOf"):
        if many in schema:
            return " or ".join(dict.fromkeys(_type(one) or "any" for one in schema[many]))
    if "enum" in schema:
        return ", ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"array of {_type(schema.get('items')) or 'any'}"
    return escape(kind if isinstance(kind, str) else " or ".join(kind))
