"""Grammar of a structural tag, as xgrammar 0.2.9 reads it (vLLM `structured_outputs.structural_tag`).

A structural tag is a tree of formats:

- Texts, JSON schemas, regular expressions and grammars.
- Sequences, options and repetitions.
- Tags with a begin and an end. Free text inside a tag excludes the ends of that tag.
- Free text in which a trigger starts a tag.

These are refused:

- Formats of token ids (`token`, `any_tokens`, …) and budgets (`max_tokens`, `max_chars`).
- JSON schemas in the XML styles of some models, or with `any_order`, `max_whitespace_cnt` or `excludes`.
- Grammars in Lark.
"""

from collections.abc import Callable
from typing import Any

from events.grammar.ebnf import parse_ebnf
from events.grammar.json_schema import grammar_of_json_schema
from events.grammar.model import (
    ANY_CHARACTER,
    EMPTY,
    Expression,
    Grammar,
    Reference,
    Repeat,
    check,
    choice,
    embed,
    literal,
    repeat,
    sequence,
)
from events.grammar.refusals import MAX_NESTING, refuse
from events.grammar.regex import Flavour, parse_regex
from events.grammar.triggers import TagDispatch, add_dispatch
from events.json_types import Json

_FIX = "correct the structural tag"
_ALLOWED = {  # fields of each format; any other field would change the language, or is unknown
    "const_string": {"value"},
    "json_schema": {"json_schema", "style", "any_order", "max_whitespace_cnt", "excludes"},
    "grammar": {"grammar", "syntax"},
    "regex": {"pattern"},
    "any_text": {"excludes", "max_tokens", "max_chars"},
    "sequence": {"elements"},
    "or": {"elements"},
    "optional": {"content"},
    "plus": {"content"},
    "star": {"content"},
    "repeat": {"min", "max", "content"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags", "excludes", "at_least_one", "stop_after_first"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
    "dispatch": {"rules", "loop", "excludes"},
}
_NEUTRAL = {  # values of fields that change nothing
    "style": "json", "syntax": "ebnf", "any_order": False, "max_whitespace_cnt": None, "max_tokens": None, "max_chars": None,
}  # fmt: skip


def grammar_of_structural_tag(tag: Any) -> Grammar:
    """Return the grammar of a parsed structural tag, in the form with `format` or the older one with `structures`.

    Raise GrammarRefused if the tag is invalid or unsupported.
    """
    if not isinstance(tag, dict):
        refuse("a structural tag must be an object", "#", _FIX)
    if "structures" in tag:
        tag = {"format": _from_structures(tag)}
    if tag.get("type", "structural_tag") != "structural_tag" or "format" not in tag:
        refuse("a structural tag needs a format", "#", _FIX)
    return _FormatConverter().grammar(tag["format"])


def _from_structures(tag: Json) -> Json:
    """Return the format that a tag in the older form stands for.

    The older form has structures with a begin, a schema and an end.
    """
    structures = tag["structures"]
    if not isinstance(structures, list) or not all(isinstance(one, dict) for one in structures):
        refuse("structures must be an array of objects", "#/structures", _FIX)
    tags = [
        {
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema")},
            "end": one.get("end"),
        }
        for one in structures
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _FormatConverter:
    def __init__(self) -> None:
        self._rules: dict[str, Expression] = {}
        self._ends: list[list[str]] = []  # of the tags around, the innermost last
        self._formats: dict[str, Callable[[Json, str], Expression]] = {
            "const_string": lambda one, where: literal(_text(one, "value", where)),
            "json_schema": self._json_schema,
            "grammar": self._grammar,
            "regex": lambda one, where: parse_regex(_text(one, "pattern", where), Flavour.CONVERTED, where),
            "any_text": self._any_text,
            "sequence": lambda one, where: sequence(*self._all(one, "elements", where)),
            "or": lambda one, where: choice(*self._all(one, "elements", where)),
            "optional": lambda one, where: choice(EMPTY, self._content(one, where)),
            "plus": lambda one, where: Repeat(self._content(one, where), 1, None),
            "star": lambda one, where: Repeat(self._content(one, where), 0, None),
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "dispatch": self._dispatch,
        }
        self._depth = 0

    def grammar(self, form: Any) -> Grammar:
        """Return the grammar of a format. Raise GrammarRefused if the format is invalid or unsupported."""
        root = self._format(form, "#/format")
        return check(Grammar({**self._rules, "root": root}))

    def _format(self, form: Any, where: str) -> Expression:
        if not isinstance(form, dict) or not isinstance(form.get("type"), str):
            refuse("a format must be an object with a type", where, _FIX)
        kind = form["type"]
        if kind not in _ALLOWED:
            refuse(f"the format {kind[:40]!r} is not supported", where)
        for field in sorted(form.keys() - _ALLOWED[kind] - {"type"}):
            refuse(f"the field {field[:40]!r} of the format {kind} is not supported", where)
        for field, neutral in _NEUTRAL.items():
            if form.get(field, neutral) != neutral:
                refuse(f"the field {field} of the format {kind} is not supported", where)
        self._depth += 1
        if self._depth > MAX_NESTING:
            refuse(f"more than {MAX_NESTING} nested formats", where, "nest less")
        found = self._formats[kind](form, where)
        self._depth -= 1
        return found

    def _all(self, form: Json, field: str, where: str) -> list[Expression]:
        parts = _list(form, field, where)
        return [self._rule(self._format(one, f"{where}/{field}/{at}")) for at, one in enumerate(parts)]

    def _content(self, form: Json, where: str) -> Expression:
        return self._rule(self._format(form.get("content"), f"{where}/content"))

    def _rule(self, body: Expression) -> Expression:
        """Return a reference to a new rule with this body, so that the body is written once.

        A body that is a reference is returned itself.
        """
        if isinstance(body, Reference):
            return body
        name = f"format{len(self._rules)}"
        self._rules[name] = body
        return Reference(name)

    # --- texts ------------------------------------------------------------------------------------------------------

    def _json_schema(self, form: Json, where: str) -> Expression:
        if form.get("excludes"):
            refuse("excludes of a JSON schema are not supported", where)
        if not isinstance(form.get("json_schema"), dict | bool):
            refuse("json_schema must be an object or a boolean", where, _FIX)
        return embed(self._rules, grammar_of_json_schema(form["json_schema"]), f"json{len(self._rules)}")

    def _grammar(self, form: Json, where: str) -> Expression:
        return embed(self._rules, parse_ebnf(_text(form, "grammar", where)), f"ebnf{len(self._rules)}")

    def _any_text(self, form: Json, where: str) -> Expression:
        excludes = tuple(_texts(form, "excludes", where)) + self._outer_ends()
        if not excludes:
            return Repeat(ANY_CHARACTER, 0, None)
        return add_dispatch(self._rules, TagDispatch((), excludes, loop=False), where)

    def _outer_ends(self) -> tuple[str, ...]:
        return tuple(end for end in self._ends[-1] if end) if self._ends else ()

    def _repeat(self, form: Json, where: str) -> Expression:
        least, most = form.get("min"), form.get("max")
        if type(least) is not int or type(most) is not int or least < 0 or -1 != most < least:
            refuse("min and max must be whole numbers in order, or max -1", where, _FIX)
        return repeat(self._content(form, where), least, None if most == -1 else most)

    # --- tags -------------------------------------------------------------------------------------------------------

    def _tag(self, form: Any, where: str) -> Expression:
        begin, content, end = self._tag_parts(form, where)
        return sequence(literal(begin), content, end)

    def _tag_parts(self, form: Any, where: str) -> tuple[str, Expression, Expression]:
        """Return the begin, the content and the end of a tag."""
        if not isinstance(form, dict) or form.get("type", "tag") != "tag":
            refuse("a tag must be an object of type tag", where, _FIX)
        begin, ends = _text(form, "begin", where), form.get("end")
        if isinstance(ends, str):
            ends = [ends]
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            refuse("the end of a tag must be a text or a list of texts", where, "give texts, no token ids")
        self._ends.append(ends)
        content = self._content(form, where)
        self._ends.pop()
        return begin, content, choice(*map(literal, ends))

    def _triggered_tags(self, form: Json, where: str) -> Expression:
        triggers = _texts(form, "triggers", where)
        at_least_one, stop = _flag(form, "at_least_one", where), _flag(form, "stop_after_first", where)
        tags = [
            self._tag_parts(one, f"{where}/tags/{at}") for at, one in enumerate(_list(form, "tags", where))
        ]
        whole = [sequence(literal(begin), content, end) for begin, content, end in tags]
        grouped: dict[str, list[Expression]] = {trigger: [] for trigger in triggers}
        for begin, content, end in tags:
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(matching) != 1:
                refuse(f"the tag {begin[:40]!r} must begin with exactly one trigger", where, _FIX)
            grouped[matching[0]].append(sequence(literal(begin[len(matching[0]) :]), content, end))
        if at_least_one and stop:
            return choice(*whole)
        excludes = tuple(_texts(form, "excludes", where)) + self._outer_ends()
        pairs = tuple((trigger, self._rule(choice(*bodies))) for trigger, bodies in grouped.items() if bodies)
        free = add_dispatch(self._rules, TagDispatch(pairs, excludes, loop=not stop), where)
        return sequence(self._rule(choice(*whole)), free) if at_least_one else free

    def _tags_with_separator(self, form: Json, where: str) -> Expression:
        at_least_one, stop = _flag(form, "at_least_one", where), _flag(form, "stop_after_first", where)
        if not isinstance(form.get("separator"), str):
            refuse("separator must be a text", where, _FIX)
        tags = [self._tag(one, f"{where}/tags/{at}") for at, one in enumerate(_list(form, "tags", where))]
        one_tag = self._rule(choice(*tags))
        more = EMPTY if stop else Repeat(sequence(literal(form["separator"]), one_tag), 0, None)
        found = sequence(one_tag, more)
        return found if at_least_one else choice(found, EMPTY)

    def _dispatch(self, form: Json, where: str) -> Expression:
        pairs: list[tuple[str, Expression]] = []
        for at, pair in enumerate(_list(form, "rules", where)):
            if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
                refuse("a rule of a dispatch must be a pair of a text and a format", where, _FIX)
            pairs.append((pair[0], self._rule(self._format(pair[1], f"{where}/rules/{at}"))))
        loop = _flag(form, "loop", where, default=True)
        excludes = tuple(_texts(form, "excludes", where))
        return add_dispatch(self._rules, TagDispatch(tuple(pairs), excludes, loop), where)


def _text(form: Json, field: str, where: str) -> str:
    found = form.get(field)
    if not isinstance(found, str) or (not found and field != "value"):
        refuse(f"{field} must be a text", where, "give a text, no token id")
    return found


def _list(form: Json, field: str, where: str) -> list[Any]:
    found = form.get(field)
    if not isinstance(found, list) or not found:
        refuse(f"{field} must be an array of at least one element", where, _FIX)
    return found


def _texts(form: Json, field: str, where: str) -> list[str]:
    found = form.get(field, [] if field == "excludes" else None)
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        refuse(f"{field} must be an array of texts", where, _FIX)
    return found


def _flag(form: Json, field: str, where: str, default: bool = False) -> bool:
    found = form.get(field, default)
    if not isinstance(found, bool):
        refuse(f"{field} must be true or false", where, _FIX)
    return found
