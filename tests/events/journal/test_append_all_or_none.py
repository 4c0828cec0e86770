"""A controller that is killed or disconnected inside an append leaves the whole batch or none of it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from journal_end import last_seq
from nats_world import Broker, Wire, absorbed, read_all
from roles import process

from events.journal.nats import APPEND_MAX, NatsJournal
from events.journal.port import Fenced, JournalUnavailable

pytestmark = pytest.mark.servers

Eventually = Callable[..., Awaitable[None]]
BATCH = 4
KILLED_CONTROLLER = """
import asyncio, os, signal, sys
from datetime import UTC, datetime
from events.decisions import Absorbed
from events.journal.nats import NatsJournal

url, kill_at, size, after = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

async def main():
    journal = await NatsJournal.connect(url, "controller:killed")
    client, published = journal.connection.client, 0
    publish = client.publish

    async def counted(subject, *rest):
        nonlocal published
        await publish(subject, *rest)
        published += subject.startswith("fleet.decided.")
        if published == kill_at:
            await client.flush()  # the broker has it
            os.kill(os.getpid(), signal.SIGKILL)

    client.publish = counted
    now = datetime.now(UTC)
    decisions = [Absorbed(number=after + n + 1, decided_at=now) for n in range(size)]
    print("landed", await journal.append(decisions, through=0, after=after), flush=True)
    await journal.close()

asyncio.run(main())
"""


async def run_controller(url: str, *arguments: int) -> tuple[int, bytes]:
    command = (sys.executable, "-c", KILLED_CONTROLLER, url, *map(str, arguments))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    async with process(*command, stdout=subprocess.PIPE, env=environment) as one, asyncio.timeout(30):
        output, _ = await one.communicate()
    assert one.returncode is not None
    return one.returncode, output


@pytest.mark.slow
async def test_a_controller_killed_at_each_step_of_an_append_leaves_all_or_none(broker: Broker) -> None:
    reader = await NatsJournal.connect(broker.url, "frontend:f1")
    outcomes = await asyncio.gather(*(run_controller(broker.url, step, BATCH, 0) for step in range(1, BATCH)))
    assert all(status == -signal.SIGKILL for status, _ in outcomes)
    assert await reader.last_seq() == 0  # none of the unfinished ones
    status, _ = await run_controller(broker.url, BATCH, BATCH, 0)
    assert status == -signal.SIGKILL
    async with asyncio.timeout(20):
        async for batch in reader.read(
            0, until=BATCH
        ):  # the broker had received the batch before the kill, and stores it now
            assert [event.fact.number for event in batch] == [1, 2, 3, 4]  # type: ignore[attr-defined]
    status, output = await run_controller(broker.url, 0, BATCH, BATCH)  # the next controller is not blocked
    assert (status, output) == (0, b"landed 8\n")
    await reader.close()


@pytest.mark.parametrize("size", [1, 3])
async def test_a_connection_cut_at_any_byte_of_an_append_leaves_all_or_none(
    broker: Broker, size: int
) -> None:
    wire = Wire(broker.server.port)
    journal = await NatsJournal.connect(await wire.start(), "controller:c1")
    after, number, outcomes = 0, 0, set()
    for cut in range(40, 700 * size + 300, 90):
        await asyncio.wait_for(journal.connection.up.wait(), 20)
        wire.cut_after = cut
        batch = [absorbed(number + n + 1) for n in range(size)]
        try:
            last = await journal.append(batch, through=0, after=after)
            outcomes.add("landed")
        except JournalUnavailable:
            outcomes.add("unknown")
            await asyncio.wait_for(journal.connection.up.wait(), 20)
            last = await last_seq(journal)
        wire.cut_after = None
        assert last in (after, after + size)
        number, after = number + (last - after), last
    assert outcomes == {"landed", "unknown"}
    events = await read_all(journal)
    assert [event.fact.number for event in events] == list(range(1, number + 1))  # type: ignore[attr-defined]
    await journal.close()
    await wire.close()


async def test_a_broker_killed_inside_appends_leaves_all_or_none(
    broker: Broker, eventually: Eventually
) -> None:
    journal = await NatsJournal.connect(broker.url, "controller:c1")
    number, after = 0, 0

    async def decide() -> None:
        nonlocal number, after
        while True:
            try:
                after = await journal.append(
                    [absorbed(number + n + 1) for n in range(5)], through=0, after=after
                )
                number += 5
            except (JournalUnavailable, Fenced):
                await asyncio.wait_for(journal.connection.up.wait(), 20)
                after = number = await last_seq(journal)

    deciding = asyncio.create_task(decide())
    for _ in range(8):
        before = number
        await eventually(lambda before=before: number >= before + 25, 20)
        await broker.restart()
    deciding.cancel()
    await asyncio.gather(deciding, return_exceptions=True)
    events = await read_all(journal)
    assert [event.fact.number for event in events] == list(range(1, len(events) + 1))  # type: ignore[attr-defined]
    assert len(events) % 5 == 0
    await journal.close()


async def test_an_append_has_a_bound_and_the_bound_fits(nats_url: str) -> None:
    journal = await NatsJournal.connect(nats_url, "controller:c1")
    journal.append_deadline_s = 20.0  # large enough to test the limit
    most = [absorbed(n + 1) for n in range(APPEND_MAX)]
    assert await journal.append(most, through=0, after=0) == APPEND_MAX
    for wrong in ([], [*most, absorbed(0)]):
        with pytest.raises(ValueError, match="fit one atomic batch"):
            await journal.append(wrong, through=0, after=APPEND_MAX)
    await journal.close()


async def test_an_append_to_a_broker_that_does_not_respond_has_an_unknown_outcome(
    broker: Broker,
) -> None:
    wire: Any = Wire(broker.server.port)
    journal = await NatsJournal.connect(await wire.start(), "controller:c1")
    journal.append_deadline_s = 0.1
    wire.swallow = True
    with pytest.raises(JournalUnavailable, match="read again"):
        await journal.append([absorbed(1)], through=0, after=0)
    assert journal.counters.appends_unknown == 1
    await journal.close()
    await wire.close()
