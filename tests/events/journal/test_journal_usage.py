"""The size and growth rate of the journal, as the broker reports them."""

from datetime import timedelta

import pytest
from nats_world import make_stream
from test_journal_damage import spoken

from events.journal.usage import usage

pytestmark = pytest.mark.servers


async def test_size_and_growth(nats_url: str) -> None:
    await make_stream(nats_url, max_bytes=1_000_000)
    journal = await spoken(nats_url, 20)
    found = await journal.usage()
    assert (found.first_seq, found.last_seq, found.bytes_max) == (1, 20, 1_000_000)
    assert found.bytes > 1_000 and found.bytes_a_day is None  # it is seconds old
    whole = await usage(journal.connection, shortest=timedelta(0))
    assert (
        whole.bytes_a_day is not None and whole.bytes_a_day > found.bytes
    )  # all of it was written in less than a day
    lately = await usage(journal.connection, window=timedelta(microseconds=1), shortest=timedelta(0))
    assert lately.bytes_a_day == 0
    await journal.close()


async def test_an_empty_journal_has_a_size_too(nats_url: str) -> None:
    journal = await spoken(nats_url, 0)
    found = await journal.usage()
    assert (found.last_seq, found.bytes, found.bytes_max, found.bytes_a_day) == (0, 0, None, None)
    await journal.close()
