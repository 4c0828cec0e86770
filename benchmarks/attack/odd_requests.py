"""Generates odd requests, each from the seed and its own number alone.

- `head`: odd before its body begins.
- `bytes`: a good body with bytes changed.
- `value`: one field of the API (all of them in turn) with a value that is wrong, of another type, or at an edge.
- `values`: several such fields.
- `left`: a good request, but its client disconnects.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Literal

from controller.frontend.http.routes import document

Kind = Literal["head", "bytes", "value", "values", "left"]
ROUND: Sequence[Kind] = (
    "value",
    "head",
    "value",
    "bytes",
    "value",
    "values",
    "value",
    "head",
    "value",
    "left",
)

_MESSAGES = [{"role": "user", "content": "hi"}]
_GOOD: Mapping[str, tuple[str, dict[str, Any]]] = {  # by schema name: the path, and an accepted body
    "ChatBody": ("/v1/chat/completions", {"model": "sim", "messages": _MESSAGES, "max_tokens": 4}),
    "CompletionBody": ("/v1/completions", {"model": "sim", "prompt": "once", "max_tokens": 4}),
    "TokenizePromptBody": ("/tokenize", {"prompt": "once"}),
    "TokenizeChatBody": ("/tokenize", {"messages": _MESSAGES}),
    "DetokenizeBody": ("/detokenize", {"tokens": [300, 301]}),
}


def _nested(depth: int) -> Any:
    made: Any = []
    for _ in range(depth):
        made = [made]
    return made


VALUES: Sequence[Any] = (
    *(None, True, False, 0, -0.0, 1, -1, 3, 0.5, -0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf")),
    *(2**31, 2**32, 2**53 + 1, 2**63, -(2**63), 2**64, 10**400),
    *("", "0", "1", "null", "true", "auto", "\0", "\ud800", "é😀", "{{ 7 * 7 }}", "{% for a in b %}", "(a+)+$"),
    *("a" * 300, "a b " * 30_000, "\r\nX-Evil: 1", "../../etc/passwd", "%s%n", "<script>"),
    *([], [[]], [None], [""], [0], [-1], [2**40], [1.5], [True], [1, "a"], [[1], "a"], ["a"] * 100, [7] * 20_000),
    *(_nested(60), _nested(300), [{"type": "text"}], [{"type": "image_url", "image_url": {"url": "file:///x"}}]),
    *([{"role": "user"}], [{"role": 7, "content": "a"}], [{"role": "user", "content": [{"type": "text", "text": 7}]}]),
    *([{"role": "tool", "content": None}], [{"content": "a"}], [None, {"role": "user", "content": "a"}]),
    *({}, {"": None}, {"a": {"b": {"c": []}}}, {"300": 1}, {"300": "x"}, {"-1": 1}, {"99999999999": 1}, {"1e3": 100}),
    *({"300": float("nan")}, {"__class__": 1}, {"type": "json_schema"}, {"type": 7}, {"include_usage": "yes"}),
    *({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, {"choice": []}, {"regex": "("}),
)  # fmt: skip

_TARGETS: Sequence[bytes] = (
    *(b"/", b"*", b"", b"//", b"/v1", b"/v1/models/", b"/v1/models/%00", b"/v1/models/%ff%fe", b"/v1/models/a/b/c"),
    *(b"/../../etc/passwd", b"/v1/completions?a=%zz", b"/v1/completions#f", b"http://other.example/v1/models"),
    *(b"other.example:443", b"/" + b"a" * 9_000, b"/" + b"a" * 100_000, b"/\xc3\xa9", b"/\0", b"/v1/completions/"),
    *(b"/metrics", b"/openapi.json", b"/health", b"/version", b"/tokenize"),
)  # fmt: skip
_METHODS: Sequence[bytes] = (
    *(b"GET", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH", b"TRACE", b"CONNECT", b"PRI", b"post", b"P0ST"),
    *(b"", b"G\0T", b"\xff", b"M" * 5_000, b"POST POST"),
)  # fmt: skip
_VERSIONS: Sequence[bytes] = (
    *(b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.10", b"HTTP", b"", b"http/1.1", b"HTTP/1.1 x"),
)  # fmt: skip
_HEADERS: Sequence[bytes] = (
    *(b"Content-Length: -1", b"Content-Length: 1e3", b"Content-Length: 0", b"Content-Length: 99999999999999999999"),
    *(b"Content-Length: 5, 7", b"Content-Length: +5", b"Content-Length:", b"Transfer-Encoding: chunked"),
    *(b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity", b"Transfer-Encoding: \x0bchunked"),
    *(b"Content-Encoding: gzip", b"Content-Encoding: br", b"Content-Encoding: gzip, gzip", b"Content-Encoding: x"),
    *(b"Content-Type: text/plain", b"Content-Type: application/json; charset=utf-16", b"Content-Type: multipart/form-data"),
    *(b"Content-Type: \xff", b"Expect: 100-continue", b"Expect: 200-maybe", b"Upgrade: websocket", b"Upgrade: h2c"),
    *(b"Connection: upgrade, keep-alive, close, x", b"Host: a\r\nHost: b", b"Host: \0", b"No-Colon", b": no name", b"A B: c"),
    *(b" folded", b"X: a\r\n\tfolded", b"X: \0", b"X: \x7f\x80", b"X: a\rb", b"X: " + b"a" * 7_000, b"X: " + b"a" * 200_000),
    *(b"\r\n".join(b"X-%d: y" % n for n in range(150)), b"\r\n".join(b"X-%d: y" % n for n in range(3_000))),
    *(b"X-Request-Id: ", b"X-Request-Id: " + b"r" * 129, b"X-Request-Id: \xc3\xa9", b"X-Request-Id: a.b > *"),
    *(b"X-Priority: emperor", b"X-Priority: ", b"traceparent: 00-0-0-0", b"traceparent: " + b"0" * 500),
    *(b"X-Holdfast-Explain: 1", b"X-Holdfast-Explain: maybe", b"X-Holdfast-Router-Temperature: nan"),
    *(b"X-Holdfast-Router-Temperature: -1", b"X-Holdfast-Router-Temperature: 1e999", b"X-Holdfast-Router-Mode: x"),
    *(b"X-Holdfast-Router-Mode: kv", b"X-Holdfast-Router-Ttl-Secs: {}", b"Range: bytes=5-1", b"Cookie: \x01"),
    *(b"Authorization: Basic !!!", b"Accept: ;;;", b"Accept-Encoding: *;q=-1", b"If-Match: *"),
)  # fmt: skip
_GARBAGE: Sequence[bytes] = (
    *(b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(40), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)),
    *(b"\r\n" * 1_000, b"\n\n", b"\0" * 300, b"GET /live\r\n\r\n", b"GET /live\n\n", b" GET /live HTTP/1.1\r\nHost: x\r\n\r\n"),
    *(b"GET /live HTTP/1.1\nHost: x\nConnection: close\n\n", b"GET /live HTTP/1.1\rHost: x\r\r", b"HTTP/1.1 200 OK\r\n\r\n"),
    *(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n" * 40, b"CONNECT sim\r\n\r\n", b"\xef\xbb\xbfGET / HTTP/1.1\r\n\r\n"),
    *(struct.pack("<I", 100) + b"\x93", b"SSH-2.0-x\r\n", b"{}", b"\xff" * 70_000),
)  # fmt: skip
_CHUNKS: Sequence[bytes] = (
    *(b"zz\r\n{}\r\n0\r\n\r\n", b"-1\r\n\r\n", b"2\r\n{}0\r\n\r\n", b"2;a=b\r\n{}\r\n0\r\n\r\n", b"0\r\n\r\n"),
    *(b"ffffffffffffffffffff\r\n{}", b"2\r\n{}\r\n0\r\nX: y\r\n\r\n", b"2\n{}\n0\n\n", b"0x2\r\n{}\r\n0\r\n\r\n", b"2\r\n{"),
)  # fmt: skip
_BODIES: Sequence[bytes] = (
    *(b"", b" ", b"null", b"7", b'"a"', b"[]", b"{}", b"{", b"}", b"[" * 50_000, b'{"a":' * 20_000, b'{"model":"sim"}{}'),
    *(b"\xef\xbb\xbf{}", b"\xff\xfe{\0}\0", b"{'a': 1}", b'{"model": "sim", "prompt": "a", "max_tokens": 01}'),
    *(b'{"model": "sim", "model": "x", "prompt": "a", "max_tokens": 2}', b'{"prompt": "\xff"}', b"\x1f\x8b\x08\0"),
    *(b'{"model": "sim", "prompt": "a", "max_tokens": 2, "temperature": 1e999}', b'{"prompt": "\\ud800\\ud800"}'),
    *(b'{"model": "sim", "prompt": [1e0], "max_tokens": 2}', b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Odd:
    """One request. `about`: the field of the API with the odd value, or the path. A request that is not `whole` may be no
    HTTP, or have no end: it may be closed without an answer. A client waits for the answer, or disconnects after
    some bytes."""

    number: int
    kind: Kind
    about: str
    said: bytes
    whole: bool = True
    leaves_after: int | None = None


def odd_request(seed: int, number: int) -> Odd:
    """Return the request with this number."""
    turn, place = divmod(number, len(ROUND))
    kind = ROUND[place]
    before = turn * ROUND.count(kind) + ROUND[:place].count(kind)  # earlier requests of its kind
    return _MAKERS[kind](Random(f"{seed} {number}"), number, before)


@cache
def fields() -> Sequence[tuple[str, str]]:
    """Return each field of the API, with the name of its schema."""
    schemas = json.loads(document())["components"]["schemas"]
    return [(name, field) for name in _GOOD for field in schemas[name]["properties"]]


def posted(path: str, body: bytes, *headers: bytes) -> bytes:
    """Return a request that closes its connection."""
    lines = [f"POST {path} HTTP/1.1".encode(), b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body


def _value(dice: Random, number: int, before: int) -> Odd:
    schema, field = fields()[before % len(fields())]
    path, good = _GOOD[schema]
    body = json.dumps(good | {field: dice.choice(VALUES)}).encode()
    return Odd(number, "value", f"{schema}.{field}", posted(path, body))


def _values(dice: Random, number: int, before: int) -> Odd:
    schema = dice.choice(tuple(_GOOD))
    path, good = _GOOD[schema]
    named = dice.sample([field for of, field in fields() if of == schema], k=min(3, len(good) + 1))
    body = good | {field: dice.choice(VALUES) for field in named}
    return Odd(number, "values", f"{schema}: {', '.join(named)}", posted(path, json.dumps(body).encode()))


def _bytes(dice: Random, number: int, before: int) -> Odd:
    path, good = _GOOD[dice.choice(tuple(_GOOD))]
    body = bytearray(json.dumps(good).encode())
    if dice.random() < 0.3:
        return Odd(number, "bytes", path, posted(path, dice.choice(_BODIES)))
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(body) + 1)
        match dice.randrange(4):
            case 0:
                body[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                body[at:at] = dice.choice(
                    (b'"', b"{", b"]", b",", b":", b"\0", b"\\u", b"NaN", b"1e999", b"/**/")
                )
            case 2:
                del body[at : at + dice.randint(1, 9)]
            case 3:
                body[at:at] = body[: dice.randint(1, 20)]
    return Odd(number, "bytes", path, posted(path, bytes(body)))


def _head(dice: Random, number: int, before: int) -> Odd:
    path, good = _GOOD[dice.choice(tuple(_GOOD))]
    body = json.dumps(good).encode()
    shape = dice.randrange(6)
    if shape == 0:
        return Odd(number, "head", "garbage", dice.choice(_GARBAGE), whole=False)
    if shape == 1:
        lines = [f"POST {path} HTTP/1.1".encode(), b"Host: x", b"Transfer-Encoding: chunked", b"", b""]
        return Odd(number, "head", "chunks", b"\r\n".join(lines) + dice.choice(_CHUNKS), whole=False)
    line = [b"POST", path.encode(), b"HTTP/1.1"]
    if shape in (2, 3):
        place = dice.randrange(3)
        line[place] = dice.choice((_METHODS, _TARGETS, _VERSIONS)[place])
    lines = [b" ".join(line), b"Host: x", b"Content-Length: %d" % len(body), b"Connection: close"]
    if shape >= 3:
        for header in dice.sample(_HEADERS, k=dice.randint(1, 2)):
            lines.insert(dice.randint(1, len(lines)), header)
    if dice.random() < 0.1:
        lines.pop(dice.randint(1, 2))
    said = b"\r\n".join([*lines, b"", b""]) + body
    if dice.random() < 0.1:  # incomplete: nothing follows
        said = said[: dice.randrange(len(said))]
    return Odd(number, "head", "line and headers", said, whole=False)


def _left(dice: Random, number: int, before: int) -> Odd:
    path, good = _GOOD[dice.choice(("ChatBody", "CompletionBody"))]
    body = good | {"stream": dice.random() < 0.7, "max_tokens": 400}
    said = posted(path, json.dumps(body).encode())
    if dice.random() < 0.3:
        said = said[: dice.randrange(1, len(said))]
    return Odd(number, "left", path, said, whole=False, leaves_after=dice.choice((0, 1, 200, 2_000)))


_MAKERS: Mapping[Kind, Callable[[Random, int, int], Odd]] = {
    "head": _head, "bytes": _bytes, "value": _value, "values": _values, "left": _left,
}  # fmt: skip
