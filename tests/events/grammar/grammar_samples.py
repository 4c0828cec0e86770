"""Schemas, grammars and patterns for the tests of structured output, by kind. All are supported."""

from typing import Any

INTEGER = {"type": "integer"}
NULL = {"type": "null"}
A_AND_B: dict[str, Any] = {"a": INTEGER, "b": {"type": "string"}}
THREE: dict[str, Any] = {"a": INTEGER, "b": INTEGER, "c": INTEGER}
ADDRESS: dict[str, Any] = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": r"^\d{5}(-\d{4})?$"}},
    "required": ["street", "zip"],
}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": INTEGER, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["value"],
}
EXPRESSION: dict[str, Any] = {
    "$ref": "#/$defs/term",
    "$defs": {
        "term": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/sum"}]},
        "sum": {
            "type": "object",
            "properties": {"op": {"enum": ["+", "-", "×"]}, "args": {"$ref": "#/$defs/list"}},
            "required": ["op", "args"],
        },
        "list": {"type": "array", "items": {"$ref": "#/$defs/term"}, "minItems": 2, "maxItems": 3},
    },
}
PERSON: dict[str, Any] = {
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["rot", "grün", "青", "🟦"]}, "maxItems": 4},
        "address": ADDRESS,
    },
    "required": ["name", "age"],
}
COUNTRIES = [f"country {number}" for number in range(60)]

SCALARS: list[Any] = [
    {}, True, INTEGER, NULL, {"type": "number"}, {"type": "string"}, {"type": "boolean"}, {"type": ["integer", "null"]},
    {"type": "integer", "minimum": -5, "maximum": 120}, {"type": "integer", "minimum": 7},
    {"type": "integer", "maximum": -13}, {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 1001},
    {"type": "integer", "maximum": 0}, {"type": "integer", "minimum": -1099, "maximum": -87},
    {"type": "integer", "minimum": 1.0, "maximum": 12345}, {"type": "integer", "minimum": 42, "maximum": 42},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25}, {"type": "number", "minimum": 0},
    {"type": "number", "maximum": 0}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "number", "minimum": 0.1, "maximum": 0.3}, {"type": "number", "minimum": 99.95, "maximum": 1000},
    {"type": "number", "maximum": -0.5}, {"type": "number", "minimum": 1e-7, "maximum": 5},
    {"type": "number", "exclusiveMinimum": -3, "exclusiveMaximum": -2}, {"type": "number", "minimum": 2, "maximum": 2},
    {"type": "number", "minimum": -2.5, "exclusiveMinimum": -2.5, "maximum": 1e6},
    {"const": {"b": 1, "a": [True, None, "x/y"]}}, {"const": "é\u007f\n\""},
    {"enum": ["a/b", "日本", "x\"", 1, 1.5, 1e30, -0.0, 2**70, None, False]}, {"enum": COUNTRIES},
]  # fmt: skip
STRINGS: list[Any] = [
    {"type": "string", "minLength": 2, "maxLength": 5}, {"type": "string", "minLength": 3},
    {"type": "string", "maxLength": 300}, {"type": "string", "maxLength": 0},
    *({"type": "string", "pattern": pattern} for pattern in (
        r"^a.b\S+[^x]$", r"(ab|c){2,5}\d?", 'a"b', "é+", r"(?i)ab[c-e]+", r"a(?=b)c", r"[\d\-z]+", r"\w+\s?\w",
        r"(?P<n>a)+", r"a{2}{3}", r"[^\s]+", r"(a|\")c", r"\x41\u0042\u{43}", r"[\b]a|z", r"[a-z]{1,10}(-[a-z]+)*",
        r"[\w.]+@[\w]+", "a|b|", r"[^\x00-\x7f]", r"(([a-c]{2}x?){2,3};)+", r"[A-Z]{3}-\d{4}", "^$", r"\/\.",
    )),
    *({"type": "string", "format": name} for name in (
        "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
        "uri-template", "json-pointer", "relative-json-pointer",
    )),
]  # fmt: skip
OBJECTS: list[Any] = [
    {"type": "object"}, {"type": "object", "properties": {}}, {"type": "object", "additionalProperties": True},
    {"type": "object", "additionalProperties": INTEGER}, {"type": "object", "unevaluatedProperties": INTEGER},
    {"type": "object", "properties": A_AND_B}, {"properties": A_AND_B, "required": ["b"]},
    {"type": "object", "properties": A_AND_B, "required": ["a", "b"]},
    {"type": "object", "properties": {"ab": INTEGER, "ac": {}, "b": NULL}, "additionalProperties": INTEGER},
    {"type": "object", "properties": {"ab": INTEGER, "ac": {}}, "required": ["ac"], "additionalProperties": True},
    {"type": "object", "required": ["z"], "properties": {"a": INTEGER}, "additionalProperties": True},
    {"type": "object", "required": ["a"]},
    {"type": "object", "properties": THREE, "required": ["b"], "minProperties": 2},
    {"type": "object", "properties": THREE, "required": ["b"], "minProperties": 2, "maxProperties": 2},
    {"type": "object", "properties": THREE, "minProperties": 1, "maxProperties": 4, "additionalProperties": NULL},
    {"type": "object", "properties": A_AND_B, "minProperties": 3, "additionalProperties": NULL},
    {"type": "object", "properties": A_AND_B, "maxProperties": 0},
    {"type": "object", "additionalProperties": INTEGER, "minProperties": 2, "maxProperties": 3},
    {"type": "object", "patternProperties": {"^x[0-9]+$": INTEGER}},
    {"type": "object", "propertyNames": {"pattern": "^x"}}, {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
    {"type": "object", "properties": {"é": INTEGER, "a\"b": NULL, "": {}}}, ADDRESS, PERSON,
    {"type": "object", "properties": {"title": {"type": "string"}, "default": {"properties": {"title": INTEGER}}}},
]  # fmt: skip
ARRAYS: list[Any] = [
    {"type": "array"}, {"type": "array", "items": INTEGER}, {"items": INTEGER}, {"type": "array", "maxItems": 3},
    {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4}, {"type": "array", "items": {}, "minItems": 1},
    {"type": "array", "items": INTEGER, "maxItems": 0}, {"type": "array", "prefixItems": [INTEGER, NULL]},
    {"type": "array", "prefixItems": [INTEGER, NULL], "items": {"type": "string"}, "minItems": 1, "maxItems": 5},
    {"type": "array", "prefixItems": [INTEGER, NULL], "items": {"type": "string"}, "minItems": 4},
    {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": NULL}}},
    {"type": "array", "items": PERSON, "maxItems": 5}, {"type": "array", "unevaluatedItems": ADDRESS},
]  # fmt: skip
COMBINED: list[Any] = [
    {"anyOf": [INTEGER, {"type": "object", "properties": {"k": {"const": "v"}}, "required": ["k"]}]},
    {"oneOf": [INTEGER, {"type": "number"}]}, {"allOf": [{"type": "array"}]}, {"allOf": [ADDRESS, {"type": "object"}]},
    {"properties": {"a": {"$ref": "#/$defs/o"}, "b": {"type": "object"}}, "$defs": {"o": {"type": "object"}}},
    {"$ref": "#/$defs/a~1b/anyOf/1", "$defs": {"a/b": {"anyOf": [NULL, ADDRESS]}}},
    {"$ref": "elsewhere.json"}, TREE, EXPRESSION,
    {"$ref": "#/$defs/node", "$defs": {"node": {
        "type": "object", "required": ["v", "next"],
        "properties": {"v": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/node"}, NULL]}},
    }}},
]  # fmt: skip
SCHEMAS: list[Any] = [*SCALARS, *STRINGS, *OBJECTS, *ARRAYS, *COMBINED]

REGEXES = [
    r"[\^a]+x", r"a.b\s\S", r"^[\w-]+$", r"(a|)b{2,}?", r"[\S]{3}", r"[\W]x", r"\S\W\D", r"[a\u{1F600}]+", r"\x41zz",
    "]}", r"\q\cA", r"[\d-z]+", "", "(|a)*", "a{3}?", r"[^\x00-\x7f]+", r"[\p]", "a^*", "a$b", r"[\]\\x]+", "a{0}b",
    r"(\d{1,3}\.){3}\d{1,3}", r"(19|20)\d\d-[01]\d", "((a|b)*c){2}d+", "日本+", "[é-ü]*", "(?:ab)+?(?<name>c)",
    "(a{2,3}b?){2,4}", r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", ".{3,5}", r"\.\*\\\/",
]  # fmt: skip
EBNF = [
    'root ::= "a" b* ("c" | "d"){2,3}\nb ::= [0-9] | "x" b',
    'root ::= root "a" | "b"',
    'root ::= "(" root ")" | ""',
    'root ::= s\ns ::= "a" s "b" | "a" t\nt ::= "b" t | "c"',
    'root ::= ([^"\\\\] | "\\\\" ["n])* "\\n"',
    'root ::= "\\u00e9\\x41" [\\u3040-\\u309f]+ # a comment\n',
    'root ::= a a? a{0,2}\na ::= "x" | "" | "yy"',
    'root ::= e\ne ::= e "+" t | t\nt ::= t "*" f | f\nf ::= "(" e ")" | [0-9]+',
    'root ::= r "c"\nr ::= "a" | "b" (= "c")',
    'root ::= "a" Regex("[^x]\\\\d+.", json_string=true) "b"',
    'root ::= (a | b){3}\na ::= "x"\nb ::= "xx" | ""',
    'root ::= ((("a"|"ab"){1,3} "c"){1,3})+',
    "root ::= [a-c-]+ [x\\-z]",
    'root ::= "a"{2} "b"{1,} "c"{0, -1}',
    'root ::= (("a"?)* "b"?){2,5} "c"',
    'root ::= x | y\nx ::= "a" x | "a"\ny ::= "a" y "b" | "ab"',
    'root ::= "日" ("本" | "曜" "日")* "。"',
    'root ::= stmt+\nstmt ::= [a-z]+ " = " expr ";\\n"\nexpr ::= [0-9]+ | "(" expr (" + " expr)* ")"',
]
_CALL = {
    "type": "json_schema",
    "json_schema": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    """Return a tag of a structural tag."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


FORMATS: list[Any] = [
    _CALL, {"type": "const_string", "value": "cat 日"}, {"type": "any_text"}, {"type": "regex", "pattern": "[a-c]+"},
    {"type": "any_text", "excludes": ["<f", "cat"]}, {"type": "grammar", "grammar": 'root ::= "a" x\nx ::= [0-9]+'},
    tag("<fun", {"type": "any_text"}, "</"), tag("<fun", {"type": "any_text"}, ["</", "x>"]), tag("<f", _CALL, "</f>"),
    {"type": "sequence", "elements": [tag("<f", {"type": "any_text"}, "</"), tag("<a", {"type": "any_text"}, "x>")]},
    {"type": "or", "elements": [_CALL, {"type": "const_string", "value": "no"}]},
    {"type": "optional", "content": _CALL}, {"type": "plus", "content": tag("a", _CALL, "b")},
    {"type": "star", "content": tag("a", _CALL, "b")},
    {"type": "repeat", "min": 1, "max": 3, "content": {"type": "const_string", "value": "ab"}},
    {"type": "triggered_tags", "triggers": ["<f"],
     "tags": [tag("<fun", _CALL, "</f>"), tag("<fcat", {"type": "any_text"}, "</")]},
    {"type": "triggered_tags", "triggers": ["<f", "[{"], "at_least_one": True,
     "tags": [tag("<fun", _CALL, "</f>"), tag("[{", {"type": "any_text"}, "</")]},
    {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<fun", _CALL, "</f>")], "stop_after_first": True,
     "excludes": ["cat"]},
    {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<fun", _CALL, "</f>")], "stop_after_first": True,
     "at_least_one": True},
    tag("<a>", {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<fun", _CALL, "</f>")]}, "</a>"),
    {"type": "tags_with_separator", "tags": [tag("<f", _CALL, "x>"), tag("a", {"type": "any_text"}, "b")],
     "separator": ","},
    {"type": "tags_with_separator", "tags": [tag("<f", _CALL, "x>")], "separator": "", "at_least_one": True},
    {"type": "tags_with_separator", "tags": [tag("<f", _CALL, "x>")], "separator": ",", "stop_after_first": True},
    {"type": "dispatch", "rules": [["<f", _CALL], ["<fun", {"type": "const_string", "value": "x"}]], "loop": True},
    {"type": "dispatch", "rules": [["abc", _CALL], ["bc", {"type": "const_string", "value": "x"}]], "loop": False,
     "excludes": ["dog"]},
]  # fmt: skip
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "$defs": {"city": {"type": "string"}},
}
FUNCTIONS: dict[str, Any] = {"get_weather": WEATHER, "now": {}}
CHOICES = [["yes", "no"], ["a", "ab", "abc"], ['"quoted"', "日本", "a\\b"], COUNTRIES]
