"""Passes a client's HTTP request on to the upstream, and the upstream's response back in pieces.

    response with a body that arrives as a whole     pieces of at most 64 KiB, at a limited rate
    stream of server-sent events                     pieces of whole events, as they arrive

The upstream's client errors (400, 422 …) are passed on unchanged. An error event in a stream is an error of the engine and is not
passed on, unless the request caused it. So the frontend can send the request to another worker, if no byte of the response has
reached the client.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator

import aiohttp

from events.wire import Chunk, ProxiedPiece, ProxiedRequest
from workers.engines.openai.stream_decoder import LINE_BYTES_MAX, Fault, error_of, refusal_of

PIECE_BYTES = 64 * 1024
# bytes of a whole response; embeddings of 2,048 texts with 4,096 dimensions have about 100 MB as text
WHOLE_BYTES_MAX = 128 * 1024 * 1024
# A worker sends whole responses no faster than this, because a frontend buffers at most 8 MiB of unread output of a worker.
WHOLE_BYTES_PER_S = 32 * 1024 * 1024
EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]"
ENDS = {"/v1/chat/completions": DONE, "/v1/completions": DONE, "/v1/messages": b"event: message_stop"}
"""For some paths, the event that ends a stream. Without it, a stream counts as incomplete."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_event = re.compile(rb".*?\r?\n\r?\n", re.DOTALL).finditer
_ERRORS = (b'data: {"error"', b'data:{"error"', b"event: error")


class EventStream:
    """Splits a stream of server-sent events into pieces of whole events, and finds errors in it. It does no I/O."""

    def __init__(self, path: str) -> None:
        """Start before the first byte of a response to a request to `path`."""
        self._pending = b""
        self._end = ENDS.get(path, b"")
        self._ended = not self._end

    def feed(self, data: bytes) -> tuple[bytes, str]:
        """Add bytes. Return the events that they complete, and the engine's error that follows them, or "" for none."""
        pending = self._pending + data
        end = max((pending.rfind(mark) + len(mark) for mark in _EVENT_ENDS if mark in pending), default=0)
        events, self._pending = pending[:end], pending[end:]
        if len(self._pending) > LINE_BYTES_MAX:
            return events, f"engine_error: the upstream sent an event of more than {LINE_BYTES_MAX} bytes"
        if any(mark in events for mark in _ERRORS):
            events, error = _before_error(events)
            if error:
                return events, error
        self._ended = self._ended or self._end in events
        return events, ""

    def finish(self) -> tuple[bytes, str]:
        """Return the incomplete last event, and the error of a stream that has not ended properly, or "" for none."""
        events, error = self.feed(b"\n\n") if self._pending else (b"", "")
        if not error and not self._ended:
            error = "stream_incomplete: the upstream closed without the last event"
        return events, error


def _before_error(events: bytes) -> tuple[bytes, str]:
    """Return the events before the first engine error, and that error; all events and "" if there is none."""
    at = 0
    for event in _event(events):
        for line in event[0].splitlines():
            said = _decoded(line) if line.startswith(b"data:") else None
            if isinstance(said, dict) and said.get("error") and refusal_of(said) is None:
                return events[:at], error_of(said, canary=False)
        at = event.end()
    return events, ""


def _decoded(line: bytes) -> object:
    """Return the JSON value of a `data:` line, or None if the line has none."""
    try:
        said: object = json.loads(line.removeprefix(b"data:"))
    except ValueError:
        return None
    return said


async def pieces(proxied: ProxiedRequest, response: aiohttp.ClientResponse) -> AsyncIterator[Chunk]:
    """Yield the response as chunks. The last one has `finish` set. Raise Fault if the response contains an engine's error."""
    head = ProxiedPiece(b"", response.status, response.headers.get("Content-Type", ""))
    if response.content_type != EVENT_STREAM:
        async for chunk in _whole(head, response):
            yield chunk
        return
    stream = EventStream(proxied.path)
    async for data in response.content.iter_any():
        events, error = stream.feed(data)
        if events:
            head.body = events
            yield Chunk(0, [], proxied=head)
            head = ProxiedPiece(b"")
        if error:
            raise Fault(error)
    head.body, error = stream.finish()
    if head.body:
        yield Chunk(0, [], proxied=head)
    if error:
        raise Fault(error)
    yield Chunk(0, [], finish="stop")


async def _whole(head: ProxiedPiece, response: aiohttp.ClientResponse) -> AsyncIterator[Chunk]:
    """Yield a response that is no stream. Raise Fault if its body is too large."""
    size = 0
    while data := await response.content.read(PIECE_BYTES):
        size += len(data)
        if size > WHOLE_BYTES_MAX:
            raise Fault(
                f"engine_error: the upstream answers with a body of more than {WHOLE_BYTES_MAX // 2**20} MiB"
            )
        head.body = data
        yield Chunk(0, [], proxied=head)
        head = ProxiedPiece(b"")
        if size > PIECE_BYTES:
            await asyncio.sleep(len(data) / WHOLE_BYTES_PER_S)
    yield Chunk(0, [], finish="stop", proxied=head if head.status else None)
