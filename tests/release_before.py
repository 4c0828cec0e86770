"""A fleet's directory as release 0.1.0 left it: with one superuser without a password."""

import gzip
from pathlib import Path

import asyncpg
import nats
from record import restore

from controller.adapters.embedded import cluster
from controller.adapters.embedded.free_port import free_port
from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.postgres import opened

RELEASE = Path(__file__).parent / "fixtures" / "0.1.0"
OWNER = "holdfast"  # its superuser


async def lay_journal(directory: Path) -> None:
    """Put the recorded journal where the fleet's broker will find it."""
    server = await start_nats(directory)
    client = await nats.connect(server.url)
    await restore(client, (RELEASE / "journal.snapshot").read_bytes())
    await client.close()
    await server.stop()


async def lay_database(directory: Path) -> None:
    """Put the recorded database where the fleet's server will find it, as 0.1.0 made it."""
    port = free_port()
    options = [
        "-A",
        "trust",
        "-E",
        "UTF8",
        "--locale=C",
        "--no-sync",
        "-c",
        "dynamic_shared_memory_type=mmap",
    ]
    server = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories=''"
    async with opened(directory) as place:
        data, log = place.name("data"), place.name("postgres.log")
        made = [place.program("initdb"), "-D", data, "-U", OWNER, *options]
        await cluster.run(made, "initdb", user=place.user, fds=(place.held,))
        (place.directory / "database.holdfast").touch()
        started = [place.program("pg_ctl"), "-D", data, "-l", log, "-o", server, "-w", "start"]
        await cluster.run(started, "pg_ctl", user=place.user, fds=(place.held,))
        try:
            await _fill(f"postgresql://{OWNER}@127.0.0.1:{port}")
        finally:
            stopped = [place.program("pg_ctl"), "-D", data, "-w", "-m", "fast", "stop"]
            await cluster.run(stopped, "pg_ctl", user=place.user, fds=(place.held,))


async def _fill(server: str) -> None:
    connection = await asyncpg.connect(f"{server}/postgres", timeout=10)
    await connection.execute("CREATE DATABASE holdfast")
    await connection.close()
    sql = gzip.decompress((RELEASE / "database.sql.gz").read_bytes()).decode()
    connection = await asyncpg.connect(f"{server}/holdfast", timeout=10)
    await connection.execute("\n".join(line for line in sql.splitlines() if not line.startswith("\\")))
    await connection.close()
