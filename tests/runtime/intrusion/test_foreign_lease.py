"""Bytes that no controller has written neither end a lease nor let another controller take it."""

import json
from dataclasses import dataclass, field

from memory_cell import MemoryCell

from controller.runtime.lease import Lease

ACK = json.dumps({"stream": "FLEET", "seq": 7}).encode()


@dataclass
class Clock:
    at: float = 0.0
    slept: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.at


class OverwrittenCell(MemoryCell):
    """A cell into which foreign bytes arrive before every renewal, `left` times."""

    left = 0

    async def write(self, value: bytes, revision: int) -> int:
        if self.left and revision:
            self.left -= 1
            self.value, self.revision = ACK, self.revision + 1
        return await super().write(value, revision)


async def test_a_leader_keeps_its_lease_when_acknowledgements_are_sent_into_it() -> None:
    clock, cell = Clock(), OverwrittenCell()
    leader, standby = (Lease(cell, name, clock) for name in ("one", "two"))  # type: ignore[arg-type]
    met: list[bytes] = []
    leader.report = met.append
    lost: list[bool] = []
    leader.listen(lost.append)
    await leader.look()
    for _ in range(40):
        clock.at += 0.25
        cell.left = 3
        await leader.look()
        await standby.look()
        assert leader.held and not standby.held
    assert lost == [True] and len(met) == 120 and set(met) == {ACK}


async def test_foreign_bytes_are_neither_a_vacancy_nor_a_renewal() -> None:
    clock, cell = Clock(), MemoryCell()
    leader, standby = (Lease(cell, name, clock) for name in ("one", "two"))  # type: ignore[arg-type]
    await leader.look()
    await standby.look()
    for _ in range(4):
        cell.value, cell.revision = ACK, cell.revision + 1
        clock.at += 0.25
        await standby.look()
        assert not standby.held, "the leader may still be alive"
    clock.at += 0.25
    await standby.look()
    assert standby.held, "the leader has not renewed for its whole time to live"


async def test_a_controller_that_finds_foreign_bytes_waits_and_then_leads() -> None:
    clock, cell = Clock(), MemoryCell(ACK, 5)
    lease = Lease(cell, "one", clock)  # type: ignore[arg-type]
    await lease.look()
    assert not lease.held
    clock.at += 1.3
    await lease.look()
    assert lease.held


async def test_another_controllers_claim_still_ends_the_lease() -> None:
    clock, cell = Clock(), MemoryCell()
    leader = Lease(cell, "one", clock)  # type: ignore[arg-type]
    await leader.look()
    cell.value, cell.revision = b'{"holder":"two"}', cell.revision + 1
    await leader.look()
    assert not leader.held
