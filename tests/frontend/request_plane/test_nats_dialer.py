"""A frontend with workers behind a real broker: differences from a worker's own port."""

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from frontend_kit import Kit, first_goes_to, frontend, text_of
from json_types import Json
from scripted_worker import Act, ScriptedWorker, undisturbed
from transports import through
from waits import turns, until

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.hang import HangPolicy
from controller.adapters.request_plane.nats_dialer import NO_RESPONDERS, ChannelConnection
from controller.adapters.request_plane.worker_links import Address, PlaneLimits
from controller.frontend.openai.text.tokenizer import BUILTIN, load_tokens
from events.nats.channel import Channel, NoResponders
from events.nats.channels import Channels
from events.observations import RequestMigrated
from events.wire import Chunk, Generate, Sampling, Welcome

pytestmark = pytest.mark.servers
PROMPT = [300, 301, 302]
COUNT = 40
EXACT = load_tokens(BUILTIN).decode(undisturbed(PROMPT, COUNT))


class RecordingSink:
    """A sink that records the answer and its end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end = ""

    def take(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens
        self.end = chunk.finish or chunk.error or self.end

    def flush(self) -> None: ...
    def lost(self, cause: str, detail: str) -> None:
        self.end = f"{cause}: {detail}"


def question(count: int = 8) -> Generate:
    return Generate(0, "r", list(PROMPT), 3, Sampling(max_tokens=count))


async def behind(broker: EmbeddedServer, name: str, **script: Any) -> ScriptedWorker:
    """Return a worker with its own connection to the broker, which can be cut."""
    return ScriptedWorker(name, channels=await Channels.open(broker.url, name), **script)


async def vanish(worker: ScriptedWorker) -> None:
    """End a worker's connection to the broker like that of a killed process."""
    assert worker.channels is not None
    await worker.channels.close()


async def stream(kit: Kit, **more: object) -> list[Json]:
    body: Json = {"model": "m", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}
    return await kit.stream(**(body | more))


@asynccontextmanager
async def before(broker: EmbeddedServer, *workers: ScriptedWorker, **settings: Any) -> AsyncIterator[Kit]:
    """Run a frontend with workers, of which the first gets the first request."""
    async with through(broker) as road, frontend(road=road, **settings) as kit:
        await first_goes_to(kit, *workers)
        yield kit


def failures(kit: Kit) -> dict[tuple[str, ...], float]:
    return kit.counted("dynamo_frontend_model_migration_total", "migration_type")


async def test_a_request_without_a_responder_is_sent_elsewhere_and_costs_no_budget(
    nats_server: EmbeddedServer,
) -> None:
    first, other = await behind(nats_server, "w1"), await behind(nats_server, "w2")
    async with before(nats_server, first, other, migration_limit=1) as kit:
        await vanish(first)
        began = time.monotonic()
        assert text_of(await stream(kit)) == EXACT
        assert time.monotonic() - began < PlaneLimits().welcome_s
        assert (first.requests, len(other.requests)) == ([], 1)
        causes = [fact.cause for fact in kit.said(RequestMigrated)]
        asked = {("new_request",): 1}
        # its end may be noticed during the request, or before
        assert (causes, failures(kit)) in ((["cannot_connect"], asked), ([], asked), ([], {}))
    await vanish(other)


async def test_a_stream_of_a_vanished_worker_continues_elsewhere(nats_server: EmbeddedServer) -> None:
    first, other = await behind(nats_server, "w1", step_s=0.01), await behind(nats_server, "w2")
    async with before(nats_server, first, other) as kit:
        answer = asyncio.create_task(stream(kit))
        await until(lambda: first.active and kit.counted("dynamo_frontend_output_tokens_total"))
        await vanish(first)
        assert text_of(await answer) == EXACT
        assert failures(kit) == {("ongoing_request",): 1}
        (moved,) = kit.said(RequestMigrated)
        assert (moved.cause, moved.exact) == ("disconnected", True)
    await vanish(other)


async def test_unread_requests_had_no_responder_and_the_others_are_disconnected() -> None:
    class Silent:
        taken, payload_max = 0, 1000

        def unread(self) -> int:
            return 0

        def post(self, *message: bytes) -> None: ...
        def wake(self, channel: Channel) -> None: ...
        def forget(self, channel: Channel) -> None: ...

    connection = ChannelConnection("f1", HangPolicy(), lambda: None)
    channel = Channel(Silent(), "own", "other", lambda: connection)
    channel.begin()
    connection.welcomed(Welcome("w1", "i1", "m"))
    read, unread, ended = RecordingSink(), RecordingSink(), RecordingSink()
    connection.open(1, question(), read)
    channel.outgoing.acknowledged = channel.outgoing.written
    connection.open(2, question(), unread)
    connection.open(3, question(), ended)
    connection.cancel(3, "gone")
    channel.end(NoResponders("no responders"))
    await turns()
    assert read.end == "disconnected: Stream ended before generation completed"
    assert (unread.end, ended.end) == (f"cannot_connect: {NO_RESPONDERS}", "")
    assert connection.detector.open_streams == 0


@dataclass
class Busy:
    """A broker's socket that always has something to read."""

    taken: int = 0
    waiting: int = 5000
    payload_max: int = 1000

    def unread(self) -> int:
        return self.waiting

    def post(self, *message: bytes) -> None: ...
    def wake(self, channel: Channel) -> None: ...
    def forget(self, channel: Channel) -> None: ...


async def test_a_silent_worker_is_judged_although_others_send_all_the_time() -> None:
    busy = Busy()
    connection = ChannelConnection("f1", HangPolicy(), lambda: None)
    Channel(busy, "own", "other", lambda: connection).begin()
    assert connection.readable()
    busy.taken = 4999
    assert connection.readable()  # its frames may lie there unread
    busy.taken = 5000
    assert not connection.readable()  # everything has been read that lay there when its silence was noticed
    busy.waiting = 0
    assert not connection.readable()


async def test_a_frontend_without_the_broker_reports_how_such_a_worker_is_reached(
    nats_server: EmbeddedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = await (await behind(nats_server, "w1")).start()
    plane = RequestPlaneClient("f1")
    plane.set_workers({"w1": Address("i1", worker.url)})
    task = asyncio.create_task(plane.run())
    said = ""

    def heard() -> bool:
        nonlocal said
        said += "".join(capfd.readouterr())
        return "start this process with --request-plane nats" in said

    await until(heard)
    assert not plane.connected
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await vanish(worker)


async def test_one_frontend_reaches_workers_at_their_ports_and_through_the_broker(
    nats_server: EmbeddedServer,
) -> None:
    at_port, hidden = await ScriptedWorker("w1").start(), await behind(nats_server, "w2")
    async with through(nats_server) as road:
        plane = road.plane("f1")
        await hidden.start()
        plane.set_workers({w.name: Address(w.instance, w.url) for w in (at_port, hidden)})
        task = asyncio.create_task(plane.run())
        await until(lambda: len(plane.connected) == 2)
        sinks = {name: RecordingSink() for name in ("w1", "w2")}
        for name, sink in sinks.items():
            plane.open(name, "i1", question(), sink)
        await until(lambda: all(sink.end for sink in sinks.values()))
        assert {tuple(sink.tokens) for sink in sinks.values()} == {tuple(undisturbed(PROMPT, 8))}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await at_port.stop()
    await vanish(hidden)


async def test_streams_pause_with_the_broker_and_continue_exactly_when_it_is_back(
    own_nats: EmbeddedServer, background: Any, tmp_path: Path
) -> None:
    first, other = await behind(own_nats, "w1", step_s=0.04), await behind(own_nats, "w2", step_s=0.04)
    async with before(own_nats, first, other, reroute_s=20.0) as kit:
        await stream(
            kit, max_tokens=1
        )  # copies of a prompt that no worker has read yet would all go to one worker
        answers = [asyncio.create_task(stream(kit, max_tokens=COUNT)) for _ in range(6)]
        await until(lambda: first.active and other.active and kit.plane.connected)
        await own_nats.kill()
        await until(lambda: not kit.plane.connected)
        await kit.ticks(7)
        assert not any(answer.done() for answer in answers)
        again = background.run(start_nats(tmp_path / "again", port=own_nats.port))
        for answer in answers:
            async with asyncio.timeout(20):
                assert text_of(await answer) == EXACT
    for worker in (first, other):
        await vanish(worker)
    background.run(again.kill())


async def test_a_stalled_broker_costs_a_pause_and_no_token(
    own_nats: EmbeddedServer,
) -> None:
    first, other = await behind(own_nats, "w1", step_s=0.01), await behind(own_nats, "w2", step_s=0.01)
    async with before(own_nats, first, other, reroute_s=20.0) as kit:
        await stream(
            kit, max_tokens=1
        )  # copies of a prompt that no worker has read yet would all go to one worker
        answers = [asyncio.create_task(stream(kit, max_tokens=COUNT)) for _ in range(6)]
        await until(lambda: first.active and other.active)
        os.kill(own_nats.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(3.0)  # longer than it takes to consider all workers silent
        finally:
            os.kill(own_nats.pid, signal.SIGCONT)
        for answer in answers:
            async with asyncio.timeout(20):
                assert text_of(await answer) == EXACT
    for worker in (first, other):
        await vanish(worker)


async def test_a_long_prompt_and_a_large_answer_pass_a_broker_with_small_messages(
    background: Any, tmp_path: Path
) -> None:
    broker = background.run(start_nats(tmp_path / "small", max_payload=4096))
    worker = await behind(broker, "w1", acts=deque([Act(per_step=2000)]), follow=lambda tokens: len(tokens))
    async with through(broker) as road:
        plane = road.plane("f1")
        await worker.start()
        plane.set_workers({"w1": Address("i1", worker.url)})
        task = asyncio.create_task(plane.run())
        await until(lambda: bool(plane.connected))
        prompt = [300 + n % 1000 for n in range(200_000)]
        sink = RecordingSink()
        plane.open("w1", "i1", Generate(0, "r", prompt, len(prompt), Sampling(max_tokens=6000)), sink)
        await until(lambda: sink.end == "length", 20)
        assert worker.requests[0].tokens == prompt
        assert sink.tokens == list(range(len(prompt), len(prompt) + 6000))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await vanish(worker)
    background.run(broker.kill())
