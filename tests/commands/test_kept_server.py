"""What looks after the broker and the database of a fleet: never gives up, and never in anybody's way."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from controller.adapters.embedded.servers import EmbeddedServer, ServerFailed, Stuck
from controller.processes.servers.kept_server import KeepingPolicy, KeptServer

OFTEN = KeepingPolicy(look_s=0.001, looks_per_checkup=2, wait_min_s=0.001, wait_max_s=0.002)


@dataclass
class Life:
    """What `KeptServer` knows of a server."""

    port: int
    role: str = "nats"
    running: bool = True
    stopped: bool = False

    async def stop(self) -> int:
        self.stopped = True
        return 0


@dataclass
class Machine:
    """Starts servers, unless it is broken."""

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
async def test_a_server_that_cannot_come_back_is_tried_again_until_it_can(
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
        kept.check()  # nothing has ended
        machine.trouble = None
        await machine.born.wait()
    await kept.stop()
    assert set(machine.asked) == {0, 4222}, "first on any port, then on that one"
    assert [life.stopped for life in machine.lives] == [False, True]
    assert "nats does not start: " in capsys.readouterr().err
    assert len(announced) <= 2


async def test_a_mistake_of_ours_is_not_hidden() -> None:
    machine = Machine()
    kept = KeptServer(machine.start, lambda server: None, policy=OFTEN)
    await kept.begin()
    machine.trouble = RuntimeError("ours")
    machine.lives[0].running = False
    with pytest.raises(RuntimeError, match="ours"):
        async with asyncio.timeout(20):
            while True:
                kept.check()
                await asyncio.sleep(0.001)
    await kept.stop()


async def test_one_that_was_never_started_is_stopped_without_a_word() -> None:
    await KeptServer(Machine().start, lambda server: None).stop()


async def test_a_first_start_that_fails_says_why() -> None:
    machine = Machine(trouble=ServerFailed("no"))
    with pytest.raises(ServerFailed, match="no"):
        await KeptServer(machine.start, lambda server: None).begin()
    assert machine.asked == [0]


async def test_one_that_is_stuck_is_started_anew() -> None:
    machine = Machine()
    kept = KeptServer(machine.start, lambda server: None, lambda server: len(machine.lives) == 1, OFTEN)
    await kept.begin()
    machine.born.clear()
    async with asyncio.timeout(20):
        await machine.born.wait()
    await kept.stop()
    assert machine.asked == [0, 4222]
    assert [life.stopped for life in machine.lives] == [True, True]


def test_a_broker_is_stuck_if_it_goes_on_refusing_although_there_is_room(tmp_path: Path) -> None:
    log = tmp_path / "nats-server.log"
    refusal = "[1] [ERR] JetStream failed to store a msg on stream '$G > FLEET': no space left on device\n"
    log.write_text(refusal)  # of a life before
    server = cast(EmbeddedServer, SimpleNamespace(pid=1, log=log, directory=tmp_path))
    stuck, full = Stuck(), Stuck(room_bytes=1 << 62)
    assert not stuck(server) and not full(server)

    def says(text: str, stuck: Stuck = stuck) -> bool:
        with log.open("a") as more:
            more.write(text)
        return stuck(server)

    assert not says("[1] [INF] all is well\n")
    assert says(refusal)
    assert not says(""), "what was read is no news"
    assert not says(refusal, full), "a new start would not help while the disk is full"
    log.unlink()
    assert not stuck(server)
