"""`holdfast up` sets the journal's bounds only when a snapshot covers everything that they drop."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest
from fleet_history import History

from controller.processes.journal_recovery import JournalBounding, words
from controller.read_model.snapshot import parts
from events.journal import stream
from events.journal.nats import NatsJournal
from events.journal.retention import JournalBounds
from events.journal.usage import JournalUsage
from events.observations import DrainRequested

Eventually = Callable[..., Awaitable[None]]
WANTED = JournalBounds(bytes=64 << 20, age=timedelta(days=30))


class CountingJournal(NatsJournal):
    """A journal that counts how often its usage is read: once in each attempt to set bounds."""

    attempts = 0

    async def usage(self, *, growth: bool = True) -> JournalUsage:
        self.attempts += 1
        return await super().usage(growth=growth)


@pytest.mark.servers
async def test_the_bounds_are_set_once_a_snapshot_is_on_the_journal(
    nats_url: str, eventually: Eventually, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = await CountingJournal.connect(nats_url, "supervisor:s")
    assert isinstance(journal, CountingJournal)
    for _ in range(10):
        journal.observe(DrainRequested(worker="w", instance="i", by="test"))
    assert await journal.flush(10)
    bounding = JournalBounding(journal, WANTED, look_every_s=0.05)
    try:
        await eventually(lambda: journal.attempts > 4)  # none of which sets bounds
        assert (await journal.usage()).bytes_max is None
        order = History().start().latest
        now = (await journal.end()).at
        for fact in parts(order.settled, order.position, order.sources, id="s", since=now):
            journal.observe(fact)

        async def bounded() -> bool:
            usage = await journal.usage()
            return (usage.bytes_max, usage.age_max) == (WANTED.bytes, WANTED.age)

        await eventually(bounded)
        await eventually(
            lambda: (
                "the journal now keeps at most 64 MiB and events of the last 30 days"
                in capsys.readouterr().out
            )
        )
        await stream.ensure(journal.connection)  # a bounded stream is still trusted
        free = JournalBounding(journal, JournalBounds(), look_every_s=0.05)

        async def unbounded() -> bool:
            return (await journal.usage()).bytes_max is None

        await eventually(unbounded)
        await free.stop()
    finally:
        await bounding.stop()
        await journal.close()


@pytest.mark.servers
async def test_a_broker_that_forbids_the_bounds_is_reported_once(
    nats_url: str, eventually: Eventually, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = await NatsJournal.connect(nats_url, "supervisor:s")
    tiny = JournalBounding(journal, JournalBounds(age=timedelta(microseconds=1)), look_every_s=0.05)
    try:
        await eventually(lambda: "cannot set the journal's bounds" in capsys.readouterr().err)
        await asyncio.sleep(0.3)  # the time of a few more attempts, none of which may be reported
        assert capsys.readouterr().err == ""
    finally:
        await tiny.stop()
        await journal.close()


def test_bounds_are_described_in_words() -> None:
    assert words(JournalBounds()) == "everything"
    assert words(JournalBounds(age=timedelta(days=7))) == "events of the last 7 days"
