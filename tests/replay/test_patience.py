"""Whoever asks what was is answered, or told that the journal does not answer: nobody waits for ever."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from made_history import History

from controller.adapters.memory_store import MemoryStore
from controller.replay import travel
from controller.replay.find import find
from controller.replay.rebuild import rebuild
from controller.replay.scan import JournalArchive
from controller.replay.verify import verify
from controller.runtime import history as history_module
from controller.runtime.projector import Projector
from events.fact import Recorded
from events.journal.memory import MemoryJournal
from events.journal.port import JournalUnavailable

READ = 3  # events before the broker goes


class Stalled(MemoryJournal):
    """The broker is lost in the middle of a reading."""

    async def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
        async for batch in super().read(after, until=until):
            if found := [event for event in batch if event.seq <= READ]:
                yield found
            if len(found) < len(batch):
                await asyncio.Event().wait()


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
async def test_a_journal_that_stalls_is_reported(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "PATIENCE_S", 0.05)
    journal = Stalled(History().start().stream, "replay-1")
    with pytest.raises(JournalUnavailable, match=rf"read to {READ} of \d+ and gave nothing more"):
        async with asyncio.timeout(20):
            await COMMANDS[command](journal)


async def test_a_journal_that_stalls_before_the_store_is_compared_with_it_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history, store = History().start(), MemoryStore()
    await Projector(MemoryJournal(history.stream, "p"), store).catch_up(len(history.events))
    monkeypatch.setattr(history_module, "PATIENCE_S", 0.05)
    with pytest.raises(JournalUnavailable, match="gave nothing more"):
        async with asyncio.timeout(20):
            await rebuild(Stalled(history.stream, "replay-1"), store)


async def test_a_follower_waits_for_what_has_yet_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "PATIENCE_S", 0.05)
    history, store = History().start(), MemoryStore()
    running = asyncio.ensure_future(Projector(MemoryJournal(history.stream, "p"), store).run())
    await asyncio.sleep(0.3)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (await store.place()).seq == len(history.events)
