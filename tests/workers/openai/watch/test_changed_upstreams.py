"""A changed server ends its worker's instance; the next instance registers the new identity."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from engine_contract import Rig, prompt
from memory_bus import MemoryBus
from memory_journal import MemoryJournal, MemoryStream
from upstream import Upstream
from waits import until

from events.observations import EngineFaulted, ShutdownBegan, WorkerJoined, WorkerLeft
from workers.config.settings import WorkerConfig
from workers.engines.engine import EngineChanged
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.upstream_reports import AccountTimes
from workers.runtime import Alone
from workers.shutdown import Stop
from workers.worker import InferenceWorker

Eventually = Callable[..., Awaitable[None]]
METRICS = 'vllm:cache_config_info{block_size="16",cache_dtype="auto"} 1.0\nprocess_start_time_seconds 7\n'
OFTEN, NEVER = AccountTimes(identity_s=0.05), AccountTimes(identity_s=3600.0)


def engine(upstream: Upstream, times: AccountTimes) -> OpenAIEngine:
    return OpenAIEngine(UpstreamSettings(url=upstream.url, times=times))


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    server = await Upstream(
        root="/models/a", tells={"weight_version": "1", "quantization": "no"}, metrics=METRICS
    ).start()
    yield server
    await server.stop()


async def changed(rig: Rig) -> str:
    """Wait for the engine's end, and return the reason."""

    async def reason() -> str:
        try:
            await rig.engine.check()
        except EngineChanged as error:
            return str(error)
        return ""

    return await until(reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("become", "said"),
    [
        ({"model": "other"}, "model: up -> other"),
        ({"root": "/models/b"}, "root: /models/a -> /models/b"),
        ({"names": ("gpt-4o",)}, "also_served: () -> ('gpt-4o',)"),
        ({"context": 1024}, "max_model_len: 2048 -> 1024"),
        ({"version": "0.33.0"}, "version: 0.32.0 -> 0.33.0"),
        ({"manner": "strict"}, "extensions: True -> False"),
        ({"connector": True}, ""),  # gained, and probed less often
        ({"version": ""}, ""),  # it cannot be read now
        ({"tells": {"weight_version": "2", "quantization": "no"}}, "weight_version=2"),
        ({"tells": {"weight_version": "1", "quantization": "fp8"}}, "quantization=fp8"),
        (
            {"metrics": 'vllm:cache_config_info{block_size="16",cache_dtype="fp8"} 1.0\n'},
            "kv_cache_dtype=fp8",
        ),
        ({"metrics": METRICS + "process_start_time_seconds 9\n"}, ""),  # it was restarted
        ({"metrics": ""}, ""),  # it cannot be read now
    ],
)
async def test_each_part_of_the_identity_is_read_again(
    upstream: Upstream, become: dict[str, Any], said: str
) -> None:
    """Model, weights, context, version and extensions are compared every few seconds.

    A value that cannot be read is no change, and `created`, which differs in each answer of this server, is not compared.
    """
    rig = Rig(engine(upstream, OFTEN))
    await rig.start()
    for name, value in become.items():
        setattr(upstream, name, value)
    if said:
        assert said in await changed(rig)
    else:
        before = upstream.listings
        await until(lambda: upstream.listings >= before + 4)
        await rig.engine.check()
    await rig.engine.stop()


async def test_further_names_of_the_same_weights_are_registered_apart_from_adapters(
    upstream: Upstream,
) -> None:
    upstream.names, upstream.adapters = ("gpt-4o", "a/b"), ("sql", "legal")
    rig = Rig(engine(upstream, NEVER))
    await rig.start()
    assert rig.engine.identity.model == upstream.model
    assert rig.engine.identity.also_served == ("a/b", "gpt-4o")
    assert rig.engine.identity.adapters == ("legal", "sql")
    await rig.engine.stop()


async def test_an_unreachable_server_has_not_changed(upstream: Upstream, eventually: Eventually) -> None:
    """A missing answer, or an error, does not change the identity."""
    rig = Rig(engine(upstream, OFTEN))
    await rig.start()
    upstream.key = "wanted"
    await until(lambda: upstream.denials >= 3)
    upstream.key = ""
    await rig.engine.check()
    assert (await rig.ask(prompt())).finish == "length"
    await rig.engine.stop()


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_status_of_another_server_triggers_a_read_of_the_identity(
    upstream: Upstream, status: int
) -> None:
    """The request is not counted against the worker: another worker gets it, and this one accepts no more."""
    rig = Rig(engine(upstream, NEVER))
    await rig.start()
    if status == 404:
        upstream.model, said = "other", "model: up -> other"
    else:
        upstream.fault, upstream.context, said = f"http_{status}", 1024, "max_model_len: 2048 -> 1024"
    for _ in range(2):
        error = str((await rig.ask(prompt())).error)
        assert error.startswith(f"not_serving: the server behind the worker has changed ({said}")
    assert said in await changed(rig)
    await rig.engine.stop()


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_such_a_status_of_the_same_server_is_an_engine_error(upstream: Upstream, status: int) -> None:
    """If the listing is unchanged, the status is passed on, and the worker stays in service."""
    rig = Rig(engine(upstream, NEVER))
    await rig.start()
    upstream.fault = f"http_{status}"
    assert str((await rig.ask(prompt())).error).startswith(f"engine_error: the upstream answers {status}")
    upstream.fault = ""
    assert (await rig.ask(prompt())).finish == "length"
    await rig.engine.check()
    await rig.engine.stop()


async def test_a_reconnect_triggers_a_read_of_the_identity(upstream: Upstream) -> None:
    """After a broken connection, another server may be there."""
    rig = Rig(engine(upstream, NEVER))
    await rig.start()
    upstream.fault = "cut"
    assert str((await rig.ask(prompt())).error).startswith("upstream_lost: ")
    upstream.fault, upstream.context = "", 512
    assert "max_model_len: 2048 -> 512" in await changed(rig)
    await rig.engine.stop()


@pytest.mark.parametrize(
    ("become", "lost"),
    [
        ({"connector": False}, True),
        ({"lacking_handles": 1}, False),  # a second read finds them
        ({"broken_handles": True}, False),  # it cannot be read now
    ],
)
async def test_a_kv_connector_lost_in_a_restart_is_detected(
    upstream: Upstream, become: dict[str, Any], lost: bool
) -> None:
    """After an absence, the upstream is probed for a KV handle again: a worker that offers moves must support them."""
    upstream.connector = True
    rig = Rig(engine(upstream, OFTEN))
    await rig.start()
    assert rig.engine.kv
    upstream.fault = "cut"
    for name, value in become.items():
        setattr(upstream, name, value)
    assert str((await rig.ask(prompt())).error).startswith("upstream_lost: ")
    if lost:
        assert "handles: True -> False" in await changed(rig)
    else:
        before = upstream.listings
        await until(lambda: upstream.listings >= before + 6 and not upstream.lacking_handles)
        await rig.engine.check()
    await rig.engine.stop()


async def test_the_next_instance_registers_the_new_identity(
    upstream: Upstream, eventually: Eventually
) -> None:
    """In one process: the old instance leaves in order, moves its streams elsewhere, and a new instance joins."""
    stream, bus, stop = MemoryStream(), MemoryBus(), Stop()
    journal = MemoryJournal(stream, "worker:w0")

    def make(config: WorkerConfig) -> InferenceWorker:
        return InferenceWorker(config, engine(upstream, OFTEN), journal, bus)

    first = make(WorkerConfig(name="w0", instance="i1"))
    process = Alone(first, stop, make)
    running = asyncio.ensure_future(process.run())
    await eventually(lambda: first.serving.is_set())
    upstream.model, upstream.context = "other", 1024

    def joined() -> list[WorkerJoined]:
        return [event.fact for event in stream.events if isinstance(event.fact, WorkerJoined)]

    await eventually(lambda: len(joined()) == 2)
    before, now = joined()
    assert (before.model, before.context_tokens) == ("up", 2048)
    assert (now.model, now.context_tokens) == ("other", 1024)
    assert now.instance != before.instance and now.worker == "w0"
    kinds = [type(event.fact) for event in stream.events]
    assert EngineFaulted not in kinds  # nothing failed
    (began,) = [event.fact for event in stream.events if isinstance(event.fact, ShutdownBegan)]
    assert (began.instance, began.mode) == ("i1", "graceful") and "model: up -> other" in began.reason
    (left,) = [event.fact for event in stream.events if isinstance(event.fact, WorkerLeft)]
    assert (left.instance, left.exit) == ("i1", 0)
    assert not process.stopping()
    stop.signalled()
    assert await running == 0


async def test_a_configured_context_is_no_longer_than_the_servers(upstream: Upstream) -> None:
    """A server with a shorter context than configured rejects what does not fit."""
    settings = UpstreamSettings(url=upstream.url, context_tokens=4096)
    for configured, registered in ((4096, 2048), (1024, 1024)):
        rig = Rig(OpenAIEngine(replace(settings, context_tokens=configured)))
        await rig.start()
        assert rig.engine.identity.context_tokens == registered
        await rig.engine.stop()
