"""deploy/observability/compose.yaml is valid, pins image versions, and its services work together.

No docker is used. Each service with a program in this project runs as the file describes, with its arguments, environment and
mounted files: NATS, Postgres, Holdfast (from exactly what the Dockerfile copies) and Prometheus. Host names become 127.0.0.1,
ports become free ones, and container folders become folders of the test. The images themselves and Grafana are not tested.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import first_database
import pytest
import yaml
from prometheus_server import PrometheusServer, binary
from waits import block_until

from controller.adapters.embedded.free_port import free_port
from controller.adapters.embedded.nats import nats_binary
from controller.adapters.embedded.postgres import start_postgres
from controller.adapters.embedded.server import die_with

ROOT = Path(__file__).parents[2]
HERE = ROOT / "deploy" / "observability"
FILE = HERE / "compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (HERE / "Dockerfile").read_text()
PORTS = ("4222", "5432", "8000", "9090", "9100")
ROLES = {"controller", "projector", "planner", "frontend", "worker"}
WITHIN_S = 60.0


def valid(text: str) -> bool:
    """Return whether a text is valid by the compose specification's own schema."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec",
               "--default-filetype", "yaml", "-"]  # fmt: skip
    return subprocess.run(command, input=text, text=True, capture_output=True, timeout=60).returncode == 0


def test_the_file_is_a_valid_compose_file() -> None:
    assert valid(FILE.read_text())
    assert not valid(FILE.read_text().replace("command:", "comand:", 1)), "the schema would accept anything"


def test_every_image_is_pinned_to_a_version() -> None:
    images = {service["image"] for service in SERVICES.values()} | {
        *re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    }
    assert len(images) == 6
    for image in images:
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+[\w.-]*", image), image


def test_mounted_paths_exist_and_every_volume_is_declared() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (HERE / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], (
                volume
            )


def test_the_image_has_every_package() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"][
        "include"
    ]
    copied = {words.split()[0] for words in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE)}
    assert {name.rstrip("*") for name in packages} <= copied


def test_ports_are_published_on_this_host_only() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


def test_grafana_gets_the_variables_that_its_provisioning_uses() -> None:
    used = set[str]()
    for file in (ROOT / "grafana" / "provisioning" / "datasources").iterdir():
        used |= {*re.findall(r"\$(HOLDFAST_\w+)", file.read_text())}
    grafana = SERVICES["grafana"]
    assert used == grafana["environment"].keys()
    (dashboards,) = [one for one in grafana["volumes"] if "grafana/dashboards:" in one]
    assert (
        f"path: {dashboards.split(':')[1]}"
        in (ROOT / "grafana/provisioning/dashboards/holdfast.yaml").read_text()
    )


@dataclass
class Services:
    """The services as they run in this test."""

    folder: Path
    ports: dict[str, int] = field(default_factory=lambda: {port: free_port() for port in PORTS})
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def here(self, text: str, paths: Mapping[str, str] | None = None) -> str:
        """Return text of the file, adapted to this host."""
        text = re.sub(rf"(?<=[/@])({'|'.join(SERVICES)})(?=:\d)", "127.0.0.1", text)
        text = text.replace("0.0.0.0", "127.0.0.1")
        if paths:
            longest = "|".join(sorted(map(re.escape, paths), key=len, reverse=True))
            text = re.sub(rf"(?<![\w.])({longest})", lambda found: paths[found[1]], text)
        return re.sub(rf"(?<!\d)({'|'.join(PORTS)})(?!\d)", lambda found: str(self.ports[found[1]]), text)

    def mounted(self, name: str) -> dict[str, str]:
        """Return the local paths of a service's mounts."""
        found = {}
        for volume in SERVICES[name].get("volumes", ()):
            source, path = volume.split(":")[:2]
            place = (HERE / source).resolve() if source.startswith(".") else self.folder / source
            if not source.startswith("."):
                place.mkdir(0o700, exist_ok=True)
            found[path] = str(place)
        return found

    def start(
        self,
        name: str,
        program: list[str],
        *more: str,
        paths: Mapping[str, str] | None = None,
        **environment: str,
    ) -> None:
        """Start a service's program with the arguments from the file, and `more`. `paths` overrides local paths of mounts."""
        mounted = {**self.mounted(name), **(paths or {})}
        words = [self.here(word, mounted) for word in SERVICES[name]["command"]]
        own = {key: self.here(value) for key, value in SERVICES[name].get("environment", {}).items()}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [*program, *words, *more], stdout=log, stderr=log, cwd=self.folder, preexec_fn=die_with(os.getpid()),
                    env={**os.environ, **own, **environment},
                )
            )  # fmt: skip

    def until(self, answers: Any, what: str) -> None:
        """Wait for a condition."""

        def holds() -> object:
            assert all(one.poll() is None for one in self.processes), f"{what}\n{self._output()}"
            with contextlib.suppress(OSError, ValueError):
                return answers()
            return None

        try:
            block_until(holds, WITHIN_S, what, every_s=0.2)
        except pytest.fail.Exception as error:
            raise AssertionError(f"{error}\n{self._output()}") from None

    def _output(self) -> str:
        return "\n".join(log.read_text()[-800:] for log in self.folder.glob("*.log"))


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Services]:
    services = Services(folder)
    try:
        yield services
    finally:
        for process in reversed(services.processes):
            process.kill()
            process.wait()


def copied(folder: Path) -> Path:
    """Return a folder with the files that the Dockerfile copies."""
    (source := folder / "src").mkdir()
    for words in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE):
        *names, _ = words.split()
        for name in names:
            whole = (ROOT / name).is_dir()
            (shutil.copytree if whole else shutil.copy)(ROOT / name, source / name)
    return source


def got(url: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode() if body else None, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


async def as_the_image_does(url: str, given: Mapping[str, str]) -> None:
    """Create the superuser that the image's entry point creates, and its database."""
    user, name = given["POSTGRES_USER"], given["POSTGRES_DB"]
    connection = await asyncpg.connect(url)
    try:
        if not await connection.fetchval("SELECT 1 FROM pg_roles WHERE rolname = $1", user):
            await connection.execute(f"CREATE ROLE {user}")
        await connection.execute(f"ALTER ROLE {user} SUPERUSER LOGIN PASSWORD '{given['POSTGRES_PASSWORD']}'")
        await connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        await connection.execute(f"CREATE DATABASE {name} OWNER {user}")
    finally:
        await connection.close()


@pytest.mark.attack
async def test_the_services_serve_requests_and_are_scraped(tmp_path: Path, databases: None) -> None:
    prometheus = binary()
    assert re.search(r'^ENTRYPOINT \["holdfast"\]$', DOCKERFILE, re.MULTILINE)
    with running(tmp_path) as services:
        ports = services.ports
        database = await start_postgres(first_database.lay(tmp_path / "postgres"), port=ports["5432"])
        await as_the_image_does(
            first_database.tester_url(database, "postgres"), SERVICES["postgres"]["environment"]
        )
        try:
            services.start("nats", [str(nats_binary())], "--port", str(ports["4222"]), "--addr", "127.0.0.1")
            holdfast = [sys.executable, "-m", "controller.cli"]
            (data,) = services.mounted("holdfast").values()
            services.start("holdfast", holdfast, PYTHONPATH=str(copied(tmp_path)), HOLDFAST_DATA=data)
            api = f"http://127.0.0.1:{ports['8000']}"
            services.until(lambda: got(f"{api}/health"), "the fleet is not ready")
            config = (HERE / "prometheus.yml").read_text()
            (written := tmp_path / "prometheus.yml").write_text(
                services.here(config, services.mounted("prometheus"))
            )
            services.start("prometheus", [prometheus], paths={"/etc/prometheus/prometheus.yml": str(written)})
            server = PrometheusServer(f"http://127.0.0.1:{ports['9090']}")
            services.until(
                lambda: {one["metric"]["role"] for one in server.ask("up == 1")} == ROLES,
                "not all processes are scraped",
            )
            answer = got(f"{api}/v1/completions", {"model": "sim", "prompt": "one two", "max_tokens": 8})
            assert answer["usage"]["completion_tokens"] == 8
            rules = got(f"{server.url}/api/v1/rules")["data"]["groups"]
            assert {group["name"] for group in rules} == {"holdfast", "holdfast.recorded"}
            services.until(
                lambda: server.ask("holdfast_projector_position > 0"), "the state store receives no events"
            )
        finally:
            await database.stop()
