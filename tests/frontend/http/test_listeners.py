"""The port shared by frontends: bound at startup, and listened on later."""

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


def discard(fact: Observation, *, traceparent: str = "") -> None:
    """Discard a fact."""


LOOPS = pytest.mark.parametrize("loops", [asyncio.new_event_loop, uvloop.new_event_loop])


def closed_listeners(port: int) -> Listeners:
    """The listeners of a frontend, not opened yet."""
    return api_behind(port)[1]


def api_behind(port: int) -> tuple[Api, Listeners]:
    """The API of a frontend and its listeners, not opened yet."""
    world = World("f0", RequestPlaneClient("f0"), discard, SystemClock())
    settings = FrontendSettings(host="127.0.0.1", port=port)
    api = Api(Director(world, settings))
    return api, Listeners(api, settings)


@contextmanager
def other_program(port: int) -> Iterator[None]:
    """Another program that listens on the port."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        yield


@LOOPS
def test_a_port_used_by_another_program_cannot_be_bound(loops: type) -> None:
    async def taken() -> None:
        port = free_port()
        listeners = closed_listeners(port)
        with other_program(port), pytest.raises(SharedPortTaken, match=f"port {port}"):
            await listeners.open()
        await listeners.close()

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(taken())


@LOOPS
def test_a_port_on_which_another_program_started_to_listen_meanwhile_is_refused(loops: type) -> None:
    async def held() -> None:
        port = free_port()
        listeners = closed_listeners(port)
        await listeners.open()
        try:
            with other_program(port), pytest.raises(SharedPortTaken, match=f"port {port}"):
                await listeners.accept()
        finally:
            await listeners.close()

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(held())


async def test_a_frontend_listens_from_accept_until_it_shuts_down() -> None:
    api, listeners = api_behind(free_port())
    found = []
    for step in (listeners.open, listeners.accept, listeners.refuse):
        await step()
        found.append(api.openai.listening)
    await listeners.close()
    assert found == [False, True, False]
