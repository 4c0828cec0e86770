"""A body that arrived completely with its head is subject to the size limit too.

In a real frontend aiohttp stops reading far below the smallest limit, so the limit here is a thousand bytes.
"""

import asyncio
from functools import partial

import pytest
from aiohttp import web

from controller.frontend.errors import ApiError
from controller.frontend.openai.intake import Intake
from controller.frontend.settings import FrontendSettings

MOST = 1000


@pytest.mark.parametrize(("size", "found"), [(MOST, "its text"), (MOST + 1, "body_too_large")])
async def test_a_body_that_arrived_with_its_head_is_measured_too(size: int, found: str) -> None:
    seen: list[tuple[bool, object]] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        there = request.content.is_eof()
        try:
            assert len(await Intake(FrontendSettings()).parsed("json", request)) == size - 2
            seen.append((there, "its text"))
        except ApiError as error:
            seen.append((there, error.code))
        return web.Response()

    make = partial(web.BaseRequest, loop=asyncio.get_running_loop(), client_max_size=MOST)
    server = web.ServerRunner(web.Server(handle, request_factory=make))
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection(*server.addresses[0])
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % size + b'"' + b"a" * (size - 2) + b'"')
    assert b" 200 " in await asyncio.wait_for(reader.readline(), 20)
    writer.close()
    await server.cleanup()
    assert seen == [(True, found)]
