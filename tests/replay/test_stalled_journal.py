"""Replay commands give an answer or report that the journal does not respond; none waits for ever."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest
from fleet_history import History
from memory_journal import MemoryJournal
from memory_store import MemoryStore
from waits import virtual

from benchmarks.virtual_loop import VirtualLoop
from controller.replay import travel
from controller.replay.event_lookup import JournalArchive, find
from controller.replay.rebuild import rebuild
from controller.replay.verify import verify
from controller.runtime.projection.projector import Projector
from events.fact import Recorded
from events.journal.port import JournalUnavailable

PATIENT_S = 60.0  # virtual seconds, longer than any timeout
READ = 3  # events read before the broker is lost


class Stalled(MemoryJournal):
    """Loses the broker in the middle of a read."""

    async def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
        async for batch in super().read(after, until=until):
            if found := [event for event in batch if event.seq <= READ]:
                yield found
            if len(found) < len(batch):
                await asyncio.Event().wait()


def in_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)


async def timeline(journal: MemoryJournal) -> None:
    async for _ in JournalArchive(journal).select():
        pass


COMMANDS: dict[str, Callable[[MemoryJournal], Awaitable[object]]] = {
    "at": lambda journal: travel.at(journal, None, READ + 2),
    "why": lambda journal: find(journal, None, "decision:1"),
    "timeline": timeline,
    "rebuild": lambda journal: rebuild(journal, MemoryStore()),
    "verify": lambda journal: verify(journal, MemoryStore()),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_journal_that_stalls_is_reported(command: str) -> None:
    async def asked() -> None:
        journal = Stalled(History().start().stream, "replay-1")
        with pytest.raises(
            JournalUnavailable, match=rf"read to {READ} of \d+, then delivered no event for 30 s"
        ):
            async with asyncio.timeout(PATIENT_S):
                await COMMANDS[command](journal)

    in_virtual_time(asked())


def test_a_journal_that_stalls_before_the_store_is_compared_with_it_is_reported() -> None:
    async def asked() -> None:
        history, store = History().start(), MemoryStore()
        await Projector(MemoryJournal(history.stream, "p"), store).catch_up(len(history.events))
        with pytest.raises(JournalUnavailable, match="delivered no event"):
            async with asyncio.timeout(PATIENT_S):
                await rebuild(Stalled(history.stream, "replay-1"), store)

    in_virtual_time(asked())


def test_a_follower_waits_for_future_events() -> None:
    async def followed() -> None:
        history, store = History().start(), MemoryStore()
        running = asyncio.ensure_future(Projector(MemoryJournal(history.stream, "p"), store).run())
        await virtual(PATIENT_S)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert (await store.position()).seq == len(history.events)

    in_virtual_time(followed())
