"""Supervision of a fleet's broker and database: it retries forever, and blocks nothing else."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from waits import until

from controller.adapters.embedded.nats import Stuck
from controller.adapters.embedded.server import EmbeddedServer, ServerFailed
from controller.processes.supervised_servers import KeepingPolicy, KeptServer

OFTEN = KeepingPolicy(look_s=0.001, looks_per_checkup=2, wait_min_s=0.001, wait_max_s=0.002)


@dataclass
class Life:
    """The parts of a server that `KeptServer` uses."""

    port: int
    role: str = "nats"
    running: bool = True
    stopped: bool = False

    async def stop(self) -> int:
        self.stopped = True
        return 0


@dataclass
class Machine:
    """Starts fake servers, or fails with `trouble`."""

    trouble: Exception | None = None
    asked: list[int] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    born: asyncio.Event = field(default_factory=asyncio.Event)
    refused: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, port: int) -> EmbeddedServer:
        self.asked.append(port)
        if self.trouble is not None:
            if len(self.asked) > 5:
                self.refused.set()
            raise self.trouble
        self.lives.append(Life(port or 4222))
        self.born.set()
        return cast(EmbeddedServer, self.lives[-1])


@pytest.mark.parametrize(
    "trouble", [ServerFailed("the disk is full"), OSError(28, "No space left on device")]
)
async def test_a_server_that_cannot_be_restarted_is_retried_until_it_can(
    trouble: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    announced: list[EmbeddedServer] = []
    machine = Machine()
    kept = KeptServer(machine.start, announced.append, policy=OFTEN)
    assert (await kept.begin()).port == 4222
    machine.trouble = trouble
    machine.born.clear()
    machine.lives[0].running = False
    async with asyncio.timeout(20):
        await machine.refused.wait()
        kept.check()  # the supervision has not ended
        machine.trouble = None
        await machine.born.wait()
    await kept.stop()
    assert set(machine.asked) == {0, 4222}, "first on any port, then on the same port"
    assert [life.stopped for life in machine.lives] == [False, True]
    assert "nats does not start: " in capsys.readouterr().err
    assert len(announced) <= 2


async def test_an_internal_error_is_not_hidden() -> None:
    machine = Machine()
    kept = KeptServer(machine.start, lambda server: None, policy=OFTEN)
    await kept.begin()
    machine.trouble = RuntimeError("internal")
    machine.lives[0].running = False
    with pytest.raises(RuntimeError, match="internal"):
        await until(kept.check)
    await kept.stop()


async def test_a_server_that_was_never_started_can_be_stopped() -> None:
    await KeptServer(Machine().start, lambda server: None).stop()


async def test_a_failed_first_start_raises_its_reason() -> None:
    machine = Machine(trouble=ServerFailed("no"))
    with pytest.raises(ServerFailed, match="no"):
        await KeptServer(machine.start, lambda server: None).begin()
    assert machine.asked == [0]


async def test_a_stuck_server_is_restarted() -> None:
    machine = Machine()
    kept = KeptServer(machine.start, lambda server: None, lambda server: len(machine.lives) == 1, OFTEN)
    await kept.begin()
    machine.born.clear()
    async with asyncio.timeout(20):
        await machine.born.wait()
    await kept.stop()
    assert machine.asked == [0, 4222]
    assert [life.stopped for life in machine.lives] == [True, True]


def test_a_broker_is_stuck_if_it_still_reports_a_full_disk_although_there_is_space(tmp_path: Path) -> None:
    log = tmp_path / "nats-server.log"
    refusal = "[1] [ERR] JetStream failed to store a msg on stream '$G > FLEET': no space left on device\n"
    log.write_text(refusal)  # of a former process
    server = cast(EmbeddedServer, SimpleNamespace(pid=1, log=log, directory=tmp_path))
    stuck, full = Stuck(), Stuck(room_bytes=1 << 62)
    assert not stuck(server) and not full(server)

    def stuck_after(text: str, stuck: Stuck = stuck) -> bool:
        with log.open("a") as more:
            more.write(text)
        return stuck(server)

    assert not stuck_after("[1] [INF] all is well\n")
    assert stuck_after(refusal)
    assert not stuck_after(""), "old log lines do not count again"
    assert not stuck_after(refusal, full), "a restart does not help while the disk is full"
    log.unlink()
    assert not stuck(server)
