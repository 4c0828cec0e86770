"""The port that frontends share: it is held from the beginning, and taken into use later."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvloop

from controller.adapters.clock import SystemClock
from controller.adapters.embedded.free_port import free_port
from controller.adapters.request_plane.client import RequestPlaneClient
from controller.frontend.director import Director, World
from controller.frontend.http.api import Api
from controller.frontend.http.listeners import Listeners, SharedPortTaken
from controller.frontend.settings import FrontendSettings
from events.fact import Observation


def say_nothing(fact: Observation, *, traceparent: str = "") -> None:
    """Nobody listens."""


LOOPS = pytest.mark.parametrize("loops", [asyncio.new_event_loop, uvloop.new_event_loop])


def closed_listeners(port: int) -> Listeners:
    """A frontend's listeners that are not opened yet."""
    return api_behind(port)[1]


def api_behind(port: int) -> tuple[Api, Listeners]:
    """What a frontend answers, and its listeners that are not opened yet."""
    world = World("f0", RequestPlaneClient("f0"), say_nothing, SystemClock())
    settings = FrontendSettings(host="127.0.0.1", port=port)
    api = Api(Director(world, settings))
    return api, Listeners(api, settings)


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
        listeners = closed_listeners(port)
        with somebody_else(port), pytest.raises(SharedPortTaken, match=f"port {port}"):
            await listeners.open()
        await listeners.close()

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(taken())


@LOOPS
def test_a_port_on_which_somebody_else_began_to_listen_while_it_was_held_is_taken(loops: type) -> None:
    async def held() -> None:
        port = free_port()
        listeners = closed_listeners(port)
        await listeners.open()
        try:
            with somebody_else(port), pytest.raises(SharedPortTaken, match=f"port {port}"):
                await listeners.accept()
        finally:
            await listeners.close()

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(held())


async def test_a_frontend_listens_from_when_it_lets_in_until_it_shuts() -> None:
    api, listeners = api_behind(free_port())
    found = []
    for step in (listeners.open, listeners.accept, listeners.refuse):
        await step()
        found.append(api.openai.listening)
    await listeners.close()
    assert found == [False, True, False]
