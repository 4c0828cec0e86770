"""The lease: one holder at a time, a standby that takes over soon, and no comparison of clocks."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from memory_cell import MemoryCell
from virtual_clock import VirtualClock

from controller.adapters.clock import SystemClock
from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.server import EmbeddedServer
from controller.runtime.lease import Lease
from events.journal.nats import NatsJournal

Eventually = Callable[..., Awaitable[None]]


async def test_the_first_contender_holds_the_lease_and_the_other_waits() -> None:
    clock, cell = VirtualClock(), MemoryCell()
    first, second = Lease(cell, "c1", clock), Lease(cell, "c2", clock)
    await first.look()
    await second.look()
    assert first.held and not second.held
    assert second.leader == "c1"


async def test_a_holder_that_renews_is_never_replaced() -> None:
    clock, cell = VirtualClock(), MemoryCell()
    first, second = Lease(cell, "c1", clock), Lease(cell, "c2", clock)
    for _ in range(40):
        await first.look()
        await second.look()
        assert first.held and not second.held
        await clock.advance(0.25)


async def test_a_dead_holder_is_replaced_after_its_time_and_never_before_it_has_stopped() -> None:
    clock, cell = VirtualClock(), MemoryCell()
    first, second = Lease(cell, "c1", clock), Lease(cell, "c2", clock)
    await first.look()
    waited = 0.0
    while not second.held:
        await second.look()
        assert not (first.held and second.held)
        await clock.advance(0.25)
        waited += 0.25
    assert waited <= 1.75


async def test_a_revived_holder_notices_that_it_was_replaced() -> None:
    clock, cell = VirtualClock(), MemoryCell()
    first, second = Lease(cell, "c1", clock), Lease(cell, "c2", clock)
    await first.look()
    for _ in range(8):
        await second.look()
        await clock.advance(0.25)
    await second.look()
    assert second.held and not first.held
    await first.look()
    assert not first.held and first.leader == "c2"


async def test_a_holder_with_failing_renewals_stops_by_its_own_clock() -> None:
    clock, cell = VirtualClock(), MemoryCell()
    lease = Lease(cell, "c1", clock)
    heard: list[bool] = []
    lease.listen(heard.append)
    await lease.look()
    cell.reachable = False
    for _ in range(5):
        await clock.advance(0.25)
        await lease.look()
    assert not lease.held and heard == [True, False]
    cell.reachable = True
    await lease.look()
    assert lease.held


async def test_a_released_lease_is_taken_over_at_once() -> None:
    clock, cell = VirtualClock(), MemoryCell()
    first, second = Lease(cell, "c1", clock), Lease(cell, "c2", clock)
    await first.look()
    await second.look()
    await first.release()
    await second.look()
    assert second.held and not first.held


@pytest.mark.servers
async def test_on_nats_a_lease_is_held_and_taken_over_even_after_a_restart(
    own_nats: EmbeddedServer, eventually: Eventually
) -> None:
    journals = [await NatsJournal.connect(own_nats.url, f"controller:c{n}") for n in range(2)]
    leases = [Lease(j.cell("leader"), j.source, SystemClock(), ttl_s=0.4) for j in journals]
    tasks = [asyncio.create_task(lease.run()) for lease in leases]
    await eventually(lambda: any(lease.held for lease in leases))
    assert not all(lease.held for lease in leases)
    await own_nats.kill()
    await eventually(lambda: not any(lease.held for lease in leases))
    again = await start_nats(own_nats.directory, port=own_nats.port)
    await eventually(lambda: any(lease.held for lease in leases))
    holder = 0 if leases[0].held else 1
    tasks[holder].cancel()
    await eventually(lambda: leases[1 - holder].held and not leases[holder].held)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for journal in journals:
        await journal.close()
    await again.kill()
