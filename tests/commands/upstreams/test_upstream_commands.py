"""`holdfast upstream` and `holdfast reload` against a real worker process and local servers."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from upstream import Upstream

from controller.cli import main
from events.process import presence
from events.token_bytes import BUILTIN_FILE


@dataclass
class World:
    """A worker process with a file of two upstreams, and a third server."""

    data: Path
    file: Path
    servers: list[Upstream]

    async def run(self, command: str, *words: str) -> int:
        return await asyncio.to_thread(main, [command, *words, "--data", str(self.data)])


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    shutil.copy(BUILTIN_FILE, tmp_path / "tokenizer.json")
    servers = [await Upstream().start() for _ in range(3)]
    file, data = tmp_path / "up.yaml", tmp_path / "data"
    listed = "".join(f"  - {{name: g{n}, url: '{servers[n].url}'}}\n" for n in range(2))
    file.write_text(f"upstreams:\n{listed}")
    command = [
        sys.executable,
        "-m",
        "controller.cli",
        "worker",
        "--upstreams",
        str(file),
        "--model",
        str(tmp_path),
    ]
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, "--data", str(data), stdout=log, stderr=log)
    try:
        async with asyncio.timeout(30):
            while not presence.present(data):
                assert process.returncode is None, (tmp_path / "log").read_text()
                await asyncio.sleep(0.05)
        yield World(data, file, servers)
        process.terminate()
        async with asyncio.timeout(20):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for server in servers:
            await server.stop()


async def listed(world: World, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert await world.run("upstream", "list", "-o", "json") == 0
    (report,) = json.loads(capsys.readouterr().out)
    return {one["name"]: one for one in report["upstreams"]}


async def test_upstreams_come_and_go(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        await world.run("upstream", "add", "g2", world.servers[2].url, "--weight", "0.5", "--zone", "z1") == 0
    )
    assert capsys.readouterr().out == "g2 serves\n"
    found = await listed(world, capsys)
    assert [(name, one["state"]) for name, one in found.items()] == [(f"g{n}", "serving") for n in range(3)]
    assert (found["g2"]["weight"], found["g2"]["zone"], found["g2"]["model"]) == (0.5, "z1", "up")
    assert await world.run("upstream", "pause", "g0") == 0
    assert (await listed(world, capsys))["g0"]["state"] == "paused"
    assert await world.run("upstream", "resume", "g0") == 0
    assert (await listed(world, capsys))["g0"]["state"] == "serving"
    assert await world.run("upstream", "remove", "g1") == 0
    assert [*await listed(world, capsys)] == ["g0", "g2"]
    assert await world.run("upstream", "list") == 0
    head, row, _ = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "state", "since", "requests", "model", "weight", "zone", "url"]
    assert row.split()[:2] == ["g0", "serving"]


async def test_an_upstream_that_does_not_answer_stays_in_the_file_and_says_why(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await world.run("upstream", "add", "gone", "http://127.0.0.1:1", "--within", "3") == 1
    assert (
        "gone is waiting: cannot connect to http://127.0.0.1:1 (Connection refused)"
        in capsys.readouterr().err
    )
    assert "gone" in world.file.read_text()
    assert (await listed(world, capsys))["gone"]["state"] == "waiting"


async def test_an_invalid_entry_is_refused_and_the_file_stays(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    before = world.file.read_text()
    assert await world.run("upstream", "add", "g2", "gpu2:8000") == 1
    assert "upstreams[2] (g2): url: expected a URL" in capsys.readouterr().err
    assert await world.run("upstream", "remove", "g9") == 2
    assert world.file.read_text() == before


async def test_a_reload_says_what_changed_or_where_the_file_is_wrong(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    presence.announce(world.data, "controller", "c1", "", os.getpid())
    assert await world.run("reload") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{world.file}: unchanged",
        "not reloaded: c1; they read their settings when they start, and key files at once",
    ]
    good = world.file.read_text()
    world.file.write_text(f"{good}  - {{name: g2, url: 7}}\n")
    assert await world.run("reload") == 1
    assert "up.yaml:4: upstreams[2] (g2): url: expected `str`" in capsys.readouterr().out
    assert [*await listed(world, capsys)] == ["g0", "g1"]
    world.file.write_text(good)
    assert await world.run("reload") == 0


def test_without_a_process_the_commands_say_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["upstream", "list", "--data", str(tmp_path)]) == 1
    assert "Start one with `holdfast up --upstreams FILE`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("upstreams: [", "up.yaml:1: "),
        ("upstreams:\n  - {name: a}\n", "up.yaml:2: upstreams[0] (a): url: missing"),
    ],
)
async def test_a_process_with_a_bad_file_ends_with_the_reason(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "up.yaml"
    file.write_text(text)
    command = [
        sys.executable,
        "-m",
        "controller.cli",
        "worker",
        "--upstreams",
        str(file),
        "--data",
        str(tmp_path / "d"),
    ]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(30):
        _, said = await process.communicate()
    assert process.returncode == 1
    assert why in said.decode().splitlines()[-1]
    assert b"Traceback" not in said
