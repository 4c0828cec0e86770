"""What a worker reports of an upstream that is not ready: unreachable, key required, loading.

It never quotes the server's own text.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from certificates import certificate
from waits import until

from controller.adapters.embedded.free_port import free_port
from events.process.key_file import read_key
from workers.engines.engine import EngineDead
from workers.engines.openai.engine import UpstreamWait
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.upstream import Upstream, UpstreamUnavailable

KEY = "sk-planted"


class Gate:
    """A scriptable server, which serves one model if nothing prevents it."""

    def __init__(self) -> None:
        self.url = ""
        self.key = ""
        self.status = 200  # of a completion
        self.models_status = 200

    def refusal(self, request: web.Request, status: int) -> web.Response | None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            status = 401
        said = {"error": {"message": f"no: {request.headers.get('Authorization')}"}}
        return web.json_response(said, status=status) if status != 200 else None

    async def models(self, request: web.Request) -> web.Response:
        listed = web.json_response({"data": [{"id": "llama"}]})
        return self.refusal(request, self.models_status) or listed

    async def complete(self, request: web.Request) -> web.Response:
        answer = web.json_response({"choices": [{"text": "a", "finish_reason": "length"}]})
        return self.refusal(request, self.status) or answer


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    made, app = Gate(), web.Application()
    app.add_routes([web.get("/v1/models", made.models), web.post("/v1/completions", made.complete)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    made.url = f"http://127.0.0.1:{port}"
    yield made
    await runner.cleanup()


async def awaited(settings: UpstreamSettings) -> tuple[str, str]:
    """Return why, and with which model, an upstream is first waited for."""
    upstream = Upstream(settings.url, settings.key, 1)
    patience = UpstreamWait(upstream, settings)
    waiting = asyncio.ensure_future(patience.abilities())
    try:
        await until(lambda: patience.awaits or waiting.done())
        assert patience.awaits is not None
        return patience.awaits
    finally:
        waiting.cancel()
        await upstream.close()


async def test_an_unreachable_upstream_is_reported() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert await awaited(UpstreamSettings(url=url)) == (f"cannot connect to {url} (Connection refused)", "")


async def test_a_password_in_its_url_is_not_shown() -> None:
    port = free_port()
    why, _ = await awaited(UpstreamSettings(url=f"http://ada:pass@127.0.0.1:{port}/v1"))
    assert why == f"cannot connect to http://127.0.0.1:{port} (Connection refused)"


@pytest.mark.parametrize(
    ("key", "why"), [("", "it requires an API key"), ("bad", "it does not accept the API key")]
)
async def test_a_required_key_is_reported(gate: Gate, key: str, why: str) -> None:
    gate.key = KEY
    found = await awaited(UpstreamSettings(url=gate.url, key=key))
    assert found == (f"{gate.url}/v1/models answers 401: {why} (--upstream-key-file)", "")


async def test_a_loading_upstream_is_reported_with_its_model(gate: Gate) -> None:
    gate.status = 503
    why, model = await awaited(UpstreamSettings(url=gate.url, key=KEY))
    assert why == f"{gate.url} is loading or overloaded: /v1/completions answers 503"
    assert model == "llama"


async def test_another_error_is_reported_by_its_status_alone(gate: Gate) -> None:
    gate.status = 500
    why, _ = await awaited(UpstreamSettings(url=gate.url, key=KEY))
    assert why == f"{gate.url}/v1/completions answers 500"


async def test_a_corrected_key_file_needs_no_restart(gate: Gate, tmp_path: Path) -> None:
    gate.key, file = KEY, tmp_path / "key"
    file.write_text("bad\n")
    upstream = Upstream(gate.url, "", 1)
    patience = UpstreamWait(upstream, UpstreamSettings(url=gate.url, key_file=file))
    waiting = asyncio.ensure_future(patience.abilities())
    try:
        await until(lambda: patience.awaits)
        file.write_text(f"{KEY}\n")
        async with asyncio.timeout(20):
            assert (await waiting).model == "llama"
        assert upstream.key == KEY
    finally:
        waiting.cancel()
        await upstream.close()


async def test_after_the_timeout_the_full_error_is_shown_without_the_key(gate: Gate) -> None:
    gate.status = 500
    upstream = Upstream(gate.url, KEY, 1)
    try:
        with pytest.raises(EngineDead, match=r"after 0 s: .*/v1/completions answers 500: no: Bearer \*\*\*"):
            await UpstreamWait(upstream, UpstreamSettings(url=gate.url, key=KEY, start_s=0.0)).abilities()
    finally:
        await upstream.close()


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (None, "cannot be read: No such file"),
        (b" \n", "is empty: it must hold the key"),
        (b"one\ntwo\n", "must hold the key alone, on one line"),
        (b"two words", "must hold the key alone, on one line"),
        ("schlüssel".encode(), "holds no key"),
    ],
)
def test_a_file_without_a_key_is_refused_with_the_reason(
    tmp_path: Path, held: bytes | None, why: str
) -> None:
    file = tmp_path / "key"
    if held is not None:
        file.write_bytes(held)
    with pytest.raises(ValueError, match=f"key {why}"):
        read_key(file)


def test_a_key_is_the_only_line_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"  {KEY}\r\n\n")
    assert read_key(file) == KEY


async def test_an_untrusted_certificate_and_a_port_without_tls_are_reported(tmp_path: Path) -> None:
    """They were once called `Operation not permitted`: such an error has the number of another one."""
    cert, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    runner = web.AppRunner(web.Application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (_, with_tls), (_, without) = runner.addresses
    try:
        for port, why in ((with_tls, "is not trusted: self-signed"), (without, "TLS with https://127.0.0.1")):
            upstream = Upstream(f"https://127.0.0.1:{port}", "", 1)
            with pytest.raises(UpstreamUnavailable, match=why) as raised:
                await upstream.abilities()
            assert "Operation not permitted" not in str(raised.value)
            assert why in (await upstream.healthy(10.0)).trouble
            await upstream.close()
    finally:
        await runner.cleanup()
