"""Converts the constraint on an answer's form into a grammar, whichever request field states it.

Servers of different versions could interpret the request field differently. So each worker gets the grammar, as EBNF, instead
of the field, from the first token on. After a move, the next worker gets the grammar of what may still follow the accepted
text.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from events.grammar.choices import grammar_of_choice
from events.grammar.ebnf import parse_ebnf
from events.grammar.json_schema import grammar_of_json_object, grammar_of_json_schema
from events.grammar.model import Grammar
from events.grammar.printer import to_ebnf
from events.grammar.recogniser import start
from events.grammar.refusals import MAX_SOURCE, refuse
from events.grammar.regex import grammar_of_regex
from events.grammar.residual import residual
from events.grammar.structural_tag import grammar_of_structural_tag
from events.json_types import Json

CONSTRAINTS_KEPT = 32
GUIDED = "guided_"  # prefix of the request fields of earlier vLLM versions
_FIX = "correct the field"
NO_PARAMETERS: Json = {"type": "object", "properties": {}}  # of a function without arguments


class Constraint:
    """A constraint in the form of a grammar. Many requests may share one object."""

    def __init__(self, grammar: Grammar) -> None:
        """Print and prepare the grammar. Raise GrammarRefused if it is too large, or if no text matches it."""
        self.ebnf = to_ebnf(grammar)
        self._start = start(grammar)

    def rest(self, text: str) -> str:
        """Return a grammar of what may follow `text`, as EBNF.

        Raise TextRejected if no text of the grammar begins with `text`, and GrammarRefused if the grammar is too ambiguous.
        """
        return to_ebnf(residual(self._start.advance(text))) if text else self.ebnf


def constraint_of(guided: Json) -> Constraint:
    """Return the constraint of a request. `guided` maps the name of the request field to the field's value.

    Raise GrammarRefused if the constraint is invalid, or of a kind that has no grammar.
    """
    try:
        return _constraint(json.dumps(guided))
    except RecursionError:
        refuse("the constraint is too deeply nested", next(iter(guided)), "nest less")


@lru_cache(CONSTRAINTS_KEPT)
def _constraint(guided: str) -> Constraint:
    ((field, value),) = json.loads(guided).items()
    kind, content = _kind(field, value)
    return Constraint(grammar_of_kind(kind, content))


def _kind(field: str, value: Any) -> tuple[str, Any]:
    """Return the kind of the constraint in a request field, and the constraint's content.

    The kind is named as in vLLM's `structured_outputs`.
    """
    if field.startswith(GUIDED):
        return field.removeprefix(GUIDED), value
    if not isinstance(value, dict):
        refuse("the value must be an object", field, _FIX)
    if field == "response_format":
        kind = value.get("type")
        if kind != "json_schema":
            return str(kind), value
        described = value.get("json_schema")
        return "json", described.get("schema", {}) if isinstance(described, dict) else {}
    given = {kind: content for kind, content in value.items() if content not in (None, False)}
    if len(given) != 1:
        refuse(f"one kind of constraint is needed, not {len(given)}", field, _FIX)
    ((kind, content),) = given.items()
    return kind, content


def grammar_of_kind(kind: str, content: Any) -> Grammar:
    """Return the grammar of a constraint of this kind.

    The kinds are named as in vLLM's `structured_outputs`. Raise GrammarRefused if the constraint is invalid or unsupported.
    """
    if kind == "json_object":
        return grammar_of_json_object()
    if kind == "choice":
        return grammar_of_choice(content)
    if kind in ("json", "structural_tag"):
        parsed = _parsed(kind, content) if isinstance(content, str) else content
        return grammar_of_json_schema(parsed) if kind == "json" else grammar_of_structural_tag(parsed)
    if not isinstance(content, str):
        refuse("the value must be a text", kind, _FIX)
    if kind == "regex":
        return grammar_of_regex(content)
    if kind == "grammar":
        return parse_ebnf(content)
    refuse(f"constraints of the kind {kind[:40]!r} are not supported", kind)


def _parsed(kind: str, text: str) -> Any:
    if len(text) > MAX_SOURCE:
        refuse(f"the text has more than {MAX_SOURCE} characters", kind, "make it smaller")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        refuse("the text is no JSON", kind, _FIX)


def schema_of_required_tools(functions: Mapping[str, Json]) -> Json:
    """Return the JSON schema of an answer with `tool_choice: "required"`.

    As in vLLM, the answer is an array of at least one tool call. `functions` maps each function's name to the schema of its
    arguments. Raise GrammarRefused if two of these schemas define the same name in `$defs` differently.
    """
    definitions: Json = {}
    calls = []
    for name, parameters in functions.items():
        kept = {key: value for key, value in parameters.items() if key != "$defs"}
        own = parameters.get("$defs", {})
        if not isinstance(own, dict):
            refuse("$defs must be an object", f"tool {name[:40]}", "correct the tools")
        for key, definition in own.items():
            if definitions.setdefault(key, definition) != definition:
                refuse(
                    f"two tools define {key[:40]!r} differently", f"tool {name[:40]}", "rename one definition"
                )
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": kept or NO_PARAMETERS}
        calls.append({"properties": properties, "required": ["name", "parameters"]})
    schema: Json = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    return {**schema, "$defs": definitions} if definitions else schema
