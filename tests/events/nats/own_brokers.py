"""Brokers as operators run them: each configured by its test."""

import asyncio
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from controller.adapters.embedded.free_port import free_port
from controller.adapters.embedded.server import spawn
from controller.adapters.embedded.servers import nats_binary

Start = Callable[[str], Awaitable["Broker"]]


class Broker:
    """One nats-server without JetStream, configured by the test."""

    def __init__(self, port: int, process: "subprocess.Popen[bytes]") -> None:
        self.port, self.process = port, process

    def url(self, account: str = "", scheme: str = "nats") -> str:
        return f"{scheme}://{account}{'@' if account else ''}127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """`await start(config)` starts a broker."""
    started: list[Broker] = []

    async def begin(config: str) -> Broker:
        port, directory = free_port(), tmp_path / f"broker{len(started)}"
        directory.mkdir()
        (directory / "nats.conf").write_text(f'listen: "127.0.0.1:{port}"\n{config}\n')
        command = [str(nats_binary()), "-c", str(directory / "nats.conf")]
        started.append(Broker(port, await spawn(command, directory, directory / "log")))
        async with asyncio.timeout(20):
            while "Server is ready" not in (directory / "log").read_text():  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.02)
        return started[-1]

    yield begin
    for broker in started:
        broker.kill()


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The configuration of a broker with a certificate of an authority that this process trusts."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl, to make certificates with: install it")
    (folder := tmp_path / "authority").mkdir()
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    make = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", *make, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    yield f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}'
