"""Three nodes: the stream has three replicas, and the loss of its leader costs nothing."""

import asyncio
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import nats
import pytest
from nats_world import absorbed, drain, folded, read_all
from waits import until

from controller.adapters.embedded.free_port import free_port
from controller.adapters.embedded.nats import nats_binary
from controller.adapters.embedded.server import spawn
from events.fact import Recorded
from events.journal.broker import ask
from events.journal.nats import NatsJournal
from events.journal.port import Fenced, JournalUnavailable

pytestmark = pytest.mark.servers
Eventually = Callable[..., Awaitable[None]]

ELECTION_S = 90  # enough for a few rounds of votes on a loaded machine


class Node:
    """One nats-server of a cluster."""

    def __init__(self, directory: Path, number: int, routes: list[int]) -> None:
        self.directory = directory / f"n{number}"
        self.name = f"n{number}"
        self.port = free_port()
        self.route = routes[number]
        self.routes = routes
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self.directory.mkdir(exist_ok=True)
        config = self.directory / "nats.conf"
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self.routes)
        config.write_text(
            f'server_name: {self.name}\nlisten: "127.0.0.1:{self.port}"\n'
            f'jetstream {{ store_dir: "{self.directory / "store"}", sync_interval: always }}\n'
            f'cluster {{ name: fleet, listen: "127.0.0.1:{self.route}", routes: [{routes}] }}\n'
        )
        command = [str(nats_binary()), "-c", str(config)]
        self.process = await spawn(command, self.directory, self.directory / "log")

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[list[Node]]:
    routes = [free_port() for _ in range(3)]
    nodes = [Node(tmp_path, number, routes) for number in range(3)]
    for node in nodes:
        await node.start()
    yield nodes
    for node in nodes:
        node.kill()
    shutil.rmtree(tmp_path, ignore_errors=True)


def url(nodes: list[Node]) -> str:
    return ",".join(f"nats://127.0.0.1:{node.port}" for node in nodes)


@pytest.mark.slow
async def test_the_stream_has_three_replicas_and_outlives_any_node(
    cluster: list[Node], tmp_path: Path, eventually: Eventually
) -> None:
    journal = await NatsJournal.connect(url(cluster), "worker:w1", tmp_path / "spool")
    await eventually(lambda: journal.state is not None, ELECTION_S)  # the cluster elects its leaders first
    controller = await NatsJournal.connect(url(cluster), "controller:c1")
    assert (await ask(journal.connection, "STREAM.INFO.FLEET"))["config"]["num_replicas"] == 3
    said, number, after = 0, 0, 0
    for node in cluster[:2]:
        for _ in range(60):
            said += 1
            journal.observe(drain(said))
        node.kill()
        for _ in range(60):
            said += 1
            journal.observe(drain(said))
        await eventually(lambda: journal.spool_depth == 0, ELECTION_S)
        number, after = await decide(controller, number, after)
        await node.start()
        await eventually(lambda node=node: up_to_date(node), ELECTION_S)  # before the next one goes
    assert number == 6
    kept = folded(await read_all(controller))[journal.source]
    assert {event.fact.by for event in kept} == {f"fact {n}" for n in range(1, said + 1)}  # type: ignore[attr-defined]
    await journal.close()
    await controller.close()


async def up_to_date(node: Node) -> bool:
    """Return whether this node has everything on the stream, by its leader."""
    client = await nats.connect(f"nats://127.0.0.1:{node.port}", connect_timeout=10)
    try:
        cluster = (await client.jetstream().stream_info("FLEET")).cluster
    except (nats.errors.Error, nats.js.errors.Error):
        return False
    finally:
        await client.close()
    if cluster is None or not cluster.leader:
        return False
    replicas = {peer.name: peer.current for peer in cluster.replicas or ()}
    return cluster.leader == node.name or bool(replicas.get(node.name))


async def _read(journal: NatsJournal) -> tuple[Sequence[Recorded]]:
    return (await read_all(journal),)


async def decide(journal: NatsJournal, number: int, after: int) -> tuple[int, int]:
    """Append three decisions, reading again whenever the outcome is unknown, as the reconciler does."""
    async with asyncio.timeout(ELECTION_S):
        while True:
            try:
                batch = [absorbed(number + n + 1) for n in range(3)]
                return number + 3, await journal.append(batch, through=0, after=after)
            except (JournalUnavailable, Fenced):
                (events,) = await until(lambda: _read(journal), ELECTION_S, failing=(JournalUnavailable,))
                decisions = [event for event in events if event.fact.kind() == "absorbed"]
                if len(decisions) == number + 3:
                    return number + 3, decisions[-1].seq
