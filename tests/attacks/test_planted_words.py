"""No file that a fleet writes contains users' texts or secrets.

They are planted first; then every byte that the fleet has written is searched.
"""

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import first_database
from aiohttp import web
from fleet import files_holding, holdfast, running
from store_databases import execute
from upstream import Upstream
from waits import until

from benchmarks.local_fleet import LocalFleet
from controller.adapters.embedded.free_port import free_port
from controller.adapters.embedded.nats import nats_binary
from controller.adapters.embedded.postgres import start_postgres
from controller.adapters.embedded.server import die_with
from events.token_bytes import BUILTIN_FILE

WORDS = "Zitronenfalter-und-Pfauenauge"
KEY = f"sk-{secrets.token_hex(16)}"  # of the upstream
BROKER = secrets.token_hex(16)  # the broker's password
BEARER = secrets.token_hex(16)  # the client's own
FAULTS = ("says_400", "says_500", "says_401", "says_in_stream", "says_no_json", "cut")
FLAGS = ("--engine", "openai", "--canary-interval", "0.3", "--breaker-wait", "0.3", "--breaker-backoff", "1")
TABLES = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'holdfast'"


class Echoing(Upstream):
    """An upstream with errors that quote the request, as some servers' do."""

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        if not self.fault.startswith("says_"):
            return await super()._completions(request)
        said = f"cannot read {WORDS!r}; the key was {KEY}"
        if self.fault in ("says_400", "says_500", "says_401"):
            body = {"error": {"message": said, "type": "x", "param": WORDS, "code": int(self.fault[5:])}}
            return web.json_response(body, status=int(self.fault[5:]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        lines = {"says_in_stream": f'{{"error": {{"message": "{said}", "code": 500}}}}', "says_no_json": said}
        await response.write(f"data: {lines[self.fault]}\n\n".encode())
        return response


def requests() -> Iterator[tuple[str, Any]]:
    """Yield (path, body): good requests, and every client error."""
    chat = "/v1/chat/completions"
    told = {"model": "up", "max_tokens": 8, "temperature": 0}
    yield "/v1/completions", {**told, "prompt": WORDS, "stop": [WORDS], "user": WORDS, "stream": True}
    yield (
        chat,
        {**told, "messages": [{"role": "system", "content": WORDS}, {"role": "user", "content": WORDS}]},
    )
    yield "/v1/completions", {**told, "prompt": WORDS, "cache_salt": WORDS}
    yield "/v1/completions", {**told, "prompt": WORDS * 5000}
    yield "/v1/completions", {**told, "prompt": WORDS, WORDS: WORDS}
    yield "/v1/completions", {**told, "prompt": {WORDS: 1}}
    yield "/v1/completions", {**told, "prompt": WORDS + "\ud800"}
    yield "/v1/completions", {**told, "prompt": WORDS, "model": WORDS}
    yield "/v1/completions", {**told, "prompt": WORDS, "temperature": WORDS}
    yield chat, {**told, "messages": [{"role": WORDS, "content": [{"type": WORDS}]}]}
    yield chat, {**told, "messages": WORDS, "tools": [{"type": "function", "function": {"name": WORDS}}]}
    yield f"/v1/{WORDS}?{WORDS}", {}
    yield f"/v1/models/{WORDS}", None
    yield "/v1/completions", f'{{"prompt": "{WORDS}'.encode()
    yield "/v1/completions", WORDS.encode("utf-16")


async def ask(session: aiohttp.ClientSession, url: str, path: str, body: Any) -> int:
    """Send one request, with the client's own secret, and read the answer to its end."""
    headers = {"Authorization": f"Bearer {BEARER}", "X-Note": WORDS, "Content-Type": "application/json"}
    given = {"data": body} if isinstance(body, bytes) else {"json": body}
    try:
        if body is None:
            async with session.get(url + path, headers=headers) as answer:
                await answer.read()
                return answer.status
        async with session.post(url + path, headers=headers, **given) as answer:
            await answer.read()
            return answer.status
    except aiohttp.ClientError:
        return 0


@contextmanager
def broker(directory: Path) -> Iterator[str]:
    """A broker with a password, as an operator's own may have."""
    port = free_port()
    command = [str(nats_binary()), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(directory)]
    command += ["--user", "holdfast", "--pass", BROKER, "-l", str(directory / "nats.log")]
    directory.mkdir()
    process = subprocess.Popen(command, preexec_fn=die_with(os.getpid()))
    try:
        yield f"nats://holdfast:{BROKER}@127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def holds(place: Path, words: str) -> list[str]:
    """Return the files below a folder that contain some text, except those that store passwords."""
    kept = ("accounts.json", "secrets/postgres.json")
    return [name for name in files_holding(place, words) if name not in kept]


async def plant(fleet: LocalFleet, servers: tuple[Upstream, Upstream]) -> None:
    """Send every request while all is well, and some of them during every fault; kill a worker meanwhile."""
    asked = list(requests())
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        statuses = [await ask(session, fleet.url, path, body) for path, body in asked]
        assert statuses[:3] == [200] * 3 and {400, 404} <= set(statuses), statuses
        for fault in FAULTS:
            servers[0].fault = fault
            await asyncio.gather(*(ask(session, fleet.url, path, body) for path, body in asked[:3]))
        servers[0].fault = ""
        status = await fleet.status()
        servers[1].token_s = 0.05
        streams = [asyncio.ensure_future(ask(session, fleet.url, *asked[0])) for _ in range(8)]
        await until(lambda: servers[1].streaming)  # and none has ended
        os.kill(status["workers"][1]["pid"], signal.SIGKILL)
        await asyncio.gather(*streams)
    assert holdfast("replay", "timeline", "--all", "--data", str(fleet.data)).returncode == 0


async def test_no_file_of_a_fleet_contains_users_texts_or_a_secret(tmp_path: Path, databases: None) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(BUILTIN_FILE, tmp_path / "model" / "tokenizer.json")
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(template))
    servers = await Echoing().start(), await Echoing().start()
    postgres = await start_postgres(first_database.lay(tmp_path / "postgres"))
    url = first_database.urls(postgres).owner
    flags = [*FLAGS, "--model", str(tmp_path / "model")]
    flags += [flag for server in servers for flag in ("--upstream", server.url)]
    data = tmp_path / "fleet"
    try:
        with broker(tmp_path / "broker") as nats_url:
            environment = {"HOLDFAST_NATS_URL": nats_url, "HOLDFAST_DATABASE_URL": url}
            environment["HOLDFAST_WORKER_UPSTREAM_KEY"] = KEY
            async with running(data, *flags, environment=environment, stops=True) as fleet:
                await fleet.healthy(2)
                await plant(fleet, servers)
                await fleet.until(lambda s: s["projector"]["lag"] == 0)
        tables = [row[0] for row in await execute(url, TABLES)]
        rows = [str(await execute(url, f"SELECT t::text FROM holdfast.{table} t")) for table in tables]
    finally:
        await postgres.stop()
        for server in servers:
            await server.stop()
    password = url.split(":")[2].split("@")[0]
    assert holds(data, "worker_joined") or holds(tmp_path / "broker", "worker_joined"), (
        "the search finds nothing"
    )
    assert any("worker_joined" in text for text in rows)
    for planted in (WORDS, KEY, BROKER, BEARER, password):
        assert (holds(data, planted), holds(tmp_path / "broker", planted)) == ([], []), planted
        assert [text for text in rows if planted in text] == []
        assert holds(tmp_path / "postgres", planted) == []
