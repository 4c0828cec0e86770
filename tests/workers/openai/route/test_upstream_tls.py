"""TLS to an upstream, against real TLS servers: trust, client certificates, names and errors."""

import asyncio
import os
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from certificates import certificate
from upstream import Upstream as Server

from workers.config.upstream_route import UpstreamRoute, UpstreamTls
from workers.engines.openai.route import TlsContext, TlsUnusable
from workers.engines.openai.upstream import Upstream, UpstreamUnavailable


def reached(url: str, **tls: Any) -> Upstream:
    files: dict[str, Any] = {
        name: str(value) if isinstance(value, Path) else value for name, value in tls.items()
    }
    return Upstream(url, "", 4, UpstreamRoute(tls=UpstreamTls(**files)))


async def model_of(upstream: Upstream) -> str:
    try:
        return (await upstream.listed()).model
    finally:
        await upstream.close()


async def why(upstream: Upstream) -> str:
    with pytest.raises(UpstreamUnavailable) as raised:
        await model_of(upstream)
    assert "Operation not permitted" not in str(raised.value)
    return str(raised.value)


@dataclass
class World:
    """A TLS server with a certificate for the name gpu, and one that also requires a client certificate."""

    folder: Path
    ca: Path
    client: tuple[Path, Path]
    url: str
    strict_url: str


def server_context(cert: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Path, Path], tuple[Path, Path]]:
    """Return a folder, the certificate of a server, and that of a client, each with its key."""
    folder = tmp_path_factory.mktemp("certificates")
    return folder, certificate(folder, "gpu"), certificate(folder, "client")


@pytest.fixture
async def world(files: tuple[Path, tuple[Path, Path], tuple[Path, Path]]) -> AsyncIterator[World]:
    folder, own, client = files
    plain = await Server().start(tls=server_context(*own))
    strict = await Server().start(tls=server_context(*own, client[0]))
    yield World(folder, own[0], client, plain.url, strict.url)
    for server in (plain, strict):
        await server.stop()


async def test_a_certificate_of_an_unknown_authority_is_not_trusted(world: World) -> None:
    said = await why(reached(world.url))
    assert f"the certificate of {world.url} is not trusted: self-signed certificate" in said
    assert said.endswith("; set ca_file (or SSL_CERT_FILE)")


async def test_a_named_authority_is_trusted(world: World) -> None:
    assert await model_of(reached(world.url, ca_file=world.ca)) == "up"


async def test_a_certificate_for_another_name_needs_the_name(world: World) -> None:
    url = world.url.replace("127.0.0.1", "localhost")
    assert "Hostname mismatch" in (said := await why(reached(url, ca_file=world.ca)))
    assert said.endswith("; set server_name")
    assert await model_of(reached(url, ca_file=world.ca, server_name="gpu")) == "up"


async def test_verification_is_off_only_if_the_settings_say_so(world: World) -> None:
    assert await model_of(reached(world.url, verify=False)) == "up"


async def test_a_client_certificate_is_presented(world: World) -> None:
    cert, key = world.client
    said = await why(reached(world.strict_url, ca_file=world.ca))
    assert said.endswith("; if it requires a client certificate, set cert_file")
    assert await model_of(reached(world.strict_url, ca_file=world.ca, cert_file=cert, key_file=key)) == "up"
    together = world.folder / "together.pem"
    together.write_bytes(cert.read_bytes() + key.read_bytes())
    assert await model_of(reached(world.strict_url, ca_file=world.ca, cert_file=together)) == "up"


async def test_an_error_names_the_file_that_cannot_be_used(world: World) -> None:
    missing = world.folder / "missing.pem"
    assert f"ca_file {missing} cannot be read: No such file" in await why(reached(world.url, ca_file=missing))
    empty = world.folder / "empty.pem"
    empty.write_text("")
    assert f"ca_file {empty} cannot be used: " in await why(reached(world.url, ca_file=empty))
    other = certificate(world.folder, "other")[1]
    wrong = reached(world.url, ca_file=world.ca, cert_file=world.client[0], key_file=other)
    assert f"cert_file {world.client[0]} cannot be used: KEY_VALUES_MISMATCH" in await why(wrong)


async def test_an_encrypted_private_key_is_an_error_and_no_question(world: World) -> None:
    cert, key = world.client
    secret = world.folder / "secret.key"
    command = ["openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", str(key), "-out", str(secret)]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
    assert await process.wait() == 0
    said = await why(reached(world.url, ca_file=world.ca, cert_file=cert, key_file=secret))
    assert "the private key is encrypted; remove its passphrase" in said


async def test_a_server_without_tls_is_named(world: World) -> None:
    plain = await Server().start()
    url = plain.url.replace("http:", "https:")
    assert f"TLS with {url} failed: " in await why(reached(url))
    await plain.stop()


async def test_the_health_check_says_the_same(world: World) -> None:
    upstream = reached(world.url)
    assert "is not trusted" in (await upstream.healthy(5.0)).trouble
    await upstream.close()


def test_a_renewed_file_is_used_and_a_broken_one_is_not(
    tmp_path: Path,
) -> None:
    file = tmp_path / "ca.pem"
    context = TlsContext(UpstreamTls(ca_file=str(file)), look_s=0.0)
    with pytest.raises(TlsUnusable, match="cannot be read"):
        context.current()
    first, second = (certificate(tmp_path, name)[0] for name in ("one", "two"))
    file.write_bytes(first.read_bytes())
    before = context.current()
    assert context.current() is before
    file.write_text("broken")
    assert context.current() is before
    file.write_bytes(second.read_bytes())
    os.utime(file, ns=(1, 1))
    assert context.current() is not before
    (one,) = context.current().get_ca_certs()
    assert (("commonName", "two"),) in one["subject"]


def test_upstreams_with_equal_files_share_a_context(tmp_path: Path) -> None:
    ca = certificate(tmp_path)[0]
    one, two = (TlsContext(UpstreamTls(ca_file=str(ca), server_name=name)) for name in ("a", "b"))
    assert one.current() is two.current()


async def test_the_route_changes_between_two_requests(world: World) -> None:
    upstream = reached(world.url)
    with pytest.raises(UpstreamUnavailable):
        await upstream.listed()
    upstream.route.use(UpstreamRoute(tls=UpstreamTls(ca_file=str(world.ca))))
    assert (await upstream.listed()).model == "up"
    await upstream.close()


async def test_requests_go_through_the_proxy() -> None:
    server, heard = await Server().start(), asyncio.Queue[bytes]()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.put_nowait(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    listener = await asyncio.start_server(proxy, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    upstream = Upstream(server.url, "", 4, UpstreamRoute(proxy=f"http://127.0.0.1:{port}"))
    with pytest.raises(UpstreamUnavailable, match="answers 407"):
        await upstream.listed()
    assert heard.get_nowait().startswith(f"GET {server.url}/v1/models ".encode())
    upstream.route.use(UpstreamRoute(proxy="http://127.0.0.1:1"))
    with pytest.raises(UpstreamUnavailable, match="its proxy cannot be reached"):
        await upstream.listed()
    await upstream.close()
    listener.close()
    await listener.wait_closed()
    await server.stop()
