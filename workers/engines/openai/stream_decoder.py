"""Decodes the bytes of an upstream's answer stream into chunks. It does no I/O and uses no clock.

HTTP 200 does not guarantee a valid answer. In the following cases, the decoder reports an error instead of a normal end. All of
them except the first count as faults of the engine:

    an error object that the request caused (`refusal_of`)               invalid_request
    any other error object, with or without [DONE] after it              engine_error
    finish_reason "abort" (an engine that is being stopped)              engine_error
    the stream ends without any finish_reason                            stream_incomplete
    a null or infinite logprob, or an answer of only token id 0          non_finite

Repeated token id 0 is a sign of NaN logits on vLLM: the argmax of NaN is 0, and vLLM answers HTTP 200. Consecutive tokens with
id 0 are held back until another token follows, so that a client never sees zeros that come from NaN.

If vLLM cannot compile a request's grammar, it answers HTTP 200 and sends `{"error": {…, "code": 400}}` in the stream. Such a
request would fail on any other server, too, so the error is no sign of an unhealthy server.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from events.refusal import RequestRefusal
from events.wire import Chunk, Generate, Logprob, finish_reason

LINE_BYTES_MAX = 4 * 1024 * 1024
ZEROS_MAX = 8  # this many consecutive tokens with id 0 are a fault
ZEROS_ALONE_MAX = 3  # a user's answer of tokens with id 0 only is a fault if it has more tokens than this
WORDS_MAX = 200  # characters of an upstream's message that an error quotes
ENGINE_GONE = "EngineCore encountered an issue"  # vLLM's error for each request that was lost together with its engine's process
NAMES_MAX = 100  # characters of an error's type, and of the field name in an error
NOT_THE_CLIENTS = frozenset((401, 403, 404, 405, 407, 408, 409, 421, 425, 426, 429))
"""4xx statuses that are caused by the caller, the address or the time, not by the content of the request."""
MISTAKEN_TYPES = frozenset(("invalid_request_error", "BadRequestError", "UnprocessableEntityError"))
"""Values of `type` for a client's error in error objects without an HTTP status, from OpenAI, vLLM and SGLang."""
DONE = "[DONE]"

JsonObject = dict[str, Any]
"""An object of a server's answer or of a request to it, decoded and not yet checked."""

IdsFrom = Literal["token_ids", "logprobs", "text_bytes", "nowhere"]
"""The part of a stream that contains the token ids.

With `text_bytes`, the bytes of the text serve as token ids. This is for canaries of upstreams that only handle text. Any
deterministic numbers can distinguish a right answer from a wrong one, and a canary is never continued on another worker.
"""


class Fault(Exception):
    """The upstream's stream is not a valid answer. The message is a reason of `events.wire.ERRORS`, a colon and the detail."""


@dataclass(slots=True)
class StreamPiece:
    """The content of one server-sent event."""

    tokens: list[int]
    text: str
    logprobs: list[Logprob]


class UpstreamStream:
    """Decodes the stream of one request. `over` becomes true with the chunk that has a finish reason or an error."""

    def __init__(self, request: Generate, ids_from: IdsFrom) -> None:
        self.over = False
        self._request = request
        self._ids_from = ids_from
        self._pending = bytearray()
        self._held: list[StreamPiece] = []  # held-back pieces that end with token id 0
        self._zeros = 0  # number of tokens with id 0 since the last other token
        self._only_zeros = True  # all tokens so far have id 0
        self._token_count = 0

    def feed(self, data: bytes) -> list[Chunk]:
        """Decode the next bytes of the stream and return the chunks that these bytes complete.

        Only the last returned chunk can be the end of the answer.
        """
        chunks: list[Chunk] = []
        try:
            for payload in self._payloads(data):
                if self.over:
                    break
                chunks.extend(self._take(payload))
        except Fault as fault:
            chunks.append(self._end(error=str(fault)))
        return chunks

    def end(self) -> list[Chunk]:
        """Return the chunks to add after the upstream has closed the stream: an error chunk, or none if the answer has ended."""
        if self.over:
            return []
        return [self._end(error="stream_incomplete: the upstream closed without a finish reason")]

    def _payloads(self, data: bytes) -> Iterator[str]:
        """Yield the content of each complete `data:` line. Keep an incomplete line for the next call.

        Raise Fault if the incomplete line has more than 4 MiB (LINE_BYTES_MAX).
        """
        pending = self._pending
        pending += data
        lines: list[bytes] = []
        if b"\n" in data:
            *lines, rest = bytes(pending).split(b"\n")
            pending[:] = rest
        if len(pending) > LINE_BYTES_MAX:
            raise Fault(f"engine_error: the upstream sent a line of more than {LINE_BYTES_MAX} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].decode(errors="replace").strip()

    def _take(self, payload: str) -> Iterator[Chunk]:
        if payload == DONE:
            raise Fault("stream_incomplete: the upstream ended without a finish reason")
        try:
            said = json.loads(payload)
        except ValueError:
            raise Fault(f"engine_error: the upstream sent what is not JSON: {_cut(payload)}") from None
        if not isinstance(said, dict) or "error" in said or (said.get("message") and "choices" not in said):
            raise Fault(error_of(said, canary=self._request.canary))
        choices = said.get("choices") or []
        if not choices:  # a usage event, which is not needed because the decoder counts the tokens
            return
        try:
            yield from self._choice(choices[0])
        except (TypeError, LookupError, AttributeError, ValueError) as error:
            raise Fault(f"engine_error: the upstream sent an event that makes no sense: {error!r}") from None

    def _choice(self, choice: JsonObject) -> Iterator[Chunk]:
        piece = read_piece(choice, self._ids_from, self._request.sampling.logprobs)
        self._token_count += len(piece.tokens)
        if self._token_count > self._request.sampling.max_tokens and self._ids_from != "text_bytes":
            raise Fault(f"engine_error: more than the {self._request.sampling.max_tokens} tokens asked for")
        released = self._release_zeros(piece)
        reason = choice.get("finish_reason")
        if reason is None:
            if released is not None and (released.tokens or released.text):
                yield self._chunk(released)
            return
        if reason in ("abort", "error"):
            raise Fault(f"engine_error: the upstream ended the request itself ({reason})")
        self._check_zeros_alone()
        last = _joined([*self._held, *([] if released is None else [released])])
        self.over = True
        yield self._chunk(last, finish=finish_reason(reason))

    def _release_zeros(self, piece: StreamPiece) -> StreamPiece | None:
        """Hold back pieces that end with token id 0, until another token follows.

        Return the piece to deliver, joined with the pieces held back before, or None if the piece is held back. Raise Fault
        after ZEROS_MAX (8) tokens with id 0 in a row.
        """
        for token in piece.tokens:
            self._zeros = self._zeros + 1 if token == 0 else 0
            self._only_zeros = self._only_zeros and token == 0
            if self._zeros >= ZEROS_MAX:
                raise Fault(f"non_finite: {self._zeros} times token id 0 in a row, as from NaN logits")
        if piece.tokens and self._zeros:
            self._held.append(piece)
            return None
        if not self._held or not (piece.tokens or piece.text):
            return piece
        held, self._held = [*self._held, piece], []
        return _joined(held)

    def _check_zeros_alone(self) -> None:
        """Raise Fault if all tokens of the answer have id 0.

        A user's answer with at most ZEROS_ALONE_MAX (3) such tokens is accepted, because it may be valid. A canary's answer is
        not.
        """
        if (
            self._token_count
            and self._only_zeros
            and (self._request.canary or self._token_count > ZEROS_ALONE_MAX)
        ):
            raise Fault("non_finite: nothing but token id 0, as from NaN logits")

    def _chunk(self, piece: StreamPiece, finish: str | None = None) -> Chunk:
        text = piece.text if self._ids_from == "nowhere" else None
        return Chunk(0, piece.tokens, finish, None, piece.logprobs or None, text)

    def _end(self, error: str) -> Chunk:
        self.over = True
        return Chunk(0, [], error=error)


def read_piece(choice: JsonObject, ids_from: IdsFrom, wanted: int) -> StreamPiece:
    """Return the content of an event's choice, with the logprobs of the `wanted` best tokens per position; 0: none.

    `ids_from` is the part of the choice that contains the token ids. Raise Fault for token ids or logprobs that are invalid.
    """
    given, text = choice.get("logprobs") or {}, str(choice.get("text") or "")
    try:
        logprobs, ids = _detailed(given, wanted) if "content" in given else _classic(given, wanted)
        match ids_from:
            case "token_ids":
                return StreamPiece(_ids(choice.get("token_ids") or []), text, logprobs if wanted else [])
            case "logprobs":
                return StreamPiece(ids, text, logprobs if wanted else [])
            case "text_bytes":
                return StreamPiece(list(text.encode()), text, [])
            case "nowhere":
                return StreamPiece([], text, logprobs if wanted else [])
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise Fault(f"engine_error: the upstream's logprobs cannot be read: {error!r}") from None


def _ids(given: Iterable[object]) -> list[int]:
    """Return the token ids. Raise Fault for an invalid id.

    All requests' output of a step is sent in one frame, and an invalid id would make the whole frame unreadable.
    """
    ids = []
    for token in given:
        if type(token) is not int or not 0 <= token < 2**31:
            raise Fault(f"engine_error: the upstream calls {token!r} a token id")
        ids.append(token)
    return ids


def _classic(given: JsonObject, wanted: int) -> tuple[list[Logprob], list[int]]:
    """Read logprobs in the form of /v1/completions, which consists of parallel lists.

    Tokens are given as text, or by vLLM as `token_id:N`. Return the logprobs, and an empty list of token ids. Raise Fault for a
    logprob that is not finite.
    """
    tops = given.get("top_logprobs") or []
    found: list[Logprob] = []
    for place, value in enumerate(given.get("token_logprobs") or []):
        top = tops[place] if place < len(tops) and tops[place] else {}
        pairs = [(number, finite(v)) for name, v in top.items() if (number := _token_id(name)) is not None]
        found.append(_ranked(finite(value), pairs, wanted))
    return found, []


def _detailed(given: JsonObject, wanted: int) -> tuple[list[Logprob], list[int]]:
    """Read logprobs in llama.cpp's form, in which each token has an id. Return the logprobs and the token ids.

    Raise Fault for a logprob that is not finite.
    """
    found: list[Logprob] = []
    ids: list[int] = []
    for position in given.get("content") or []:
        pairs = [
            (int(p["id"]), finite(p["logprob"])) for p in position.get("top_logprobs") or [] if "id" in p
        ]
        found.append(_ranked(finite(position["logprob"]), pairs, wanted))
        if "id" in position:
            ids.append(int(position["id"]))
    return found, ids


def _ranked(chosen: float, pairs: list[tuple[int, float]], wanted: int) -> Logprob:
    return Logprob(chosen, sorted(pairs, key=lambda pair: -pair[1])[:wanted])


def _token_id(name: str) -> int | None:
    number = name.removeprefix("token_id:")
    return int(number) if number != name and number.isdigit() else None


def finite(value: float | None) -> float:
    """Return a logprob as a float. Raise Fault if the value is null, NaN or infinite."""
    if value is None or not math.isfinite(value):
        raise Fault(f"non_finite: a logprob is {value}")
    return float(value)


def _joined(pieces: list[StreamPiece]) -> StreamPiece:
    return StreamPiece(
        [token for piece in pieces for token in piece.tokens],
        "".join(piece.text for piece in pieces),
        [logprob for piece in pieces for logprob in piece.logprobs],
    )


def _cut(words: str) -> str:
    return words if len(words) <= WORDS_MAX else words[:WORDS_MAX] + "…"


def is_client_error(status: int) -> bool:
    """Return whether an HTTP status means that the content of the request is invalid."""
    return 400 <= status < 500 and status not in NOT_THE_CLIENTS


def refusal_of(said: object, status: int | None = None) -> RequestRefusal | None:
    """Return the refusal in a server's error object, or None if the client did not cause the error.

    `status` is the HTTP status of the response, or None for an error object in a stream. If `status` is None, the status in the
    error object decides whether the client caused the error. If the error object contains no status either, its `type` decides.
    """
    fields = _fields(said)
    kind, param = fields.get("type"), fields.get("param")
    found = status if status is not None else _status(fields)
    if found is None and isinstance(kind, str) and kind in MISTAKEN_TYPES:
        found = 400
    if found is None or not is_client_error(found):
        return None
    return RequestRefusal(
        error_words(said),
        found,
        kind[:NAMES_MAX] if isinstance(kind, str) else "",
        param[:NAMES_MAX] if isinstance(param, str) else None,
    )


def error_of(said: object, status: int | None = None, *, canary: bool) -> str:
    """Convert a server's error object to the text for a chunk's `error` field, and return the text.

    `status` is the HTTP status of the response, or None for an error object in a stream. The refusal of a canary never counts as
    the client's error, because canaries are known to be valid.
    """
    refusal = None if canary else refusal_of(said, status)
    if refusal is not None:
        return refusal.error
    if status == 429 or (status is None and _status(_fields(said)) == 429):
        return f"overloaded: the upstream answers 429: {error_words(said)}"
    reason = "upstream_lost" if ENGINE_GONE in error_words(said) else "engine_error"
    how = "reports an error" if status is None else f"answers {status}"
    return f"{reason}: the upstream {how}: {error_words(said)}"


def _fields(said: object) -> dict[str, object]:
    """Return the fields of an error object; empty if it has none. OpenAI nests the fields in a field `error`."""
    error = said.get("error", said) if isinstance(said, dict) else said
    return error if isinstance(error, dict) else {}


def _status(fields: dict[str, object]) -> int | None:
    """Return the HTTP status (400 to 599) that an error object contains, or None if it contains none."""
    for name in ("code", "status", "status_code"):
        value = fields.get(name)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) == 3:
            value = int(value)
        if type(value) is int and 400 <= value < 600:
            return value
    return None


def error_words(said: object) -> str:
    """Return the message of an error object, cut to 200 characters (WORDS_MAX)."""
    if isinstance(said, dict):
        error = said.get("error", said)
        said = error.get("message", error) if isinstance(error, dict) else error
    words = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, default=str)
    return _cut(words)
