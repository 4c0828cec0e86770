"""The port that frontends share: it is held from the beginning, and taken into use later."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvloop

from controller.adapters.clock import SystemClock
from controller.adapters.free_port import free_port
from controller.adapters.request_plane import RequestPlane
from controller.frontend.api import Api
from controller.frontend.desk import Desk, World
from controller.frontend.server import Doors, PortTaken
from controller.frontend.settings import FrontendSettings
from events.fact import Observation


def say_nothing(fact: Observation, *, traceparent: str = "") -> None:
    """Nobody listens."""


LOOPS = pytest.mark.parametrize("loops", [asyncio.new_event_loop, uvloop.new_event_loop])


def doors_on(port: int) -> Doors:
    """A frontend's doors that are still closed."""
    return api_behind(port)[1]


def api_behind(port: int) -> tuple[Api, Doors]:
    """What a frontend answers, and its doors that are still closed."""
    world = World("f0", RequestPlane("f0"), say_nothing, SystemClock())
    settings = FrontendSettings(host="127.0.0.1", port=port)
    api = Api(Desk(world, settings))
    return api, Doors(api, settings)


@contextmanager
def somebody_else(port: int) -> Iterator[None]:
    """Another program that listens there."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        yield


@LOOPS
def test_a_port_that_somebody_else_has_cannot_be_held(loops: type) -> None:
    async def taken() -> None:
        port = free_port()
        doors = doors_on(port)
        with somebody_else(port), pytest.raises(PortTaken, match=f"port {port}"):
            await doors.open()
        await doors.close()

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(taken())


@LOOPS
def test_a_port_on_which_somebody_else_began_to_listen_while_it_was_held_is_taken(loops: type) -> None:
    async def held() -> None:
        port = free_port()
        doors = doors_on(port)
        await doors.open()
        try:
            with somebody_else(port), pytest.raises(PortTaken, match=f"port {port}"):
                await doors.let_in()
        finally:
            await doors.close()

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(held())


async def test_a_frontend_listens_from_when_it_lets_in_until_it_shuts() -> None:
    api, doors = api_behind(free_port())
    found = []
    for step in (doors.open, doors.let_in, doors.shut):
        await step()
        found.append(api.listening)
    await doors.close()
    assert found == [False, True, False]
