"""What do the generated documents of the events say? Made from the catalogue, so never stale.

    python -m controller.commands.write_docs    rewrites docs/asyncapi.yaml and the generated part of docs/events.md

A test compares both files with what this module makes.
"""

import inspect
from pathlib import Path

from controller.adapters.asyncapi import document
from controller.catalogue import SHAPES, FieldEntry, entries, fields_of
from events.decisions import HealthStatus

BEGIN = "<!-- generated: kinds (python -m controller.commands.write_docs) -->"
END = "<!-- end of generated -->"


def markdown() -> str:
    """Return the generated part of docs/events.md."""
    lines = []
    for title, decided in (("Observations", False), ("Decisions", True)):
        lines += [f"### {title}", "", "| kind | said by | promise |", "|---|---|---|"]
        chosen = [entry for entry in entries() if entry.decided is decided]
        lines += [f"| [`{e.kind}`](#{e.kind}) | {e.emitter} | {_cell(e.promise)} |" for e in chosen]
        lines.append("")
    lines += ["### Schemas", "", "Every body is a JSON object. A field that is optional may be missing.", ""]
    for entry in entries():
        lines += [f"#### {entry.kind}", "", f"`{entry.subject}`", "", *_table(entry.fields), ""]
    for shape in SHAPES:
        text = " ".join(inspect.cleandoc(shape.__doc__ or "").split())
        lines += [f"#### {shape.__name__}", "", text, "", *_table(tuple(fields_of(shape))), ""]
    lines += ["#### HealthStatus", "", "One of " + ", ".join(f"`{s}`" for s in HealthStatus) + ".", ""]
    lines += ["#### TopK", "", "`[[token, logprob], …]`, best first, of one position.", ""]
    return "\n".join(lines)


def _table(fields: tuple[FieldEntry, ...]) -> list[str]:
    rows = [
        f"| `{f.name}` | `{_cell(f.type)}` | {'yes' if f.optional else ''} | {_cell(f.note)} |"
        for f in fields
    ]
    return ["| field | type | optional | note |", "|---|---|---|---|", *rows]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def renewed(page: str) -> str:
    """Return `page` with its generated part made anew. Raise ValueError if it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n\n{markdown()}\n{END}{after}"


def main() -> None:
    """Rewrite the generated documents."""
    docs = Path(__file__).resolve().parents[2] / "docs"
    (docs / "asyncapi.yaml").write_text(document())
    page = docs / "events.md"
    page.write_text(renewed(page.read_text()))


if __name__ == "__main__":
    main()
