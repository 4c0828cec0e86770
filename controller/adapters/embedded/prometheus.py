"""Starts a Prometheus server for a fleet: the installed one, or the one from `make prometheus`."""

import shutil
import socket
from functools import partial
from pathlib import Path

from controller.adapters.embedded.server import (
    EmbeddedServer,
    ServerFailed,
    check_port,
    directory_errors,
    spawn,
    start_on_free_port,
    wait_until_ready,
)

ROOT = Path(__file__).parents[3]
UNPACKED = ROOT / ".prometheus" / "usr" / "bin" / "prometheus"
RULES = ROOT / "grafana" / "alerts" / "holdfast.rules.yaml"  # only in a checkout, not in a wheel
KEEPS = ("--storage.tsdb.retention.time=7d", "--storage.tsdb.retention.size=1GB")
LOOPBACK = "127.0.0.1"


def prometheus_binary() -> Path:
    """Return the path of the Prometheus program. Raise ServerFailed if it is not installed."""
    found = shutil.which("prometheus") or (str(UNPACKED) if UNPACKED.exists() else None)
    if found is None:
        raise ServerFailed(
            "Prometheus is not installed: put `prometheus` into the PATH, or unpack Debian's package with `make prometheus`"
        )
    return Path(found)


def alert_rules() -> tuple[Path, ...]:
    """Return the files of alert rules. The result is empty if Holdfast was installed from a wheel, which has no rules."""
    return (RULES,) if RULES.exists() else ()


async def start_prometheus(directory: Path, config: str, *, port: int = 0) -> EmbeddedServer:
    """Start Prometheus in `directory` with the configuration `config`, and return once it accepts connections.

    `port` 0 selects a free port. Raise PortInUse or ServerDirectoryInUse if `port` or `directory` is in use, and
    ServerFailed if the server does not start.
    """
    return await start_on_free_port(port, partial(_start, directory, config))


async def _start(directory: Path, config: str, port: int) -> EmbeddedServer:
    program = prometheus_binary()
    check_port(port, "prometheus")
    written, log = directory.resolve() / "prometheus.yml", directory / "prometheus.log"
    with directory_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        written.write_text(config)
        process = await spawn(
            [
                str(program), f"--config.file={written}", f"--storage.tsdb.path={directory.resolve() / 'data'}",
                f"--web.listen-address={LOOPBACK}:{port}", "--log.level=warn", *KEEPS,
            ],
            directory,
            log,
        )  # fmt: skip
    await wait_until_ready(lambda: _listens(port), process, log, "prometheus")
    return EmbeddedServer("prometheus", f"http://{LOOPBACK}:{port}", port, directory, log, process)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0
