"""A worker as an operating system process: with a real broker, a disconnected broker, and none."""

import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_contract import prompt
from plain_frontend import PlainFrontend
from worker_life import Eventually
from worker_process import START_S, Spawn

from controller.adapters.embedded.server import EmbeddedServer
from events import subjects
from events.fact import Fact
from events.journal.nats import NatsJournal
from events.nats.bus import NatsBus
from events.nats.channel import SILENT_S_MAX, NoResponders
from events.nats.channels import Channels
from events.observations import WorkerJoined, WorkerLeft
from events.process.presence import present


async def facts(url: str, count: int) -> list[Fact]:
    """Return the first `count` facts of the journal."""
    journal = await NatsJournal.connect(url, "test:reader:1")
    found: list[Fact] = []
    try:
        async with asyncio.timeout(20), contextlib.aclosing(journal.read(0)) as batches:
            async for batch in batches:
                found += [event.fact for event in batch]
                if len(found) >= count:
                    break
    except TimeoutError:
        pytest.fail(f"only {len(found)} of {count} facts came: {found}")
    finally:
        await journal.close()
    return found


async def test_a_process_serves_without_a_fleet_and_ends_at_sigterm(
    spawn: Spawn, eventually: Eventually
) -> None:
    process = await spawn("--itl-ms", "1")
    await eventually(lambda: process.ready, START_S)
    assert any('"worker_without_fleet"' in line for line in process.lines), (
        "a wrong --data must not go unnoticed"
    )
    frontend = await PlainFrontend.connect(process.port())
    stream = frontend.ask(prompt(), max_tokens=100)
    await frontend.until(lambda: frontend.tokens(stream))
    process.inner.send_signal(signal.SIGTERM)
    assert len(await frontend.answer(stream)) == 100
    assert await process.ended() == 0
    assert not any("Traceback" in line for line in process.lines)
    await frontend.lost()


@pytest.mark.slow
@pytest.mark.servers
async def test_a_process_joins_sends_heartbeats_and_leaves(
    spawn: Spawn, nats_url: str, eventually: Eventually
) -> None:
    bus = await NatsBus.connect(nats_url, "test")
    beats: list[dict[str, object]] = []
    await bus.subscribe(subjects.beat("w5"), lambda subject, body: beats.append(dict(body)))
    process = await spawn("--name", "w5", nats_url=nats_url, HOLDFAST_WORKER_INSTANCE="life-1")
    await eventually(lambda: beats, START_S)
    answer = await bus.request(subjects.command("drain", "w5"), {"instance": "life-1", "deadline_s": 1})
    assert answer["draining"] is True
    process.inner.send_signal(signal.SIGTERM)
    assert await process.ended() == 0
    recorded = await facts(nats_url, 5)
    assert [fact.kind() for fact in recorded] == [
        "worker_joined", "drain_finished", "shutdown_began", "drain_finished", "worker_left",
    ]  # fmt: skip
    assert isinstance(recorded[0], WorkerJoined) and recorded[0].pid == process.inner.pid
    assert recorded[-1] == WorkerLeft(worker="w5", instance="life-1", mode="graceful", exit=0)
    await bus.close()


@pytest.mark.slow
@pytest.mark.servers
async def test_a_worker_serves_while_the_broker_is_disconnected(
    spawn: Spawn, own_nats: EmbeddedServer, background: Any, eventually: Eventually
) -> None:
    from controller.adapters.embedded.nats import start_nats

    background.run(own_nats.kill())
    process = await spawn(nats_url=own_nats.url)
    await eventually(lambda: process.ready, START_S)
    frontend = await PlainFrontend.connect(process.port())
    assert len(await frontend.answer(frontend.ask(prompt()))) == 16
    process.inner.kill()  # before the broker has received it
    await process.ended()
    back = background.run(start_nats(process.data / "nats-2", port=own_nats.port))
    try:
        successor = await spawn(nats_url=own_nats.url)
        await eventually(lambda: successor.ready, START_S)
        joined = [fact for fact in await facts(own_nats.url, 2) if isinstance(fact, WorkerJoined)]
        assert len({fact.instance for fact in joined}) == 2
        assert joined[-1].pid == successor.inner.pid
    finally:
        background.run(back.kill())
    frontend.transport.abort()


async def test_several_workers_share_a_process(spawn: Spawn, eventually: Eventually) -> None:
    process = await spawn("--name", "w3", "--count", "3")
    await eventually(lambda: len(process.ready) == 3, START_S)
    assert sorted(line["worker"] for line in process.ready) == ["w3", "w4", "w5"]
    answers = []
    for number in range(3):
        frontend = await PlainFrontend.connect(process.port(number))
        answers.append(await frontend.answer(frontend.ask(prompt())))
        frontend.transport.abort()
    assert answers[0] == answers[1] == answers[2]
    process.inner.send_signal(signal.SIGTERM)
    assert await process.ended() == 0


@pytest.mark.slow
@pytest.mark.servers
async def test_a_process_that_lost_one_of_its_workers_does_not_report_a_shutdown(
    spawn: Spawn, nats_url: str, eventually: Eventually
) -> None:
    process = await spawn("--name", "h0", "--count", "2", nats_url=nats_url)
    await eventually(lambda: present(process.data), START_S)
    url, bus = present(process.data)[0].url + "/health", await NatsBus.connect(nats_url, "test")
    seen: list[tuple[int, str, str]] = []
    async with aiohttp.ClientSession() as http:
        await bus.request(subjects.command("chaos", "h0"), {"fault": "kill"})
        while len(process.ready) < 3 or not seen or seen[-1][1] != "healthy":
            async with http.get(url) as response:
                body = await response.json()
                seen.append((response.status, body["status"], body["workers"]["h0"]))
    assert (200, "degraded", "restarting") in seen
    assert set(seen) <= {(200, "healthy", "serving"), (200, "degraded", "restarting")}
    await bus.close()
    process.inner.send_signal(signal.SIGTERM)
    assert await process.ended() == 0


async def test_workers_of_one_process_serve_through_the_broker_and_leave_gracefully(
    spawn: Spawn, own_nats: EmbeddedServer, eventually: Eventually
) -> None:
    process = await spawn("--count", "2", "--request-plane", "nats", nats_url=own_nats.url)
    await eventually(lambda: len(process.ready) == 2, START_S)
    places = [subjects.plane_of(line["url"]) for line in process.ready]
    assert None not in places
    channels = await Channels.open(own_nats.url, "test")
    frontends = [await PlainFrontend.through(channels, str(place)) for place in places]
    answers = [await frontend.answer(frontend.ask(prompt())) for frontend in frontends]
    assert answers[0] == answers[1] and len(answers[0]) == 16
    process.inner.send_signal(signal.SIGTERM)
    assert await process.ended() == 0
    for frontend, place in zip(frontends, places, strict=True):
        await frontend.lost()
        await eventually(lambda place=place: _gone(channels, str(place)), START_S)
    await channels.close()


async def _gone(channels: Channels, place: str) -> bool:
    """Return whether the broker knows that there is no listener any more: a busy broker learns of a closed connection a
    little later."""
    try:
        async with asyncio.timeout(1.0):
            await channels.dial(place, PlainFrontend)
    except NoResponders:
        return True
    except (TimeoutError, ConnectionError):
        return False
    return False


async def test_a_killed_worker_behind_the_broker_is_detected_at_the_next_beat(
    spawn: Spawn, own_nats: EmbeddedServer, eventually: Eventually
) -> None:
    process = await spawn("--itl-ms", "10", "--request-plane", "nats", nats_url=own_nats.url)
    await eventually(lambda: process.ready, START_S)
    channels = await Channels.open(own_nats.url, "test")
    frontend = await PlainFrontend.through(channels, str(subjects.plane_of(process.ready[0]["url"])))
    stream = frontend.ask(prompt(), max_tokens=10_000)
    await frontend.until(lambda: len(frontend.tokens(stream)) > 5)
    process.inner.kill()
    began = asyncio.get_running_loop().time()
    await frontend.lost()
    assert (
        asyncio.get_running_loop().time() - began < SILENT_S_MAX / 2
    )  # when it would be detected otherwise; the intended time is 0.05 s
    await channels.close()


async def test_a_process_can_be_found_and_scraped(spawn: Spawn, eventually: Eventually) -> None:
    process = await spawn("--name", "w7")
    await eventually(lambda: present(process.data), START_S)
    (presence,) = present(process.data)
    assert (presence.role, presence.name, presence.pid) == ("worker", "w7", process.inner.pid)
    frontend = await PlainFrontend.connect(process.port())
    await frontend.answer(frontend.ask(prompt()))
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{presence.url}/health") as response:
            assert await response.json() == {"status": "healthy", "workers": {"w7": "serving"}}
        async with http.get(f"{presence.url}/metrics") as response:
            metrics = await response.text()
    assert 'holdfast_worker_tokens_total{model="sim",worker_id="w7"} 16.0' in metrics
    assert (
        'dynamo_component_request_duration_seconds_bucket{le="+Inf",model="sim",worker_id="w7"} 1.0'
        in metrics
    )
    frontend.transport.abort()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc: run it on Linux")
async def test_a_simulated_worker_loads_nothing_that_it_does_not_need(
    nats_url: str, spawn: Spawn, eventually: Eventually
) -> None:
    process = await spawn(nats_url=nats_url)
    await eventually(lambda: present(process.data), START_S)  # the admin port, its last import, is open
    mapped = Path(f"/proc/{process.inner.pid}/maps").read_text()
    assert "/msgspec/" in mapped, "libraries are listed here"
    heavy = ("pydantic", "aiohttp", "tokenizers", "numpy", "asyncpg", "sqlalchemy", "greenlet", "torch")
    assert not [name for name in heavy if f"/{name}" in mapped]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "environment", "code", "words"),
    [
        (["--engine", "simulate"], {}, 2, "engine = 'simulate': expected one of simulated"),
        (["--itl-ms", "-1"], {}, 2, "itl_ms = '-1'"),
        ([], {"HOLDFAST_WORKER_SPEED": "9"}, 2, "HOLDFAST_WORKER_SPEED is not a setting"),
        (["--engine", "openai"], {}, 2, "requires the URL of a server"),
        (["--engine", "transformers", "--model", "/nowhere"], {}, 2, "requires a model directory"),
        (["--engine", "openai", "--upstream", "http://x", "--count", "2"], {}, 2, "only simulated engines"),
        (["--host", "0.0.0.0"], {}, 2, "set advertise to the address"),
        (["--kv-blocks", "1"], {}, 2, "needs more than 1 KV blocks"),
        (["--host", "203.0.113.1"], {}, 1, "cannot listen on port"),
    ],
)
async def test_a_usage_error_gives_one_clear_sentence(
    spawn: Spawn, flags: list[str], environment: dict[str, str], code: int, words: str
) -> None:
    process = await spawn(*flags, **environment)
    assert await process.ended() == code
    messages = [line for line in process.lines if not line.startswith("{")]
    assert len(messages) == 1
    assert words in messages[0]
