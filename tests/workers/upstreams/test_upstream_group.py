"""Many upstreams in one process: they come and go, and a failure of one does not reach the others."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_contract import prompt
from msgspec.structs import replace
from plain_frontend import PlainFrontend
from upstream import Upstream
from worker_life import Eventually

from events.token_bytes import BUILTIN_FILE
from workers.config.settings import WorkerSettings
from workers.config.upstreams import BadUpstreams, UpstreamEntry
from workers.exits import BROKE
from workers.shutdown import Stop
from workers.upstreams.discovery import DnsDiscovery
from workers.upstreams.group import UpstreamGroup
from workers.upstreams.life import LifeFactory, UpstreamLife
from workers.upstreams.watched_file import UpstreamsFile
from workers.worker_group import BackOff

BACK_OFF = BackOff(wait_s_min=0.02, wait_s_max=0.05)


@dataclass
class Process:
    """A process with a file of upstreams, which runs in the test's process, and the servers behind it."""

    folder: Path
    servers: dict[str, Upstream]
    build: Any
    stop: Stop
    eventually: Eventually
    group: UpstreamGroup | None = None
    running: asyncio.Task[int] | None = None
    discover: Any = DnsDiscovery

    def write(self, **fields: str) -> None:
        """List all servers in the file. `fields` has further fields by the name of the server."""
        entries = (
            f"  - {{name: {name}, url: '{server.url}'{fields.get(name, '')}}}\n"
            for name, server in self.servers.items()
        )
        (self.folder / "up.yaml").write_text("upstreams:\n" + "".join(entries))

    async def start(self) -> None:
        file = UpstreamsFile(self.folder / "up.yaml", self.folder / "kept" / "up.yaml")
        await file.first()
        self.group = UpstreamGroup(
            file, self.build, self.stop, "life", 5.0, back_off=BACK_OFF, discover=self.discover
        )
        self.running = asyncio.ensure_future(self.group.run())

    async def reload(self, **fields: str) -> str:
        self.write(**fields)
        assert self.group is not None
        return await self.group.reload()

    def report(self, name: str) -> Any:
        assert self.group is not None
        return next((one for one in self.group.report()["upstreams"] if one["name"] == name), None)

    async def reaches(self, name: str, state: str) -> None:
        await self.eventually(lambda: (self.report(name) or {"state": ""})["state"] == state)

    async def connect(self, name: str) -> PlainFrontend:
        assert self.group is not None
        worker = next(one for one in self.group.workers if one.config.name == name)
        return await PlainFrontend.connect(worker.server.address[1])

    async def answers(self, name: str, tokens: int = 16) -> int:
        frontend = await self.connect(name)
        found = await frontend.answer(frontend.ask(prompt(), max_tokens=tokens))
        frontend.transport.close()
        return len(found)

    async def end(self) -> int:
        self.stop.signalled()
        assert self.running is not None
        async with asyncio.timeout(20):
            return await self.running


@pytest.fixture
async def process(tmp_path: Path, eventually: Eventually) -> AsyncIterator[Process]:
    """Three upstreams, a to c, all of which serve."""
    shutil.copy(BUILTIN_FILE, tmp_path / "tokenizer.json")
    settings = WorkerSettings(
        engine="openai", model=str(tmp_path), data=tmp_path, upstreams=tmp_path / "up.yaml"
    )
    servers = {name: await Upstream(token_s=0.002).start() for name in "abc"}
    process = Process(tmp_path, servers, LifeFactory(settings, None).build, Stop(), eventually)
    process.write()
    await process.start()
    for name in servers:
        await process.reaches(name, "serving")
    yield process
    if process.running is not None and not process.running.done():
        await process.end()
    for server in servers.values():
        await server.stop()


async def test_every_upstream_has_its_own_worker(process: Process) -> None:
    assert [await process.answers(name) for name in "abc"] == [16, 16, 16]
    assert [len(server.bodies) for server in process.servers.values()] == [1, 1, 1]
    found = [process.report(name) for name in "abc"]
    assert [one["requests"] for one in found] == [1, 1, 1]
    assert {one["instance"] for one in found} == {"life-0", "life-1", "life-2"}
    assert await process.end() == 0
    assert process.report("a") is None


async def test_a_removed_upstream_finishes_its_streams_and_an_added_one_joins(process: Process) -> None:
    frontend = await process.connect("a")
    stream = frontend.ask(prompt(), max_tokens=100)
    await frontend.until(lambda: frontend.tokens(stream))
    removed = process.servers.pop("a")
    added = process.servers["d"] = await Upstream().start()
    assert await process.reload() == ""
    assert process.report("a")["state"] == "draining"
    assert len(await frontend.answer(stream)) == 100
    await process.eventually(lambda: process.report("a") is None)
    await process.reaches("d", "serving")
    assert await process.answers("d") == 16
    assert len(added.bodies) == 1
    await removed.stop()


async def test_a_paused_upstream_leaves_and_joins_as_another_instance(process: Process) -> None:
    before = process.report("b")["instance"]
    await process.reload(b=", pause: true")
    await process.reaches("b", "paused")
    assert [worker.config.name for worker in process.group.workers] == ["a", "c"]  # type: ignore[union-attr]
    await process.reload()
    await process.reaches("b", "serving")
    assert process.report("b")["instance"] != before


async def test_headers_keys_weights_and_limits_change_without_a_new_instance(process: Process) -> None:
    before, server = process.report("a")["instance"], process.servers["a"]
    (process.folder / "key").write_text("secret")
    await process.reload(
        a=", headers: {X-Team: search}, key_file: key, weight: 0.25, limits: {requests_max: 1}"
    )
    while server.headers[-1:] == [] or server.headers[-1].get("Authorization") != "Bearer secret":
        assert await process.answers("a") == 16  # the key's file is read every second
    assert server.headers[-1]["X-Team"] == "search"
    worker = next(iter(process.group.workers))  # type: ignore[union-attr]
    assert (worker.engine.load().weight, worker.engine.load().batch) == (0.25, 1)
    await process.reload()
    assert (worker.engine.load().weight, worker.engine.load().batch) == (1.0, 0)
    assert await process.answers("a") == 16
    assert "X-Team" not in server.headers[-1] and "Authorization" not in server.headers[-1]
    assert process.report("a")["instance"] == before


async def test_another_url_is_a_drain_and_a_new_instance(process: Process) -> None:
    before, former = process.report("a")["instance"], process.servers["a"]
    process.servers["a"] = await Upstream().start()
    await process.reload()
    await process.eventually(lambda: process.report("a")["instance"] not in ("", before))
    await process.reaches("a", "serving")
    assert await process.answers("a") == 16
    assert former.bodies == []
    await former.stop()


async def test_the_addresses_of_a_name_come_and_go(process: Process) -> None:
    found = ["127.0.0.1"]

    async def resolve(host: str) -> list[str]:
        assert host == "gpus"
        return found

    await process.end()
    process.discover = lambda entry, changed: DnsDiscovery(entry, changed, resolve, every_s=0.02)
    port = process.servers["a"].url.rpartition(":")[2]
    (process.folder / "up.yaml").write_text(
        f"upstreams:\n  - {{name: pool, url: 'http://gpus:{port}', discover: dns}}\n"
    )
    process.stop = Stop()
    await process.start()
    await process.reaches("pool-127-0-0-1", "serving")
    assert await process.answers("pool-127-0-0-1") == 16
    found[:] = ["127.0.0.2"]  # nothing listens there
    await process.reaches("pool-127-0-0-2", "waiting")
    await process.eventually(lambda: process.report("pool-127-0-0-1") is None)
    found.clear()
    await process.eventually(lambda: process.group.report()["discovery"][0]["error"])  # type: ignore[union-attr]
    assert process.report("pool-127-0-0-2") is not None
    assert await process.reload() == ""
    await process.reaches("a", "serving")
    await process.eventually(lambda: process.report("pool-127-0-0-2") is None)


async def test_a_bad_file_changes_nothing_and_says_where(process: Process) -> None:
    before = [process.report(name)["instance"] for name in "abc"]
    why = await process.reload(b=", weight: heavy", a=", weight: 0.5")
    assert why.endswith("up.yaml:3: upstreams[1] (b): weight: expected `float`, got `str`")
    assert process.report("a")["weight"] == 1.0
    (process.folder / "up.yaml").unlink()
    assert "cannot be read" in await process.group.reload()  # type: ignore[union-attr]
    assert [process.report(name)["instance"] for name in "abc"] == before
    assert await process.reload(a=", weight: 0.5") == ""
    assert process.report("a")["weight"] == 0.5


async def test_a_process_that_starts_with_a_bad_file_uses_the_last_good_one(process: Process) -> None:
    await process.end()
    (process.folder / "up.yaml").write_text("upstreams: [")
    process.stop = Stop()
    await process.start()
    for name in "abc":
        await process.reaches(name, "serving")
    assert "up.yaml:1: " in process.group.report()["file"]["error"]  # type: ignore[union-attr]
    assert await process.reload() == ""


async def test_without_a_last_good_file_a_bad_one_ends_the_process(process: Process) -> None:
    await process.end()
    shutil.rmtree(process.folder / "kept")
    (process.folder / "up.yaml").write_text("upstreams: [")
    process.stop = Stop()
    with pytest.raises(BadUpstreams, match=r"up\.yaml:1: "):
        await process.start()


@pytest.mark.slow
async def test_a_failed_server_affects_only_its_own_worker(process: Process) -> None:
    spared = await process.connect("b")
    stream = spared.ask(prompt(), max_tokens=200)
    before = process.report("a")["instance"]
    process.servers["a"].healthy = False
    await process.eventually(lambda: process.report("a")["instance"] not in ("", before))
    assert "/health answers 503" in process.report("a")["last_error"]
    assert len(await spared.answer(stream)) == 200
    assert process.report("b")["instance"] == "life-1"


async def test_a_server_that_hangs_or_floods_does_not_stop_the_others(process: Process) -> None:
    hung, flooding = process.servers["a"], process.servers["b"]
    hung.fault, flooding.fault = "stall", "flood"
    frontends = [await process.connect(name) for name in "ab"]
    for frontend in frontends:
        for _ in range(4):
            frontend.ask(prompt(), max_tokens=100)
    await process.eventually(lambda: hung.streaming == 4 and flooding.comments > 10_000)
    spared = await process.connect("c")
    assert len(await spared.answer(spared.ask(prompt(), max_tokens=200))) == 200
    assert flooding.streaming == 4, "the flood still runs"
    for server, frontend in zip((hung, flooding), frontends, strict=True):
        frontend.transport.close()  # ends its streams
        server.release.set()


async def test_a_bug_in_one_life_ends_neither_the_process_nor_the_others(process: Process) -> None:
    build, broken = process.build, True

    async def breaking(entry: UpstreamEntry, instance: str, *, name_check_s: float) -> UpstreamLife:
        if entry.name == "a" and broken:
            raise ZeroDivisionError
        return await build(entry, instance, name_check_s=name_check_s)  # type: ignore[no-any-return]

    await process.end()
    process.stop, process.build = Stop(), breaking
    await process.start()
    await process.reaches("b", "serving")
    await process.reaches("a", "failed")
    assert process.report("a")["last_error"] == "unexpected error: ZeroDivisionError, see the log"
    broken = False
    await process.reaches("a", "serving")


async def test_an_error_of_the_process_ends_all_workers(process: Process) -> None:
    process.group.fail(RuntimeError("a callback"))  # type: ignore[union-attr]
    async with asyncio.timeout(20):
        assert await process.running == BROKE  # type: ignore[misc]


async def test_an_entry_without_a_tokenizer_says_so(process: Process) -> None:
    settings = WorkerSettings(engine="openai", data=process.folder, upstreams=process.folder / "up.yaml")
    await process.end()
    process.stop, process.build = Stop(), LifeFactory(replace(settings, model=""), None).build
    await process.start()
    await process.reaches("a", "failed")
    assert process.report("a")["last_error"].startswith("a: model: missing; set it in the file of upstreams")
