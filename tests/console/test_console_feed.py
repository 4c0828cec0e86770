"""The feed sends a snapshot, then changes. Slow viewers get a new snapshot. Without viewers it idles."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from console_kit import applied
from waits import turns, until

from controller.console.feed import KEPT_MAX, VIEWERS_MAX, ConsoleFeed, TooManyViewers


class World:
    """A number that a feed shows, and counts of pictures and starts."""

    def __init__(self, **more: float) -> None:
        self.value = 0
        self.taken = 0
        self.begun = 0
        self.broken = False
        self.feed = ConsoleFeed(self.take, lambda: {"at": 1, "now": 2}, self.begin, **more)

    def take(self) -> Any:
        self.taken += 1
        if self.broken:
            raise RuntimeError("an internal error")
        return {"head": {"value": self.value}}

    async def begin(self) -> None:
        self.begun += 1

    def moves(self, value: int) -> None:
        self.value = value
        self.feed.take()


def decoded(event: bytes) -> list[tuple[str, Any]]:
    parts = event.decode().strip().split("\n\n")
    return [
        (lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: ")))
        for lines in (part.split("\n") for part in parts)
    ]


@contextmanager
def running(world: World) -> Iterator[asyncio.Task[None]]:
    task = asyncio.create_task(world.feed.run())
    try:
        yield task
    finally:
        task.cancel()


async def soon(events: AsyncIterator[bytes]) -> list[tuple[str, Any]]:
    async with asyncio.timeout(10):
        return decoded(await anext(events))


async def test_a_snapshot_is_followed_by_changes() -> None:
    world = World()
    with running(world), world.feed.subscribe() as events:
        ((name, first),) = await soon(events)
        assert name == "snapshot" and first == {"at": 1, "now": 2, "sections": {"head": {"value": 0}}}
        world.moves(1)
        ((name, second),) = await soon(events)
        assert name == "changes" and second["sections"] == {"head": {"value": 1}}


async def test_several_viewers_share_one_picture() -> None:
    world = World()
    with running(world), ExitStack() as stack:
        pages = [stack.enter_context(world.feed.subscribe()) for _ in range(10)]
        for page in pages:
            await soon(page)
        taken = world.taken
        world.moves(1)
        found = [await soon(page) for page in pages]
        assert world.taken == taken + 1 and all(one == found[0] for one in found)


async def test_a_viewer_gets_all_changes_since_its_last_read() -> None:
    world = World()
    with running(world), world.feed.subscribe() as events:
        await soon(events)
        for value in range(1, 6):
            world.moves(value)
        found = await soon(events)
        assert [one["sections"]["head"]["value"] for _, one in found] == [1, 2, 3, 4, 5]


async def test_a_slow_viewer_gets_a_new_snapshot_instead_of_a_queue() -> None:
    world = World()
    with running(world), world.feed.subscribe() as slow, world.feed.subscribe() as quick:
        await soon(slow)
        page = dict((await soon(quick))[0][1]["sections"])
        for value in range(1, KEPT_MAX + 5):
            world.moves(value)
            for _, one in await soon(quick):
                page = dict(applied(page, one["sections"]))
        ((name, whole),) = await soon(slow)
        assert name == "snapshot" and whole["sections"] == page == {"head": {"value": KEPT_MAX + 4}}


async def test_unchanged_rows_are_not_sent() -> None:
    world = World()
    with running(world), world.feed.subscribe() as events:
        await soon(events)
        world.feed.take()
        world.feed.take()
        world.moves(7)
        assert [one["sections"] for _, one in await soon(events)] == [{"head": {"value": 7}}]


async def test_without_viewers_no_picture_is_taken() -> None:
    world = World()
    with running(world) as task:
        await turns()
        assert world.taken == 0
        with world.feed.subscribe() as events:
            await soon(events)
        assert world.feed.viewers == 0
        await until(lambda: not world.feed.holds, 10, "the end of the picture at the next tick")
        taken = world.taken
        await turns()
        assert world.taken == taken and not task.done()
        with world.feed.subscribe() as events:
            assert (await soon(events))[0][0] == "snapshot"
        assert world.begun == 2


async def test_the_number_of_viewers_is_limited() -> None:
    world = World()
    with ExitStack() as stack:
        for _ in range(VIEWERS_MAX):
            stack.enter_context(world.feed.subscribe())
        with pytest.raises(TooManyViewers, match="Close a page"):
            stack.enter_context(world.feed.subscribe())
    with world.feed.subscribe():
        assert world.feed.viewers == 1


async def test_an_idle_stream_sends_beats() -> None:
    world = World(beat_s=0.01)
    with running(world), world.feed.subscribe() as events:
        await soon(events)
        assert (await soon(events))[0][0] == "beat"


async def test_an_internal_error_does_not_end_the_feed_and_is_retried() -> None:
    world = World(again_s=0.0)
    world.broken = True
    with running(world) as task, world.feed.subscribe() as events:
        await until(lambda: world.taken >= 3, 10)
        assert not task.done()
        world.broken = False
        assert (await soon(events))[0][0] == "snapshot"


async def test_streams_end_when_the_frontend_stops() -> None:
    world = World()
    with running(world) as task, world.feed.subscribe() as events:
        await soon(events)
        task.cancel()
        async with asyncio.timeout(10):
            assert [one async for one in events] == []
