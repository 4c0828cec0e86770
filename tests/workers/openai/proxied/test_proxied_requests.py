"""Clients' HTTP requests that the openai engine passes on to its upstream unchanged."""

from collections.abc import AsyncIterator

import pytest
from engine_contract import Rig
from upstream import OtherPath, Upstream

from events.proxied_paths import PATHS
from events.wire import Chunk, Generate, ProxiedRequest, Sampling
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.proxy import DONE, EventStream

CHATS, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
EVENTS = [b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', b'data: {"choices":[]}\n\n', DONE + b"\n\n"]
STREAM = "text/event-stream; charset=utf-8"


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    server = Upstream()
    server.others[CHATS] = OtherPath(EVENTS, media=STREAM)
    server.others[EMBEDDINGS] = OtherPath([b'{"data":', b"[]}"])
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def rig(upstream: Upstream) -> AsyncIterator[Rig]:
    rig = Rig(OpenAIEngine(UpstreamSettings(url=upstream.url)))
    await rig.start()
    yield rig
    await rig.engine.stop()


async def passed_on(rig: Rig, path: str, *, body: bytes = b"{}", streamed: bool = False) -> list[Chunk]:
    """Return the chunks of the upstream's response to a request to this path."""
    proxied = ProxiedRequest(path, body, "application/json", streamed)
    key = rig.key()
    request = Generate(1, "r", [], 5, Sampling(max_tokens=100), proxied=proxied, traceparent="00-t")
    rig.engine.submit(key, request)
    return (await rig.answer(key)).chunks


def response(chunks: list[Chunk]) -> tuple[int, str, bytes]:
    """Return status, media type and body of a response."""
    pieces = [chunk.proxied for chunk in chunks if chunk.proxied is not None]
    assert [piece.status != 0 for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    return pieces[0].status, pieces[0].media, b"".join(piece.body for piece in pieces)


async def test_a_request_and_its_response_are_passed_on_unchanged(rig: Rig, upstream: Upstream) -> None:
    chunks = await passed_on(rig, EMBEDDINGS, body=b'{"input": "x"}')
    assert upstream.passed_on == [(EMBEDDINGS, "application/json", b'{"input": "x"}')]
    assert upstream.traces == ["00-t"]
    assert response(chunks) == (200, "application/json", b'{"data":[]}')
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["stop"] and not rig.engine.load().running


async def test_a_stream_is_passed_on_event_by_event(rig: Rig) -> None:
    chunks = await passed_on(rig, CHATS, streamed=True)
    assert response(chunks) == (200, STREAM, b"".join(EVENTS))
    assert [
        chunk.proxied.body for chunk in chunks if chunk.proxied is not None and chunk.proxied.body
    ] == EVENTS
    assert chunks[-1].finish == "stop"


async def test_an_upstreams_client_error_is_part_of_the_response(rig: Rig, upstream: Upstream) -> None:
    upstream.others[EMBEDDINGS] = OtherPath([b'{"error":{"message":"too long"}}'], status=400)
    chunks = await passed_on(rig, EMBEDDINGS)
    assert response(chunks) == (400, "application/json", b'{"error":{"message":"too long"}}')


@pytest.mark.parametrize("status", [500, 502, 503, 429])
async def test_other_errors_are_reported_so_that_another_worker_is_tried(
    rig: Rig, upstream: Upstream, status: int
) -> None:
    upstream.others[EMBEDDINGS] = OtherPath([b"{}"], status=status)
    [chunk] = await passed_on(rig, EMBEDDINGS)
    assert chunk.error is not None and chunk.error.partition(":")[0] in (
        "engine_error",
        "overloaded",
        "upstream_lost",
    )
    assert chunk.proxied is None


async def test_a_path_that_the_upstream_lacks_is_refused_by_name(rig: Rig) -> None:
    [chunk] = await passed_on(rig, "/classify")
    assert chunk.error is not None and chunk.error.startswith("invalid_request: ")
    assert '"status":404' in chunk.error and "this model's server does not serve /classify" in chunk.error


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n', "engine_error"),
        (b'event: error\ndata: {"error": {"message": "overloaded"}}\n\n', "engine_error"),
    ],
)
async def test_an_error_event_of_the_engine_is_not_passed_on(
    rig: Rig, upstream: Upstream, event: bytes, reason: str
) -> None:
    upstream.others[CHATS] = OtherPath([EVENTS[0] + event, DONE + b"\n\n"], media=STREAM)
    chunks = await passed_on(rig, CHATS, streamed=True)
    assert response(chunks[:-1])[2] == EVENTS[0]
    assert chunks[-1].error is not None and chunks[-1].error.startswith(reason)


async def test_an_error_event_that_the_request_caused_is_passed_on(rig: Rig, upstream: Upstream) -> None:
    event = b'data: {"error": {"message": "bad grammar", "code": 400}}\n\n'
    upstream.others[CHATS] = OtherPath([event, DONE + b"\n\n"], media=STREAM)
    assert response(await passed_on(rig, CHATS, streamed=True))[2] == event + DONE + b"\n\n"


async def test_a_stream_without_its_last_event_is_incomplete(rig: Rig, upstream: Upstream) -> None:
    upstream.others[CHATS] = OtherPath(EVENTS[:2], media=STREAM)
    chunks = await passed_on(rig, CHATS, streamed=True)
    assert chunks[-1].error == "stream_incomplete: the upstream closed without the last event"


@pytest.mark.parametrize("path", [CHATS, EMBEDDINGS])
async def test_a_broken_connection_is_reported(rig: Rig, upstream: Upstream, path: str) -> None:
    media = STREAM if path == CHATS else "application/json"
    upstream.others[path] = OtherPath([EVENTS[0]], media=media, breaks=True)
    chunks = await passed_on(rig, path, streamed=path == CHATS)
    assert chunks[-1].error is not None and chunks[-1].error.startswith("upstream_lost")


async def test_a_request_for_a_whole_response_says_nothing_about_the_engine(
    rig: Rig, upstream: Upstream
) -> None:
    """Its upstream may be silent for minutes, which must not look like a hang."""
    upstream.others[EMBEDDINGS] = OtherPath([], hangs=True)
    proxied = ProxiedRequest(EMBEDDINGS, b"{}")
    rig.engine.submit(key := rig.key(), Generate(1, "r", [], 5, Sampling(max_tokens=1), proxied=proxied))
    assert rig.engine.phase().name == "idle" and rig.engine.load().running == 1
    rig.engine.cancel(key)
    assert rig.engine.load().running == 0


async def test_only_requests_for_streams_are_prefill(rig: Rig, upstream: Upstream) -> None:
    """A long prompt of a whole response would otherwise allow the engine to hang for longer."""
    upstream.others[EMBEDDINGS] = upstream.others[CHATS] = OtherPath([], hangs=True)
    for path, streamed in ((EMBEDDINGS, False), (CHATS, True)):
        proxied = ProxiedRequest(path, b"{}", streamed=streamed)
        rig.engine.submit(rig.key(), Generate(1, "r", [], 7, Sampling(max_tokens=1), proxied=proxied))
    await rig.until(lambda: rig.engine.phase().prefill_tokens)
    assert (rig.engine.phase().name, rig.engine.phase().prefill_tokens) == ("prefill", 7)


async def test_the_paths_of_an_upstream_are_registered(rig: Rig, upstream: Upstream) -> None:
    assert rig.engine.identity.paths == (CHATS, "/v1/completions", EMBEDDINGS)  # not /sleep


async def test_an_upstream_without_a_list_of_paths_may_have_any(upstream: Upstream) -> None:
    upstream.documented = False
    engine = OpenAIEngine(UpstreamSettings(url=upstream.url))
    await engine.start(lambda out: None)
    assert engine.identity.paths == PATHS
    await engine.stop()


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_whole_however_the_bytes_arrive(line_end: bytes, size: int) -> None:
    whole = b"".join(EVENTS).replace(b"\n", line_end)
    stream, out = EventStream(CHATS), []
    for at in range(0, len(whole), size):
        events, error = stream.feed(whole[at : at + size])
        assert not error and (not events or events.endswith(line_end * 2))
        out.append(events)
    assert b"".join(out) == whole and stream.finish() == (b"", "")


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_the_events_before_an_error_are_passed_on(line_end: bytes) -> None:
    whole = (EVENTS[0] + b'data: {"error": {"message": "m", "code": 500}}\n\n' + EVENTS[2]).replace(
        b"\n", line_end
    )
    events, error = EventStream(CHATS).feed(whole)
    assert (events, error) == (
        EVENTS[0].replace(b"\n", line_end),
        "engine_error: the upstream reports an error: m",
    )
