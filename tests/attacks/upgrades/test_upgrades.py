"""A fleet of release 0.2.0 is upgraded to this release and rolled back under load.

That happens process by process, in four orders.

Failures are: an HTTP status of 503 from a frontend that is in rotation; a stream that does not end with `[DONE]`; a text that
differs from the undisturbed one. A frontend is out of rotation from its SIGTERM until its `/ready` answers 200 again. That is
what a load balancer with health checks does, and the only time at which a client uses the other one instead.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import nats
import pytest
from waits import until

from controller.adapters.embedded.free_port import free_port
from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.postgres import migrate
from events import subjects
from events.nats.bus import NatsBus
from events.versions import BASE_KINDS

ROOT = Path(__file__).parents[3]
RELEASE = "c7fb7d16"  # the commit of 0.2.0
RUN = "import sys; from controller.cli import main; sys.exit(main())"
USERS = 6
TOKENS = 40
READY_S = 90.0  # for one process, on a machine that is busy
STOP_S = 45.0
PARTS = ("controller", "projector", "f0", "f1", "w0", "w1")
ORDERS = {
    "controllers first": ("controller", "projector", "f0", "f1", "w0", "w1"),
    "frontends first": ("f0", "f1", "w0", "w1", "controller", "projector"),
    "workers first": ("w0", "w1", "controller", "f0", "f1", "projector"),
    "projector first": ("projector", "w0", "f0", "controller", "w1", "f1"),
}
pytestmark = [pytest.mark.attack, pytest.mark.servers]


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of release 0.2.0, from this repository's history."""
    tree = tmp_path_factory.mktemp("release") / "0.2.0"
    tree.mkdir()
    subprocess.run(["tar", "x", "-C", str(tree)], input=archived(ROOT), check=True)
    return tree


def git(clone: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(clone), *words], capture_output=True)


def archived(clone: Path) -> bytes:
    """Return release 0.2.0 as a tar file. Only a shallow clone may lack its commit: there the tests are skipped."""
    found = git(clone, "archive", RELEASE)
    if found.returncode == 0:
        return found.stdout
    lacking = f"this clone lacks the commit of 0.2.0 ({RELEASE})"
    if git(clone, "rev-parse", "--is-shallow-repository").stdout.strip() == b"true":
        pytest.skip(f"{lacking} because it is shallow: `git fetch --unshallow` fetches it")
    pytest.fail(f"{lacking}: {found.stderr.decode().strip()}")


def test_only_a_shallow_clone_may_lack_the_release(tmp_path: Path) -> None:
    """Elsewhere the upgrade tests would be skipped silently."""
    whole, shallow = tmp_path / "whole", tmp_path / "shallow"
    subprocess.run(["git", "init", "-q", str(whole)], check=True)
    for n in range(2):
        author = ("-c", "user.name=n", "-c", "user.email=n@localhost")
        assert git(whole, *author, "commit", "-q", "--allow-empty", "-m", str(n)).returncode == 0
    assert git(tmp_path, "clone", "-q", "--depth", "1", f"file://{whole}", str(shallow)).returncode == 0
    with pytest.raises(pytest.fail.Exception, match="lacks the commit"):
        archived(whole)
    with pytest.raises(pytest.skip.Exception, match="git fetch --unshallow"):
        archived(shallow)


class MixedFleet:
    """Processes of two releases on one broker and one database."""

    def __init__(self, folder: Path, nats_url: str, database_url: str, release: Path) -> None:
        self.trees = {"old": release, "new": ROOT}
        self.runs: dict[str, str] = {}  # the release that each part runs
        self.ports = {name: free_port() for name in ("f0", "f1")}
        self.rotation: set[str] = set()
        self._folder, self.nats_url, self._database = folder, nats_url, database_url
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lives: Counter[str] = Counter()

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _command(self, name: str) -> list[str]:
        data = ["--data", str(self._folder / "data")]
        match name[0]:
            case "c":
                return ["controller", *data]
            case "p":
                return ["projector", *data]
            case "f":
                return [
                    "frontend",
                    *data,
                    "--name",
                    name,
                    "--port",
                    str(self.ports[name]),
                    "--host",
                    "127.0.0.1",
                ]
            case _:
                return ["worker", *data, "--name", name, "--itl-ms", "10"]

    async def start(self, name: str, version: str) -> None:
        """Start one part and return once it serves."""
        tree = self.trees[version]
        self._lives[name] += 1
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")},
            "PYTHONPATH": str(tree),
            "HOLDFAST_NATS_URL": self.nats_url,
            "HOLDFAST_CONTROLLER__CANARY__INTERVAL_S": "2",
        }
        if name[0] != "w":
            environment["HOLDFAST_DATABASE_URL"] = self._database
        with self.log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(  # noqa: ASYNC220 (it returns at once)
                [sys.executable, "-c", RUN, *self._command(name)],
                cwd=self._folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.runs[name] = version

    async def ready(self, *names: str) -> None:
        """Wait until these parts serve. Frontends are put in rotation."""
        for name in names:
            await until(partial(self._lives_and_serves, name), READY_S, f"{name} serves", every_s=0.1)
            if name in self.ports:
                self.rotation.add(name)

    async def _lives_and_serves(self, name: str) -> bool:
        process = self._processes[name]
        assert process.poll() is None, f"{name} ended with {process.returncode}:\n{self.tail(name)}"
        return await self._serves(name)

    def tail(self, name: str) -> str:
        return self.log(name).read_text()[-3000:]

    async def _serves(self, name: str) -> bool:
        if name in self.ports:
            try:
                async with (
                    aiohttp.ClientSession() as session,
                    session.get(f"http://127.0.0.1:{self.ports[name]}/v1/models") as answer,
                ):
                    return bool((await answer.json())["data"])
            except (aiohttp.ClientError, OSError, KeyError, ValueError):
                return False
        status = await self.status()
        if name == "controller":
            return bool(status)
        if name == "projector":
            return "projector_ready" in self.tail(name) or (self._folder / "data").exists()
        for worker in status.get("workers", ()):
            if worker["id"] == name:
                life = worker.get("pid") in (None, self._processes[name].pid)
                return life and worker["health"] == "HEALTHY" and worker["weight"] == 1
        return False

    async def status(self) -> dict[str, Any]:
        """Return the status of the leading controller; empty while there is none."""
        bus = await NatsBus.connect(self.nats_url, "test")
        try:
            return dict(await bus.request("control.status", {}, 3.0))
        except Exception:
            return {}
        finally:
            await bus.close()

    async def stop(self, name: str) -> None:
        """Stop one part gracefully."""
        self.rotation.discard(name)
        if name in self.ports:
            await asyncio.sleep(0.3)  # for requests that the client has sent already
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        await until(lambda: process.poll() is not None, STOP_S)

    async def replace(self, name: str, version: str) -> None:
        """Replace a part by another release of it."""
        if name == "projector" and version == "old":
            await self.stop(name)
            await migrate.take_back(self._database, "0001")  # as docs/operations/upgrade.md says
        else:
            await self.stop(name)
        await self.start(name, version)
        await self.ready(name)

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


class Load:
    """Users that compare each answer with the undisturbed one."""

    def __init__(self, fleet: MixedFleet) -> None:
        self.fleet = fleet
        self.seen: Counter[str] = Counter()
        self.faults: list[str] = []
        self._right: dict[int, str] = {}
        self._ends = asyncio.Event()

    async def ask(self, session: aiohttp.ClientSession, frontend: str, number: int) -> str:
        body = {
            "model": "sim",
            "prompt": f"{number} of the upgrade " * 8,
            "max_tokens": TOKENS,
            "stream": True,
            "seed": 7,
        }
        url = f"http://127.0.0.1:{self.fleet.ports[frontend]}/v1/completions"
        async with session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=60)) as answer:
            text = await answer.text()
            self.seen[str(answer.status)] += 1
            if answer.status != 200:
                raise AssertionError(f"{answer.status} from {frontend}: {text[:200]}")
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        if not events or events[-1] != "[DONE]":
            raise AssertionError(f"a stream from {frontend} was lost: …{text[-200:]}")
        return "".join(
            json.loads(event)["choices"][0]["text"] for event in events[:-1] if json.loads(event)["choices"]
        )

    async def learn(self) -> None:
        """Send each request once while nothing happens."""
        async with aiohttp.ClientSession() as session:
            for number in range(USERS):
                self._right[number] = await self.ask(session, "f0", number)
        self.seen.clear()

    async def user(self, number: int) -> None:
        async with aiohttp.ClientSession() as session:
            turn = number
            while not self._ends.is_set():
                turn += 1
                rotation = sorted(self.fleet.rotation)
                frontend = rotation[turn % len(rotation)]
                try:
                    said = await self.ask(session, frontend, number)
                    if said != self._right[number]:
                        self.faults.append(
                            f"{self.fleet.runs}: an answer of {frontend} was altered: {said!r} instead of {self._right[number]!r}"
                        )
                except (AssertionError, aiohttp.ClientError, TimeoutError, OSError) as error:
                    self.faults.append(f"{time.strftime('%X')} {self.fleet.runs}: {error!r}")
                await asyncio.sleep(0.05)  # the rate of the load

    async def __aenter__(self) -> "Load":
        await self.learn()
        self._users = [asyncio.create_task(self.user(number)) for number in range(USERS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ends.set()
        await asyncio.gather(*self._users)


@pytest.fixture
async def fleet(
    release: Path, own_nats: EmbeddedServer, empty_database_url: str, tmp_path: Path
) -> AsyncIterator[MixedFleet]:
    """A fleet of release 0.2.0 that serves."""
    made = MixedFleet(tmp_path, own_nats.url, empty_database_url, release)
    try:
        for name in PARTS:
            await made.start(name, "old")
        await made.ready("controller", "w0", "w1", "f0", "f1")
        yield made
    finally:
        made.kill()


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
async def test_an_upgrade_and_its_rollback_lose_nothing(fleet: MixedFleet, order: tuple[str, ...]) -> None:
    """0 × 503, 0 streams lost, 0 answers altered; and no kind is on the journal that 0.2.0 does not know."""
    async with Load(fleet) as load:
        for name in order:
            await fleet.replace(name, "new")
        assert set(fleet.runs.values()) == {"new"}
        upgraded = sum(load.seen.values())
        for name in reversed(order):
            await fleet.replace(name, "old")
    assert not load.faults, "\n".join(load.faults[:10])
    assert set(load.seen) == {"200"} and load.seen["200"] > upgraded > 20
    written = await kinds_on_the_journal(fleet.nats_url)
    assert written and written <= BASE_KINDS


async def kinds_on_the_journal(url: str) -> set[str]:
    """Return the kinds on the stream: the last token of each subject."""
    client = await nats.connect(url)
    try:
        info = await client.jetstream().stream_info(subjects.STREAM, subjects_filter=">")
        return {subject.rpartition(".")[2] for subject in info.state.subjects or {}}
    finally:
        await client.close()
