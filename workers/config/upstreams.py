"""The file that lists the upstreams of one worker process: its fields, its parser and its errors.

    defaults: {key_file: /run/secrets/vllm.key, tls: {ca_file: /etc/ssl/gpu-ca.pem}}
    upstreams:
      - {name: gpu1, url: "https://gpu1:8000"}
      - {name: gpu2, url: "https://gpu2:8000", weight: 0.5, pause: true}

An entry has the fields of `UpstreamEntry`, and `defaults` has those which all entries share. An entry's own field replaces the
default as a whole. The parser reports all errors together, each with its line, its entry and its field.
"""

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import yaml
from msgspec import Meta
from msgspec.structs import replace
from yarl import URL

from events.errors import HoldfastError
from workers.config.settings_check import endpoint_error
from workers.config.simulated_settings import Count, CountOrZero
from workers.config.upstream_route import TLS_FILES, UpstreamTls

BYTES_MAX = 4 * 1024 * 1024
ERRORS_MAX = 10  # errors that one message lists
UPSTREAMS_MAX = 1000  # of one process
DISCOVERED_NAME_MAX = 24
SCHEMES = ("http", "https")
# a name is a token of the broker's subjects, a part of file names, and a label of metrics
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a token of RFC 9110
# headers that the worker sets itself, or that would break the framing of a request
_RESERVED = ("host", "content-length", "content-type", "transfer-encoding", "connection", "traceparent")

Label = Annotated[str, Meta(max_length=64)]


class BadUpstreams(HoldfastError):
    """The file of upstreams is invalid. The message lists each error with its line, entry and field."""


class UpstreamLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many requests the worker sends to one upstream."""

    requests_max: Count = 64  # requests at the upstream at once
    waiting_max: CountOrZero = 256  # requests that wait in the worker for their turn


class UpstreamEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One upstream of the file, and the worker in front of it."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]  # name of the worker; unique in the fleet
    url: str  # URL of the server, for example https://gpu1:8000
    model: str = ""  # directory of the tokenizer; empty: that of --model
    revision: Label = ""  # revision of the weights, if known
    key_file: str = ""  # file with the server's API key
    tls: UpstreamTls = UpstreamTls()
    headers: dict[str, str] = {}  # HTTP headers to add to each request
    proxy: str = ""  # URL of an HTTP proxy to connect through
    weight: Annotated[float, Meta(gt=0, le=1)] = (
        1.0  # share of requests, compared with an upstream of weight 1
    )
    zone: Label = ""  # where the server is, for operators
    limits: UpstreamLimits = UpstreamLimits()
    kv_events: list[str] = []  # endpoints where it publishes KV events (tcp://host:5557), one per DP rank
    kv_replay: list[str] = []  # endpoints where it replays lost KV events, one per DP rank
    pause: bool = False  # whether the upstream gets no worker; a running worker drains and leaves
    # dns: each address of the URL's host is an upstream of its own, with all fields of this entry
    # kubernetes: each ready pod of the Service SERVICE.NAMESPACE, the URL's host, is one
    discover: Literal["", "dns", "kubernetes"] = ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, ...)"  # a header may be a secret


_TYPES = get_type_hints(UpstreamEntry, include_extras=True)
OWN_FIELDS = ("name", "url", "pause", "discover")  # fields that `defaults` cannot set
ADJUSTABLE = ("key_file", "tls", "headers", "proxy", "weight", "zone", "limits", "pause")
"""The fields that change while the worker runs. For any other field, the worker drains and joins again."""


def upstreams_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file, for editors and checks before a roll-out."""
    _, parts = msgspec.json.schema_components([UpstreamEntry], ref_template="#/$defs/{name}")
    fields = parts["UpstreamEntry"]["properties"]
    shared = {name: value for name, value in fields.items() if name not in OWN_FIELDS}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The upstreams of a Holdfast worker process",
        "type": "object",
        "properties": {
            "defaults": {
                "description": "Fields that all entries share; an entry's own field replaces the default as a whole.",
                "type": ["object", "null"],
                "properties": shared,
                "additionalProperties": False,
            },
            "upstreams": {
                "type": "array",
                "items": {"$ref": "#/$defs/UpstreamEntry"},
                "maxItems": UPSTREAMS_MAX,
            },
        },
        "required": ["upstreams"],
        "additionalProperties": False,
        "$defs": parts,
    }


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """A safe YAML loader that rejects a mapping with two equal keys. PyYAML would silently use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} occurs twice", key.start_mark
                    )
                seen.add(key.value)
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return found


@dataclass(frozen=True, slots=True)
class _Document:
    """A parsed YAML document: its values, and the line of each entry and of each field of an entry."""

    values: Any
    lines: Mapping[tuple[int | str, str], int] = field(default_factory=dict)

    def line(self, entry: int | str, name: str = "") -> int:
        return self.lines.get((entry, name)) or self.lines.get((entry, ""), 1)


def read_upstreams(path: Path) -> bytes:
    """Return the contents of the file of upstreams. Raise BadUpstreams if it cannot be read, or is too large."""
    try:
        with path.open("rb") as file:
            text = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise BadUpstreams(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > BYTES_MAX:
        raise BadUpstreams(f"{path} has more than {BYTES_MAX} bytes")
    return text


def load_upstreams(path: Path, text: bytes) -> tuple[UpstreamEntry, ...]:
    """Parse `text`, the contents of the file `path`. Relative paths in the file begin at its folder.

    Raise BadUpstreams with all errors.
    """
    folder = path.absolute().parent
    return tuple(_absolute(entry, folder) for entry in parse_upstreams(text, str(path)))


def _absolute(entry: UpstreamEntry, folder: Path) -> UpstreamEntry:
    tls = entry.tls
    files = {name: str(folder / value) for name in TLS_FILES if (value := getattr(tls, name))}
    own = {name: str(folder / value) for name in ("model", "key_file") if (value := getattr(entry, name))}
    return replace(entry, tls=replace(tls, **files), **own)


def parse_upstreams(text: bytes, where: str = "upstreams.yaml") -> tuple[UpstreamEntry, ...]:
    """Parse the contents of a file of upstreams, and leave its paths as they are.

    Raise BadUpstreams with all errors. `where` is the file's name in the errors.
    """
    document = _load(text, where)
    values = document.values
    # an empty file is an error, because it is more often a mistake than the wish to stop all upstreams
    if not isinstance(values, dict) or not {"upstreams"} <= {*values} <= {"defaults", "upstreams"}:
        raise BadUpstreams(f"{where}:1: expected a mapping with the keys upstreams and, optionally, defaults")
    errors = list(_defaults_errors(values.get("defaults"), document))
    listed = values.get("upstreams")
    if not isinstance(listed, list):
        errors.append((1, "upstreams: expected a list; write [] for none"))
        listed = []
    if len(listed) > UPSTREAMS_MAX:
        errors.append((1, f"upstreams: {len(listed)} entries, at most {UPSTREAMS_MAX} fit one process"))
    defaults = values.get("defaults") if not errors else None
    entries: list[UpstreamEntry] = []
    for number, given in enumerate(listed):
        entry = _entry(number, given, defaults or {}, document, errors)
        if entry is not None:
            errors += _clashes(number, entry, entries, document)
            entries.append(entry)
    if errors:
        shown = [f"{where}:{line}: {why}" for line, why in sorted(errors)[:ERRORS_MAX]]
        more = [f"and {len(errors) - ERRORS_MAX} more errors"] if len(errors) > ERRORS_MAX else []
        raise BadUpstreams("; ".join([*shown, *more]))
    return tuple(entries)


def _load(text: bytes, where: str) -> _Document:
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            values = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        raise BadUpstreams(f"{where}:{line}: {getattr(error, 'problem', None) or error}") from None
    except (RecursionError, ValueError) as error:  # nested too deeply; an impossible date
        raise BadUpstreams(f"{where}:1: not a list of upstreams: {error or type(error).__name__}") from None
    return _Document(values, dict(_lines(node)))


def _lines(node: yaml.Node | None) -> Iterator[tuple[tuple[int | str, str], int]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value == "defaults":
            yield from _fields_lines("defaults", value)
        elif key.value == "upstreams" and isinstance(value, yaml.SequenceNode):
            for number, entry in enumerate(value.value):
                yield from _fields_lines(number, entry)


def _fields_lines(entry: int | str, node: yaml.Node) -> Iterator[tuple[tuple[int | str, str], int]]:
    yield (entry, ""), node.start_mark.line + 1
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        yield (entry, str(key.value)), key.start_mark.line + 1


def _defaults_errors(given: object, document: _Document) -> Iterator[tuple[int, str]]:
    if given is None:
        return
    if not isinstance(given, dict):
        yield document.line("defaults"), "defaults: expected a mapping of fields"
        return
    for name, value in given.items():
        if name in OWN_FIELDS or name not in _TYPES:
            why = "each upstream has its own" if name in OWN_FIELDS else _unknown(name)
            yield document.line("defaults", str(name)), f"defaults.{name}: {why}"
        elif why := _type_error(name, value):
            yield document.line("defaults", name), f"defaults.{why}"


def _entry(
    number: int,
    given: object,
    defaults: Mapping[str, Any],
    document: _Document,
    errors: list[tuple[int, str]],
) -> UpstreamEntry | None:
    """Return the entry with this number. If it is invalid, add its errors to `errors` and return None."""
    where = f"upstreams[{number}]"
    if not isinstance(given, dict):
        errors.append((document.line(number), f"{where}: expected a mapping with name and url"))
        return None
    where += f" ({given['name']})" if isinstance(given.get("name"), str) else ""
    found = [(name, _unknown(name)) for name in given if name not in _TYPES]
    found += [(name, f"{name}: missing") for name in ("name", "url") if name not in given]
    found += [
        (name, why) for name, value in given.items() if name in _TYPES and (why := _type_error(name, value))
    ]
    if not found:
        entry = msgspec.convert({**defaults, **given}, UpstreamEntry)
        found += _value_errors(entry)
        if not found:
            return entry
    errors += [(document.line(number, str(name)), f"{where}: {why}") for name, why in found]
    return None


def _unknown(name: object) -> str:
    return f"{name}: unknown field; the fields are {', '.join(_TYPES)}"


def _type_error(name: str, value: object) -> str:
    """Return why a value does not have the type of the field `name`; "" if it does. The value itself may be a secret."""
    try:
        msgspec.convert(value, _TYPES[name])
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        return f"{name}{path.rstrip('`').replace('[...]', '')}: {what[0].lower()}{what[1:]}"
    return ""


def _value_errors(entry: UpstreamEntry) -> Iterator[tuple[str, str]]:
    """Yield the errors of an entry with fields of the right types: the field, and a text that begins with it."""
    if not _NAME.fullmatch(entry.name):
        yield "name", f"name = {entry.name!r}: use letters, digits, - and _, beginning with a letter or digit"
    for name, schemes in (("url", SCHEMES), ("proxy", ("http",))):
        value = getattr(entry, name)
        if (value or name == "url") and (why := _url_error(value, schemes)):
            yield name, f"{name}: {why}"
    if entry.discover and len(entry.name) > DISCOVERED_NAME_MAX:
        yield (
            "name",
            f"name: at most {DISCOVERED_NAME_MAX} characters with discover, which appends the address",
        )
    if entry.discover and entry.kv_events:
        yield "kv_events", "kv_events: not possible with discover; list the servers one by one"
    tls = entry.tls
    if tls != UpstreamTls() and not entry.url.startswith("https://"):
        yield "tls", "tls: only valid with an https:// URL"
    if tls.key_file and not tls.cert_file:
        yield "tls", "tls.key_file: requires tls.cert_file"
    if tls.ca_file and not tls.verify:
        yield "tls", "tls.verify: false contradicts tls.ca_file, which would have no effect"
    for header, value in entry.headers.items():
        if not _HEADER.fullmatch(header) or header.lower() in _RESERVED:
            yield "headers", f"headers.{header}: not a header that can be set"
        elif not value.isprintable() or value != value.strip():
            yield "headers", f"headers.{header}: the value must be printable text without surrounding spaces"
        elif header.lower() == "authorization" and entry.key_file:
            yield "headers", f"headers.{header}: key_file sets this header; set only one of them"
    for name in ("kv_events", "kv_replay"):
        for one in getattr(entry, name):
            if why := endpoint_error(one):
                yield name, f"{name}: {why}"
    if entry.kv_replay and len(entry.kv_replay) != len(entry.kv_events):
        yield (
            "kv_replay",
            f"kv_replay: {len(entry.kv_replay)} endpoints, kv_events has {len(entry.kv_events)}",
        )


def _url_error(text: str, schemes: tuple[str, ...]) -> str:
    try:
        url = URL(text)
        good = url.scheme in schemes and bool(url.host) and url.port != 0
    except ValueError:  # the port is not a number
        good = False
    if not good:
        return f"expected a URL such as {schemes[0]}://gpu1:8000"
    return ""


def _clashes(
    number: int, entry: UpstreamEntry, others: list[UpstreamEntry], document: _Document
) -> Iterator[tuple[int, str]]:
    for other in others:
        for name in ("name", "url"):
            if getattr(other, name) == getattr(entry, name):
                why = f"{name}: equal to that of {other.name}; each upstream is listed once"
                yield document.line(number, name), f"upstreams[{number}] ({entry.name}): {why}"
