"""The embedded servers: they start fast, resume, refuse clearly, and never outlive their parent."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg
import first_database
import nats
import psutil
import pytest

from controller.adapters.embedded import free_port
from controller.adapters.embedded import postgres as embedded_postgres
from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.postgres import start_postgres
from controller.adapters.embedded.server import (
    PORT_TRIES,
    EmbeddedServer,
    PortInUse,
    ServerDirectoryInUse,
    ServerFailed,
    start_on_free_port,
)

pytestmark = pytest.mark.servers
Eventually = Callable[..., Awaitable[None]]


async def test_the_effective_sync_interval_is_read_back(own_nats: EmbeddedServer, tmp_path: Path) -> None:
    assert own_nats.effective["sync_interval"] == "always"
    lazy = await start_nats(tmp_path / "lazy", sync_interval="2m", monitor=0)
    try:
        assert lazy.effective["sync_interval"] == "120s"
    finally:
        await lazy.kill()


async def test_postgres_settings_keep_durability_and_write_only_into_its_directory(
    postgres_server: EmbeddedServer,
) -> None:
    connection = await asyncpg.connect(first_database.urls(postgres_server).reader, timeout=10)
    try:
        names = ("fsync", "full_page_writes", "synchronous_commit", "wal_init_zero")
        assert [await connection.fetchval(f"SHOW {name}") for name in names] == ["on", "on", "on", "off"]
        assert await connection.fetchval("SHOW dynamic_shared_memory_type") == "mmap"  # not in /dev/shm
    finally:
        await connection.close()


async def test_a_second_start_resumes_what_a_killed_server_had_acknowledged(own_nats: EmbeddedServer) -> None:
    client = await nats.connect(own_nats.url, allow_reconnect=False)
    jetstream = client.jetstream()
    await jetstream.add_stream(name="KEPT", subjects=["kept"])
    await jetstream.publish("kept", b"one")
    await client.close()
    await own_nats.kill()
    again = await start_nats(own_nats.directory, port=own_nats.port)
    try:
        assert again.url == own_nats.url
        client = await nats.connect(again.url)
        assert (await client.jetstream().stream_info("KEPT")).state.last_seq == 1
        await client.close()
    finally:
        await again.kill()


async def test_two_servers_never_share_a_directory(
    own_nats: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.adapters.embedded.server.LOCK_WAIT_S", 0.05)
    with pytest.raises(ServerDirectoryInUse, match="another --data"):
        await start_nats(own_nats.directory)


async def test_a_port_in_use_is_one_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for start in (start_nats, start_postgres):
            with pytest.raises(PortInUse, match=f"port {port}.*taken"):
                await start(tmp_path / "server", port=port)


async def test_our_ports_are_outside_the_range_for_outgoing_connections(
    own_nats: EmbeddedServer, postgres_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another process could hold it when the server is started again."""
    assert max(own_nats.port, postgres_server.port) <= free_port.HIGHEST < free_port._kernels_lowest()
    monkeypatch.setattr(free_port, "NAMES_MAX", len(free_port._names) + 4)
    monkeypatch.setattr(free_port, "HIGHEST", free_port.LOWEST + 2)
    found = [free_port.free_port() for _ in range(4)]
    assert len(set(found)) == 4, "the same port twice, before a server listens there"
    assert found[3] > free_port.HIGHEST


@pytest.mark.parametrize("tries", [PORT_TRIES, PORT_TRIES + 1])
async def test_a_free_port_that_is_taken_meanwhile_is_retried(
    nats_server: EmbeddedServer, tries: int
) -> None:
    asked: list[int] = []

    async def start(port: int) -> EmbeddedServer:
        asked.append(port)
        if len(asked) <= tries:
            raise PortInUse("taken")
        return nats_server

    if tries > PORT_TRIES:
        with pytest.raises(PortInUse):
            await start_on_free_port(0, start)
    else:
        assert await start_on_free_port(0, start) is nats_server
    assert len(set(asked)) == PORT_TRIES + 1


async def test_an_unusable_directory_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for start in (start_nats, start_postgres):
        with pytest.raises(ServerFailed, match="cannot be used"):
            await start(tmp_path / "file" / "server")


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match=r"ended with status 1"):
        await start_nats(tmp_path / "nats", sync_interval="whenever")


async def test_postgres_resumes_after_a_kill(tmp_path: Path, postgres_server: EmbeddedServer) -> None:
    directory = tmp_path / "pg"
    first = await start_postgres(directory)
    await first.kill()
    second = await start_postgres(directory)
    try:
        assert second.running
        assert (directory / "data" / "postmaster.pid").read_text().split()[0] == str(second.pid)
    finally:
        await second.stop()
    assert not second.running


def test_postgres_binaries_that_the_user_cannot_reach_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path / "hidden"
    (hidden / "bin").mkdir(parents=True)
    (hidden / "bin" / "postgres").write_text("#!/bin/sh\n")
    hidden.chmod(0o700)
    if os.geteuid() != 0:
        pytest.skip("only root can run postgres as another user: run the tests as root")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    copy = embedded_postgres._readable(hidden, "nobody")
    assert copy != hidden
    assert (copy / "bin" / "postgres").exists()
    assert embedded_postgres._readable(hidden, "nobody") == copy


async def test_a_killed_parent_leaves_no_orphan_and_no_shared_memory(
    tmp_path: Path, eventually: Eventually
) -> None:
    script = f"""
import asyncio, sys
from pathlib import Path
from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.postgres import start_postgres
async def main():
    nats = await start_nats(Path({str(tmp_path)!r}) / "nats")
    postgres = await start_postgres(Path({str(tmp_path)!r}) / "pg")
    print(nats.pid, postgres.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    before = _segments()
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await asyncio.wait_for(parent.stdout.readline(), 30)).split()]
    assert len(pids) == 2
    made = {segment for segment, pid in (_segments() - before) if pid in pids}
    assert made
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    await eventually(lambda: not any(_alive(pid) for pid in pids))
    assert not made & {segment for segment, _ in _segments()}


def _segments() -> set[tuple[int, int]]:
    """Return the segments of System V shared memory with the pid of each creator. Segments of a process killed long ago remain,
    and another process may have its pid by now."""
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return {(int(line.split()[1]), int(line.split()[4])) for line in lines}


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_a_cancelled_start_leaves_no_process_and_the_next_one_succeeds(
    tmp_path: Path, eventually: Eventually
) -> None:
    directory = tmp_path / "pg"
    giving_up = asyncio.create_task(start_postgres(directory))
    await eventually(lambda: any(directory.glob("data.partial*")))
    giving_up.cancel()
    await asyncio.gather(giving_up, return_exceptions=True)
    assert not [p for p in psutil.process_iter() if str(directory) in " ".join(_arguments(p))]
    (directory / "data.partial.1").mkdir(exist_ok=True)  # left by an earlier start
    server = await start_postgres(directory)
    await server.kill()


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
