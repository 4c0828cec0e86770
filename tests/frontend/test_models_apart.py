"""Several models in one fleet, and engines that return text instead of tokens."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from frontend_kit import TOKENS, convict, frontend, sentencepiece_like, text_of
from scripted_worker import Act, ScriptedWorker, undisturbed
from waits import until

from controller.adapters.request_plane.client import RequestPlaneClient
from controller.frontend.settings import FactSettings
from events import wire
from events.observations import RequestExposed, RequestMigrated, RequestsServed, WorkerSlow

PROMPT = [300, 301, 302]


async def test_a_request_never_moves_to_another_model() -> None:
    one, two = ScriptedWorker("w1", model="m"), ScriptedWorker("w2", model="other")
    async with frontend(one, two, reroute_s=0.2) as kit:
        for _ in range(4):
            await kit.complete(PROMPT, 3)
        assert (len(one.requests), len(two.requests)) == (4, 0)
        status, body, _ = await kit.post("/v1/completions", model="other", prompt=PROMPT, max_tokens=3)
        assert (status, body["model"]) == (200, "other")
        async with kit.http.get(kit.url + "/v1/models") as answer:
            assert [row["id"] for row in (await answer.json())["data"]] == ["m", "other"]
        one.drop()
        await one.stop()
        status, _, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=3)
        assert status == 503
        assert len(two.requests) == 1


async def test_a_slow_model_does_not_make_its_workers_slow() -> None:
    small, large = ScriptedWorker("w1"), ScriptedWorker("w2", model="large", step_s=0.03)
    async with frontend(small, large, facts=FactSettings(window_s=1.0, slow_tokens_min=1)) as kit:
        for model in ("m", "large"):
            await kit.post("/v1/completions", model=model, prompt=PROMPT, max_tokens=8)
        await until(lambda: {fact.worker for fact in kit.said(RequestsServed)} == {"w1", "w2"})
        assert kit.said(WorkerSlow) == []


class TextWorker:
    """An upstream that returns text without token ids; its first life breaks after three pieces."""

    def __init__(self, name: str, breaks: bool) -> None:
        self.name, self.breaks = name, breaks
        self.instance, self.model, self.port = "i1", "m", 0
        self.started = False
        self.requests: list[wire.Generate] = []
        self.hold: asyncio.Event | None = None  # wait for it before the end of the answer
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.started = True

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        split = wire.Splitter()
        while data := await reader.read(65536):
            for body in split.feed(data):
                frame = wire.to_worker.decode(body)
                if isinstance(frame, wire.Hello):
                    writer.write(wire.encode(wire.Welcome(worker=self.name, instance="i1", model="m")))
                elif isinstance(frame, wire.Generate):
                    self.requests.append(frame)
                    for piece in self._pieces(frame):
                        chunk = wire.Chunk(stream=frame.stream, tokens=[], text=piece)
                        writer.write(wire.encode(wire.Step(chunks=[chunk])))
                    if self.breaks:
                        await writer.drain()
                        writer.close()
                        return
                    if self.hold is not None:
                        await self.hold.wait()
                    end = wire.Chunk(stream=frame.stream, tokens=[], finish="stop")
                    writer.write(wire.encode(wire.Step(chunks=[end])))
        writer.close()

    def _pieces(self, frame: wire.Generate) -> list[str]:
        story = ["once ", "upon ", "a ", "time ", "é"]
        said = frame.prompt_text.removeprefix("tell:")
        rest = story[len(said.split()) :]
        return rest[:3] if self.breaks else rest


async def test_b33_text_engines_move_and_are_marked_approximate() -> None:
    first, second = TextWorker("w1", breaks=True), TextWorker("w2", breaks=False)
    async with frontend() as kit:
        for worker in (first, second):
            await kit.add(worker, engine="openai", exact=False)  # type: ignore[arg-type]
        kit.director.table.endpoints[("w2", "i1")].begin()
        events = await kit.stream(model="m", prompt="tell:", max_tokens=50)
        assert text_of(events) == "once upon a time é"
        assert second.requests[0].prompt_text == "tell:once upon a "
        (fact,) = kit.said(RequestMigrated)
        assert (fact.exact, fact.source, fact.target) == (False, "w1", "w2")
        second_text, body = await kit.complete("tell:", 50, stop=["time"])
        assert second_text == "once upon a "
        assert body["choices"][0]["finish_reason"] == "stop"


async def test_logprobs_are_refused_for_text_engines() -> None:
    worker = TextWorker("w1", breaks=False)
    async with frontend() as kit:
        await kit.add(worker, engine="openai", exact=False)  # type: ignore[arg-type]
        asked: dict[str, Any] = {"model": "m", "prompt": "a", "max_tokens": 4, "logprobs": 1}
        status, body, _ = await kit.post("/v1/completions", **asked)
        assert (status, body["error"]["param"]) == (400, "logprobs")
        assert not worker.requests


@pytest.mark.parametrize(
    ("engine", "asked", "exact"),
    [
        ("openai", {"temperature": 0}, True),
        ("openai", {"temperature": 0.7}, False),
        ("openai", {"temperature": 0, "presence_penalty": 1}, False),
        ("openai", {"temperature": 0, "bad_words": ["me"]}, False),
        ("openai", {"temperature": 0, "allowed_token_ids": [300]}, True),
        ("openai", {"temperature": 0, "frequency_penalty": 1}, False),
        ("openai", {"temperature": 0, "repetition_penalty": 1.1}, True),  # counts the prompt too
        ("simulated", {"temperature": 0.7, "presence_penalty": 1}, True),
    ],
)
async def test_a_continuation_on_another_server_that_restarts_is_not_reported_as_exact(
    engine: str, asked: dict[str, Any], exact: bool
) -> None:
    first, second = ScriptedWorker("w1"), ScriptedWorker("w2")
    first.acts.append(Act(after=3, how="disconnect"))
    async with frontend() as kit:
        for worker in (first, second):
            await kit.add(worker, engine=engine, root="weights")
        kit.director.table.endpoints[("w2", "i1")].begin()
        await kit.complete(PROMPT, 6, **asked)
        (fact,) = kit.said(RequestMigrated)
        assert fact.exact == exact


class Echo(TextWorker):
    """Echoes its prompt."""

    def _pieces(self, frame: wire.Generate) -> list[str]:
        return [f"[{frame.prompt_text}]"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("cut", "said"), [(2, "ab"), (3, "ab"), (4, "abé")])  # 3: inside of é
async def test_tokens_are_sent_as_text_to_an_engine_that_accepts_only_text(
    stream: bool, cut: int, said: str
) -> None:
    ids = TOKENS.encode("abé", special=False)
    assert len(ids) == 4
    prompt = TOKENS.encode("tell:", special=True)
    first = ScriptedWorker("w1", follow=lambda tokens: ids[len(tokens) - len(prompt)])
    first.acts.append(Act(after=cut, how="disconnect"))
    second = Echo("w2", breaks=False)
    async with frontend() as kit:
        await kit.add(first, engine="openai", exact=True)
        await kit.add(second, engine="openai", exact=False)  # type: ignore[arg-type]
        kit.director.table.endpoints[("w2", "i1")].begin()
        ask: dict[str, Any] = {"model": "m", "prompt": "tell:", "max_tokens": 50}
        if stream:
            text = text_of(await kit.stream(**ask))
        else:
            _, body, _ = await kit.post("/v1/completions", **ask)
            text = body["choices"][0]["text"]
        assert text == f"{said}[tell:{said}]"
        (fact,) = kit.said(RequestMigrated)
        assert not fact.exact


async def test_pieces_of_text_are_replayed_as_one_text(tmp_path: Path) -> None:
    """Like llama-server: token ids in, text out; with a tokenizer that starts every text with a space."""
    tokenizer = sentencepiece_like()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    first, second = TextWorker("w1", breaks=True), TextWorker("w2", breaks=False)
    async with frontend() as kit:
        for worker in (first, second):
            more = {"engine": "openai", "exact": False, "tokenizer": str(tmp_path)}
            await kit.add(worker, **more)  # type: ignore[arg-type]
        kit.director.table.endpoints[("w2", "i1")].begin()
        _, body = await kit.complete("tell:", 400)
        assert tokenizer.decode(second.requests[0].tokens) == "tell:once upon a "
        whole, prompt = (len(tokenizer.encode(text).ids) for text in ("tell:once upon a time é", "tell:"))
        assert body["usage"]["completion_tokens"] == whole - prompt


async def test_a_corrupt_text_that_no_client_has_received_is_restarted() -> None:
    bad, good = TextWorker("w1", breaks=False), TextWorker("w2", breaks=False)
    bad.hold = asyncio.Event()
    async with frontend(on_corruption="restart") as kit:
        for worker in (bad, good):
            await kit.add(worker, engine="openai", exact=False)  # type: ignore[arg-type]
        kit.director.table.endpoints[("w2", "i1")].begin()
        asking = asyncio.create_task(kit.complete("tell:", 50))
        await until(
            lambda: any(
                f.continuation.texts
                for s in kit.director.table.endpoints.values()
                for f in kit.director.running.at(s)
            )
        )
        convict(kit, bad)  # type: ignore[arg-type]
        text, _ = await asking
        assert text == "once upon a time é"
        assert good.requests[0].prompt_text == "tell:"
        assert [fact.action for fact in kit.said(RequestExposed)] == ["restart"]
        bad.hold.set()


async def test_text_is_not_sent_to_token_engines() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        text, _ = await kit.complete("hello", 3)
        assert worker.requests[0].prompt_text == ""
        assert text == TOKENS.decode(undisturbed(TOKENS.encode("hello", special=True), 3))


def test_a_plane_without_wanted_workers_connects_to_none() -> None:
    assert RequestPlaneClient("f").connected == {}
