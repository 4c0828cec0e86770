"""Requests that are passed on to a model's servers unchanged: routes, retries, streams, errors."""

import asyncio
import io
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from frontend_kit import Kit, first_goes_to, frontend
from scripted_worker import Act, ScriptedWorker

from controller.frontend.openai.proxied import ControllingFields
from events.observations import RequestAbandoned, RequestMigrated
from events.proxied_paths import AUDIO, BATCHES, PATHS, POOLING
from events.wire import Chunk, Generate, ProxiedPiece, ProxiedRequest, Step

CHATS, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
STREAM = "text/event-stream; charset=utf-8"
VECTOR = {"object": "list", "data": [{"embedding": [0.5, -1.0]}]}
UPSTREAM = {
    "engine": "openai",
    "paths": PATHS,
}  # the registration of a worker with a server that has every path
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
}


def events(count: int) -> list[bytes]:
    """Return a server's stream with this many events before the last one."""
    return [b'data: {"n":%d}\n\n' % n for n in range(count)] + [b"data: [DONE]\n\n"]


@dataclass
class ServingWorker(ScriptedWorker):
    """A worker with a server that answers proxied requests with these pieces. `Act.after` counts pieces."""

    pieces: Sequence[bytes] = (json.dumps(VECTOR).encode(),)
    media: str = "application/json"
    status: int = 200
    passed_on: list[ProxiedRequest] = field(default_factory=list)

    async def _play(self, writer: asyncio.StreamWriter, request: Generate, act: Act) -> None:
        if request.proxied is None:
            await super()._play(writer, request, act)
            return
        self.passed_on.append(request.proxied)
        count = len(self.pieces) if act.after is None else act.after
        for index, body in enumerate(self.pieces[:count]):
            piece = ProxiedPiece(body) if index else ProxiedPiece(body, self.status, self.media)
            self._say(writer, Step([Chunk(request.stream, [], proxied=piece)]))
            await asyncio.sleep(0)
        if act.how == "finish":
            self._say(writer, Step([Chunk(request.stream, [], finish="stop")]))
        else:
            await self._fail(writer, request, act)


def streaming(name: str, count: int = 4, **more: Any) -> ServingWorker:
    return ServingWorker(name, pieces=events(count), media=STREAM, **more)


async def streamed(kit: Kit, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, str, bytes]:
    """Return status, media type and body of a streamed response."""
    asked = kit.http.post(kit.url + CHATS, json=CHAT | {"stream": True} | body, headers=headers)
    async with asked as response:
        return response.status, response.headers["Content-Type"], await response.read()


async def test_a_whole_response_is_returned_as_the_server_sent_it() -> None:
    async with frontend() as kit:
        worker = ServingWorker("w1")
        await kit.add(worker, **UPSTREAM)
        status, body, headers = await kit.post(EMBEDDINGS, model="m", input=["a", "b"], dimensions=2)
        assert (status, body) == (200, VECTOR)
        assert headers["X-Holdfast-Mode"] == "proxied" and headers["X-Holdfast-Worker"] == "w1"
        [request] = worker.passed_on
        assert json.loads(request.body) == {"model": "m", "input": ["a", "b"], "dimensions": 2}
        assert (request.path, request.streamed) == (EMBEDDINGS, False)


@pytest.mark.parametrize("path", [BATCHES, *POOLING])
async def test_every_path_without_an_exact_form_is_passed_on(path: str) -> None:
    async with frontend() as kit:
        worker = ServingWorker("w1")
        await kit.add(worker, **UPSTREAM)
        assert (await kit.post(path, model="m", input="x"))[:2] == (200, VECTOR)
        assert [request.path for request in worker.passed_on] == [path]


@pytest.mark.parametrize("path", AUDIO)
async def test_audio_is_passed_on_as_a_form(path: str) -> None:
    import aiohttp

    async with frontend(model_aliases={"whisper": "m"}) as kit:
        worker = ServingWorker("w1")
        await kit.add(worker, **UPSTREAM)
        form = aiohttp.FormData({"model": "whisper", "language": "en"})
        form.add_field("file", b"RIFF\x00\r\n--\xff", filename="a.wav", content_type="audio/wav")
        async with kit.http.post(kit.url + path, data=form) as response:
            assert (response.status, await response.json()) == (200, VECTOR)
        [request] = worker.passed_on
        assert request.media.startswith("multipart/form-data; boundary=")
        assert b'name="model"\r\n\r\nm\r\n' in request.body and b"RIFF\x00\r\n--\xff" in request.body


async def test_a_stream_is_passed_on_event_by_event() -> None:
    async with frontend() as kit:
        await kit.add(streaming("w1"), **UPSTREAM)
        assert await streamed(kit) == (200, STREAM, b"".join(events(4)))


async def test_the_servers_client_error_is_the_response() -> None:
    error = b'{"error":{"message":"the image cannot be read"}}'
    async with frontend() as kit:
        await kit.add(ServingWorker("w1", pieces=[error], status=400), **UPSTREAM)
        assert await streamed(kit) == (400, "application/json", error)
        status, body, _ = await kit.post(CHATS, None, **CHAT)
        assert (status, body) == (400, json.loads(error))


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("how", ["disconnect", "error"])
async def test_a_whole_response_is_repeated_on_another_worker_at_any_time(how: str, after: int) -> None:
    pieces = [b'{"object": "list", ', b'"data": [{"embedding": ', b"[0.5, -1.0]}]}"]
    first = ServingWorker("w1", pieces=pieces, acts=deque([Act(after=after, how=how)]))
    second = ServingWorker("w2", pieces=pieces)
    async with frontend() as kit:
        await first_goes_to(kit, first, second, **UPSTREAM)
        assert (await kit.post(EMBEDDINGS, model="m", input="x"))[:2] == (200, VECTOR)
        assert len(first.passed_on) == len(second.passed_on) == 1
        assert [fact.target for fact in kit.said(RequestMigrated)] == ["w2"]


@pytest.mark.parametrize("how", ["disconnect", "error"])
async def test_a_stream_is_repeated_before_its_first_event(how: str) -> None:
    async with frontend() as kit:
        first = streaming("w1", acts=deque([Act(after=0, how=how)]))
        await first_goes_to(kit, first, streaming("w2"), **UPSTREAM)
        assert await streamed(kit) == (200, STREAM, b"".join(events(4)))


@pytest.mark.parametrize("after", [1, 3])
async def test_a_stream_that_breaks_later_ends_with_an_error_and_no_splice(after: int) -> None:
    async with frontend() as kit:
        second = streaming("w2")
        await first_goes_to(
            kit, streaming("w1", acts=deque([Act(after=after, how="disconnect")])), second, **UPSTREAM
        )
        status, _, body = await streamed(kit)
        *before, error, rest = body.split(b"\n\n")
        assert status == 200 and before == [event.strip() for event in events(4)[:after]] and rest == b""
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "disconnected"
        assert not second.passed_on
        assert [fact.reason for fact in kit.said(RequestAbandoned)] == ["proxied"]


async def test_a_supported_request_is_exact_unless_its_client_asks_otherwise() -> None:
    plain: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with frontend() as kit:
        worker = streaming("w1")
        await kit.add(worker, **UPSTREAM)
        await kit.stream(CHATS, model="m", **plain)
        assert not worker.passed_on
        await streamed(kit, {"X-Holdfast-Mode": "proxied"}, **plain)
        assert [request.streamed for request in worker.passed_on] == [True]


async def test_a_client_can_refuse_the_proxied_mode() -> None:
    async with frontend() as kit:
        await kit.add(ServingWorker("w1"), **UPSTREAM)
        status, body, _ = await kit.post(CHATS, {"X-Holdfast-Mode": "exact"}, **CHAT)
        assert (status, body["error"]["code"]) == (400, "unsupported_parameter")
        status, body, _ = await kit.post(CHATS, {"X-Holdfast-Mode": "fast"}, **CHAT)
        assert (status, body["error"]["param"]) == (400, "X-Holdfast-Mode")


@pytest.mark.parametrize("name", ControllingFields.__struct_fields__)
@pytest.mark.parametrize("headers", [None, {"X-Holdfast-Mode": "proxied"}])
async def test_fields_that_control_a_server_are_never_passed_on(
    name: str, headers: dict[str, str] | None
) -> None:
    async with frontend() as kit:
        worker = ServingWorker("w1")
        await kit.add(worker, **UPSTREAM)
        asked: dict[str, Any] = CHAT | {name: {"host": "10.0.0.1"}}
        status, body, _ = await kit.post(CHATS, headers, **asked)
        assert (status, body["error"]["code"]) == (400, "unsupported_parameter")
        assert not worker.passed_on
        spelled = json.dumps(asked).replace(name, f"\\u{ord(name[0]):04x}{name[1:]}")
        sent = {"Content-Type": "application/json"} | (headers or {})
        async with kit.http.post(kit.url + CHATS, data=spelled, headers=sent) as response:
            assert response.status == 400 and not worker.passed_on


async def test_fields_stay_refused_where_no_server_offers_the_path() -> None:
    async with frontend() as kit:
        await kit.add(ServingWorker("w1"))
        status, body, _ = await kit.post(CHATS, None, **CHAT)
        assert (status, body["error"]["code"]) == (400, "unsupported_parameter")
        status, body, _ = await kit.post(EMBEDDINGS, model="m", input="x")
        assert (status, body["error"]["message"]) == (404, "no server of m offers /v1/embeddings")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400), (b"[]", 400), (b'{"model": 3}', 400), (b'{"model": "absent"}', 404), (b"\xff", 400), (b"", 400),
        (b'{"model": "m", "stream": "yes"}', 400), (b'{"model": "m"' + b" " * 17_000_000 + b"}", 413),
    ],
)  # fmt: skip
async def test_bad_bodies_are_refused_in_one_sentence(body: bytes, status: int) -> None:
    async with frontend() as kit:
        await kit.add(ServingWorker("w1"), **UPSTREAM)
        headers = {"Content-Type": "application/json"}
        async with kit.http.post(kit.url + EMBEDDINGS, data=io.BytesIO(body), headers=headers) as response:
            error = (await response.json())["error"]
            assert response.status == status and error["message"], error


async def test_an_omitted_model_and_an_alias_become_the_servers_name() -> None:
    async with frontend(model_aliases={"ada": "m"}) as kit:
        worker = ServingWorker("w1")
        await kit.add(worker, **UPSTREAM)
        given: dict[str, Any]
        for given in ({}, {"model": "ada"}):
            assert (await kit.post(EMBEDDINGS, None, input="x", **given))[0] == 200
        assert [json.loads(request.body) for request in worker.passed_on] == [
            {"input": "x", "model": "m"}
        ] * 2


async def test_a_worker_that_answers_with_tokens_is_at_fault() -> None:
    class Confused(ServingWorker):
        async def _play(self, writer: asyncio.StreamWriter, request: Generate, act: Act) -> None:
            await ScriptedWorker._play(self, writer, request, act)

    async with frontend() as kit:
        await first_goes_to(kit, Confused("w1"), ServingWorker("w2"), **UPSTREAM)
        assert (await kit.post(EMBEDDINGS, model="m", input="x"))[:2] == (200, VECTOR)
