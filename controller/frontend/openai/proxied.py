"""Requests that are passed on to the server behind a worker unchanged, and their responses.

A request is proxied if its path has no tokens in its answer (embeddings, scores, audio), if it has a field that only the server
supports, or if the client asks for it. It is admitted, routed and watched like any other request. No other worker can continue
its response:

    whole response      collected before the client gets a byte, so the request can be repeated on another worker at any time
    stream of events    sent as it arrives; after the first event, a failure ends the stream with an error
"""

from array import array
from collections.abc import Sequence

import msgspec

from controller.frontend.errors import ApiError, invalid, unsupported
from controller.frontend.openai.choice import Choice, InvalidOutput, ResponseWriter
from controller.frontend.openai.formats import AnswerFormat, OutputModel, WholeResponse
from controller.frontend.openai.messages.events import MessagesFormat
from controller.frontend.openai.multipart import form_fields, with_form_field
from controller.frontend.openai.request_head import Call
from controller.frontend.openai.request_parser import ParsedRequest, bad_json
from controller.frontend.openai.sse import SseStream
from events.proxied_paths import AUDIO, BATCHES, MESSAGES, POOLING
from events.wire import FRAME_BYTES_MAX, Logprob, ProxiedPiece, ProxiedRequest, Sampling

BODY_BYTES_MAX = FRAME_BYTES_MAX - 64 * 1024  # a body and the rest of its frame fit into a frame
WHOLE_BYTES_MAX = 128 * 1024 * 1024  # of a response that is not streamed
BYTES_PER_TOKEN = 4  # of a body: a rough estimate of the work, for English text
STATUSES = range(200, 500)


class ControllingFields(msgspec.Struct):
    """Fields that are never passed on, because they control a server: its connections to others, its code, its files."""

    kv_transfer_params: object = None
    ec_transfer_params: object = None
    session_params: object = None
    bootstrap_host: object = None
    bootstrap_port: object = None
    bootstrap_room: object = None
    data_parallel_rank: object = None
    custom_logit_processor: object = None
    lora_path: object = None


class ProxiedBody(msgspec.Struct):
    """The fields of a JSON body that the frontend reads. The server validates all others."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    user: str | None = None


def read_proxied(path: str, media: str, body: bytes) -> ParsedRequest:
    """Read the fields that the frontend needs from the body of a proxied request.

    Raise ApiError: 400 if the body cannot be read, 413 if it is too large.
    """
    if len(body) > BODY_BYTES_MAX:
        why = f"the body has {len(body)} bytes; a request that is passed on may have {BODY_BYTES_MAX}"
        raise ApiError(413, why, code="body_too_large")
    try:
        if path in AUDIO:
            fields = form_fields(body, media)
            found = ProxiedBody(model=fields.get("model"), stream=fields.get("stream", "").lower() == "true")
        else:
            found = msgspec.json.decode(body, type=ProxiedBody)
            _refuse_controlling(msgspec.json.decode(body, type=ControllingFields))
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_json(str(error)) from error
    wanted = found.max_completion_tokens or found.max_tokens
    streamed = bool(found.stream) and path not in POOLING and path != BATCHES
    return ParsedRequest(
        api="proxied",
        model=found.model or "",
        stream=streamed,
        include_usage=False,
        max_tokens=1 if path in POOLING or path in AUDIO else wanted if wanted and wanted > 0 else None,
        sampling=Sampling(0),
        user=found.user or "",
        proxied=ProxiedRequest(path, body, media or "application/json", streamed),
    )


def _refuse_controlling(body: ControllingFields) -> None:
    """Raise ApiError (400) if a body has a field that controls a server, unless its value is null or empty."""
    for name in body.__struct_fields__:
        if getattr(body, name) not in (None, {}, ""):
            raise unsupported(name, "it is not passed on to a server")


def with_model(proxied: ProxiedRequest, model: str) -> ProxiedRequest:
    """Return a request that names this model, for a client that used an alias or no name."""
    if proxied.path in AUDIO:
        body = with_form_field(proxied.body, proxied.media, "model", model)
    else:
        fields = msgspec.json.decode(proxied.body, type=dict[str, msgspec.Raw])
        fields["model"] = msgspec.Raw(msgspec.json.encode(model))
        body = msgspec.json.encode(fields)
    return msgspec.structs.replace(proxied, body=body)


def pseudo_tokens(body: bytes, most: int) -> list[int]:
    """Return numbers that stand for the tokens of a body, one for every four bytes, but `most` at the most.

    Their number estimates the work, and equal beginnings of bodies give equal numbers.
    """
    size = max(1, min(len(body) // BYTES_PER_TOKEN, most)) * BYTES_PER_TOKEN
    words = array("I", body[:size].ljust(size, b"\0"))
    return [word & 0x7FFFFFFF for word in words]


class ProxyWriter(ResponseWriter):
    """Writes a proxied response to a stream, or collects it if the response is not streamed."""

    __slots__ = ("_size", "_stream", "_wrapped", "flush", "media", "parts", "reached", "status")

    def __init__(self, stream: SseStream | None) -> None:
        """Start before the response. `stream` is None for a response that is not streamed."""
        self._stream = stream
        self._size = 0
        self._wrapped = False  # whether the response is sent as one event
        self.parts: list[bytes] = []  # of a response that is not sent as it arrives
        self.status = 0
        self.media = ""
        self.reached = 0
        self.flush = (lambda: None) if stream is None else stream.flush  # type: ignore[method-assign]

    def pass_on(self, piece: ProxiedPiece) -> int:
        """Write a piece, and return its number of events; of a whole response, count the first piece alone.

        Raise InvalidOutput if the response cannot come from a server: without a valid status, or too large.
        """
        if piece.status:
            self._begin(piece)
        elif not self.status:
            raise InvalidOutput("a part of an HTTP response without its status")
        stream = self._stream
        if stream is None or self._wrapped:
            self._size += len(piece.body)
            if self._size > WHOLE_BYTES_MAX:
                raise InvalidOutput(f"an HTTP response of more than {WHOLE_BYTES_MAX} bytes")
            self.parts.append(piece.body)
            return int(piece.status != 0)
        events = piece.body.count(b"\n\n")
        if piece.body:
            self.reached += max(1, events)
            stream.parts.append(piece.body)
        return events

    def _begin(self, piece: ProxiedPiece) -> None:
        """Begin a response. A response that began on an earlier worker is discarded; its client has received nothing."""
        if piece.status not in STATUSES:
            raise InvalidOutput(f"the HTTP status {piece.status}")
        self.status, self.media = piece.status, _printable(piece.media)
        self.parts, self._size = [], 0
        if self._stream is not None and not self._stream.started:
            self._stream.status, self._stream.media = self.status, self.media
        elif self._stream is not None:
            # the head of an event stream was sent while the client waited, so a JSON error becomes an event
            self._wrapped = not self.media.startswith("text/event-stream")

    def write(self, tokens: Sequence[int], logprobs: Sequence[Logprob] | None) -> int:
        """Raise InvalidOutput, because a proxied response has no tokens."""
        raise InvalidOutput("tokens for a request that was proxied")

    def write_text(self, text: str, tokens: int) -> None:
        """Raise InvalidOutput, because a proxied response has no text of its own."""
        raise InvalidOutput("text for a request that was proxied")

    def keep_alive(self) -> None:
        if self._stream is not None:
            self._stream.keep_alive()

    def rewind(self, count: int) -> None:
        assert not self.reached, "cannot rewind what the client has received"

    def finish(self, reason: str) -> None:
        if self._stream is not None and self._wrapped:
            body = b" ".join(b"".join(self.parts).split(b"\n"))
            self._stream.parts.append(b"data: %b\n\n" % body)


class ProxiedFormat(AnswerFormat):
    """The format of a proxied response: as the server sent it."""

    def __init__(self, call: Call, model: OutputModel, stream: SseStream | None) -> None:
        """Start without a response. `model` is not used."""
        self.parsed, self.stream = call.parsed, stream
        self._failure = MessagesFormat.failure if call.head.path == MESSAGES else AnswerFormat.failure
        self._id = call.id

    def writer(self, index: int, prompt: list[int], text: str, accepted: list[int]) -> ResponseWriter:
        return ProxyWriter(self.stream)

    def last(self, answers: Sequence[Choice]) -> bytes:
        return b""

    def failed(self, error: ApiError, answers: Sequence[Choice]) -> bytes:
        return self._failure(error, self._id)

    def whole(self, answers: Sequence[Choice]) -> WholeResponse:
        writer = answers[0].writer
        assert isinstance(writer, ProxyWriter)
        return WholeResponse(b"".join(writer.parts), writer.status, writer.media)


def _printable(media: str) -> str:
    """Return a media type from a worker in a form that is valid in a header."""
    kept = "".join(c for c in media[:200] if c.isascii() and c.isprintable())
    return kept or "application/octet-stream"
