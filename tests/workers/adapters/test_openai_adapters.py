"""LoRA adapters of an upstream: how they are listed, requested, loaded and unloaded."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from engine_contract import Answer, Rig, asked, prompt
from memory_bus import MemoryBus
from memory_journal import MemoryJournal, MemoryStream
from upstream import OtherPath, Upstream
from waits import until

from events.intrusion.registration import NAME_MAX, NAMES_MAX
from events.observations import AdaptersChanged, ShutdownBegan, WorkerJoined
from events.wire import ProxiedRequest
from workers.config.settings import WorkerConfig
from workers.engines.openai.capabilities import adapters_of
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.upstream_reports import AccountTimes
from workers.worker import InferenceWorker

OFTEN, NEVER = AccountTimes(identity_s=0.05), AccountTimes(identity_s=3600.0)
GONE = "not_serving: this worker does not have the adapter of the request"


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    server = await Upstream(adapters=("sql", "legal")).start()
    yield server
    await server.stop()


@pytest.fixture
async def rig(upstream: Upstream) -> AsyncIterator[Rig]:
    rig = Rig(OpenAIEngine(UpstreamSettings(url=upstream.url, times=NEVER)))
    await rig.start()
    yield rig
    await rig.engine.stop()


async def ask(rig: Rig, adapter: str, **more: Any) -> Answer:
    key = rig.key()
    request = msgspec.structs.replace(asked(key, prompt(), max_tokens=6), adapter=adapter, **more)
    rig.engine.submit(key, request)
    return await rig.answer(key)


async def test_the_adapters_name_is_sent_as_the_model(rig: Rig, upstream: Upstream) -> None:
    answers = {adapter: (await ask(rig, adapter)).tokens for adapter in ("", "sql", "legal")}
    assert [body["model"] for body in upstream.bodies] == ["up", "sql", "legal"]
    assert all("lora_path" not in body for body in upstream.bodies)
    assert len({tuple(tokens) for tokens in answers.values()}) == 3
    assert (await ask(rig, "", canary=True)).tokens == answers[""], "canaries check the model"


async def test_sglang_gets_the_adapter_in_its_own_field() -> None:
    server = await Upstream(adapters=("sql",), sglang=True).start()
    server.others["/v1/embeddings"] = OtherPath([b"{}"])
    rig = Rig(OpenAIEngine(UpstreamSettings(url=server.url, times=NEVER)))
    await rig.start()
    assert (await ask(rig, "sql")).tokens != (await ask(rig, "")).tokens
    assert [body.get("lora_path") for body in server.bodies] == ["sql", None]
    proxied = ProxiedRequest("/v1/embeddings", b'{"model":"sql","input":"a"}')
    for adapter in ("sql", ""):
        await ask(rig, adapter, tokens=[], proxied=proxied)
    bodies = [msgspec.json.decode(body) for _, _, body in server.passed_on]
    assert bodies == [{"model": "sql", "input": "a", "lora_path": "sql"}, {"model": "sql", "input": "a"}]
    server.adapters = ()
    assert (await ask(rig, "sql")).error == GONE, "SGLang answers 400"
    await rig.engine.stop()
    await server.stop()


async def test_a_refusal_of_an_unloaded_adapter_sends_the_request_elsewhere(
    rig: Rig, upstream: Upstream
) -> None:
    upstream.adapters = ("legal",)
    assert (await ask(rig, "sql")).error == GONE
    await rig.engine.check()
    assert rig.engine.identity.adapters == ("legal",)
    sent = len(upstream.bodies)
    assert (await ask(rig, "sql")).error == GONE
    assert len(upstream.bodies) == sent, "it is known by now, so nothing is sent"
    assert (await ask(rig, "legal")).finish == "length"


async def test_a_proxied_request_for_an_unloaded_adapter_is_sent_elsewhere(
    rig: Rig, upstream: Upstream
) -> None:
    upstream.others["/v1/embeddings"] = OtherPath([b"{}"], status=404)
    proxied = ProxiedRequest("/v1/embeddings", b'{"model":"sql"}')
    answer = await ask(rig, "sql", tokens=[], proxied=proxied)
    assert answer.error is not None and "does not serve /v1/embeddings" in answer.error
    upstream.adapters = ()
    assert (await ask(rig, "sql", tokens=[], proxied=proxied)).error == GONE


async def test_a_change_of_adapters_is_a_fact_and_does_not_end_the_worker(upstream: Upstream) -> None:
    upstream.adapters = ("sql",)
    stream, stop = MemoryStream(), asyncio.Event()
    worker = InferenceWorker(
        WorkerConfig(name="w0", instance="i1"),
        OpenAIEngine(UpstreamSettings(url=upstream.url, times=OFTEN)),
        MemoryJournal(stream, "worker:w0"),
        MemoryBus(),
    )
    running = asyncio.ensure_future(worker.run(stop))
    await until(worker.serving.is_set)
    upstream.adapters = ("legal", "sql")

    def changes() -> list[tuple[str, ...]]:
        return [event.fact.adapters for event in stream.events if isinstance(event.fact, AdaptersChanged)]

    await until(changes)
    [joined] = [event.fact for event in stream.events if isinstance(event.fact, WorkerJoined)]
    assert (joined.adapters, changes()) == (("sql",), [("legal", "sql")])
    assert not any(isinstance(event.fact, ShutdownBegan) for event in stream.events)
    stop.set()
    assert await running == 0


def test_only_entries_of_the_served_model_are_its_adapters() -> None:
    about = {"id": "m", "root": "/m"}
    listed = [
        about,
        {"id": "alias", "root": "/m"},
        {"id": "b", "root": "/b", "parent": "m"},
        {"id": "a", "root": "/m", "parent": "alias"},
        {"id": "other", "root": "/o", "parent": "another model"},
        {"id": "m", "parent": "m"},
        {"id": "", "parent": "m"},
        {"id": "x" * (NAME_MAX + 1), "parent": "m"},
    ]
    assert adapters_of(listed, about) == ("a", "b")
    many = [about, *({"id": f"a{n:03}", "parent": "m"} for n in range(NAMES_MAX + 9))]
    assert len(adapters_of(many, about)) == NAMES_MAX
