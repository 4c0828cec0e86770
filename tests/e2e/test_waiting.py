"""A fleet with servers that are not up yet waits, names the missing ones, and serves with the others."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import first_database
import pytest
from fleet import holdfast
from upstream import Upstream
from waits import until

from benchmarks.local_fleet import LocalFleet
from controller.adapters.embedded.free_port import free_port
from events.token_bytes import BUILTIN_FILE


async def asked(fleet: LocalFleet, model: str) -> tuple[int, str, bool]:
    """Request a few tokens; return status, code, and whether there is a Retry-After."""
    body = {"model": model, "prompt": "a", "max_tokens": 2}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{fleet.url}/v1/completions", json=body) as answer,
    ):
        said = await answer.json()
        return answer.status, said.get("error", {}).get("code", ""), "Retry-After" in answer.headers


@asynccontextmanager
async def waiting(data: Path, *flags: str) -> AsyncIterator[LocalFleet]:
    """A fleet that has been started, and need not become ready."""
    first_database.lay_in_fleet(data)
    fleet = LocalFleet.start(data, "--engine", "openai", "--canary-interval", "0.5", *flags)
    try:
        yield fleet
    finally:
        fleet.end()


@pytest.mark.slow
async def test_it_waits_for_its_servers_reports_it_and_serves_with_the_first(tmp_path: Path) -> None:
    tokenizer, key, ports = tmp_path / "tokenizer", tmp_path / "key", (free_port(), free_port())
    tokenizer.mkdir()
    shutil.copy(BUILTIN_FILE, tokenizer / "tokenizer.json")
    key.write_text("sk-planted\n")
    servers = [Upstream(key="sk-planted") for _ in ports]
    upstreams = [f"--upstream=http://127.0.0.1:{port}" for port in ports]
    flags = ("--model", str(tokenizer), "--upstream-key-file", str(key), *upstreams)
    async with waiting(tmp_path / "fleet", *flags) as fleet:
        status = await fleet.until(
            lambda s: len(s["awaited"]) == 2 and s["projector"]["position"] is not None, 60
        )
        assert [one["id"] for one in status["awaited"]] == ["w0", "w1"] and not status["workers"]
        why = f"cannot connect to http://127.0.0.1:{ports[0]} (Connection refused)"
        assert status["awaited"][0]["reason"] == why
        shown = holdfast("status", "--data", str(fleet.data)).stdout
        assert f": {why} " in " ".join(shown.split()) and "has not reported yet" not in shown
        # its port opens a moment later
        said = await until(lambda: asked(fleet, "up"), failing=(aiohttp.ClientConnectionError,))
        assert said == (503, "no_routable_worker", True)
        try:
            await servers[0].start(ports[0])
            await fleet.ready()
            assert await asked(fleet, "up") == (200, "", False)
            await until(lambda: "is ready after" in fleet.log.read_text())
            assert "/v1 with 1 of 2 workers\n" in fleet.log.read_text()
            await servers[1].start(ports[1])
            await fleet.healthy(2)
            assert await asked(fleet, "another") == (404, "model_not_found", False)
            assert fleet.stop() == 0, fleet.last_words()
        finally:
            for server in servers:
                await server.stop()
