"""The contract of every scale hook: one line of result in time, and never an exception."""

import asyncio
import time
from collections.abc import Callable

import pytest
from aiohttp import web
from scale_world import WANTED, ScaleServer, command, status

from controller.adapters.scaling.one_line import SAYS_MAX
from controller.ports import ScaleHook

Make = Callable[[str], ScaleHook]
WORDS = "no quota\u202e:\x07 " + "x" * 1000
PROGRAMS = {
    "does": "print('two more')",
    "refuses": f"import sys; print({WORDS!r}, file=sys.stderr); sys.exit(3)",
    "hangs": "import time; time.sleep(60)",
    "babbles": "import sys; sys.stdout.write('\\n' * 10_000_000); sys.stderr.write('x' * 10_000_000); sys.exit(1)",
    "is gone": "",
}


async def slow(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


@pytest.fixture(params=["command", "http"])
def make(request: pytest.FixtureRequest, subresource: ScaleServer) -> Make:
    """Return a factory of hooks of one kind, for a given behaviour of the other side."""

    def by_command(other_side: str) -> ScaleHook:
        from controller.adapters.scaling.command_hook import CommandScaleHook

        if other_side == "is gone":
            return CommandScaleHook(["/nowhere/to/be/found"])
        return command(PROGRAMS[other_side], 0.5 if other_side == "hangs" else 30.0)

    def by_http(other_side: str) -> ScaleHook:
        subresource.instead = {
            "refuses": lambda _: status(403, WORDS),
            "hangs": slow,
            "babbles": lambda _: web.Response(body=b"x" * 10_000_000),
        }.get(other_side)
        if other_side == "is gone":
            subresource.url = "http://127.0.0.1:1"
        return subresource.hook(timeout_s=0.5 if other_side == "hangs" else 10.0)

    return by_command if request.param == "command" else by_http


async def test_a_success_is_reported(make: Make) -> None:
    hook = make("does")
    result = await hook.scale(WANTED)
    assert result.ok and result.says in ("two more", "2 → 4 replicas")
    assert hook.by in ("command", "http")


@pytest.mark.parametrize("other_side", ["refuses", "hangs", "babbles", "is gone"])
async def test_a_failure_is_reported_as_one_line_in_time(make: Make, other_side: str) -> None:
    began = time.monotonic()
    result = await make(other_side).scale(WANTED)
    assert not result.ok
    assert result.says and result.says.isprintable() and len(result.says) <= SAYS_MAX
    assert time.monotonic() - began < 20


async def test_a_cancelled_call_ends_at_once(make: Make) -> None:
    hook = make("hangs")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await hook.scale(WANTED)
