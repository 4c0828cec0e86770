"""A fleet started on a journal at which every reader stops waits for an operator's decision.

The operator needs the fleet's broker for that.
"""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import openai
from fleet import holdfast, running, streamed, undisturbed
from waits import until

from benchmarks.local_fleet import LocalFleet
from controller.processes import up
from events.decisions import Absorbed
from events.fact import Decision
from events.journal.nats import NatsJournal
from events.journal.port import Fenced


async def test_a_fleet_that_starts_waits_for_an_operators_decision(tmp_path: Path) -> None:
    data, flags = tmp_path / "fleet", ("--workers", "1")
    async with running(data, *flags, stops=True) as fleet:
        await fleet.healthy(1)
        seq = await forged(fleet)
    begun = len(fleet.log.read_text())
    again = LocalFleet.start(data, *flags)
    try:
        async with asyncio.timeout(240):
            await does_not_give_up(again, begun, f"at {seq}, is out of turn")
            why = ("--why", "forged", "--data", str(data))
            decided = await asyncio.to_thread(holdfast, "journal", "quarantine", str(seq), *why)
            assert decided.returncode == 0, decided.stderr
            await again.until(lambda s: s["projector"]["lag"] == 0, 120)
            await again.healthy(1)
            assert await answered(again) == undisturbed([1, 2], 8)
        assert again.stop() == 0
    finally:
        again.end()


async def answered(fleet: LocalFleet) -> str:
    """Return a frontend's answer, once it has read further and knows the current worker."""
    failing = (openai.InternalServerError,)
    return await until(lambda: streamed(fleet, [1, 2], 8), 60, every_s=0.2, failing=failing)


async def forged(fleet: LocalFleet) -> int:
    """Write a decision, as anything with a controller's seed can, and return its sequence."""
    journal = await NatsJournal.connect(fleet.nats_url("controller"), "controller:forger", make=False)
    try:
        while True:
            last = [e for e in await fleet.events() if isinstance(e.fact, Decision)][-1]
            assert isinstance(last.fact, Decision)
            fact = Absorbed(number=last.fact.number + 90, decided_at=datetime.now(UTC))
            try:
                return await journal.append([fact], through=last.seq, after=last.seq)
            except Fenced:
                continue  # a controller was faster
    finally:
        await journal.close()


async def does_not_give_up(fleet: LocalFleet, begun: int, sentence: str) -> None:
    """Wait until a controller has ended more often than `up` tolerates before the fleet is ready. `begun`: where the log
    began."""

    def often() -> bool:
        assert not fleet.ended, fleet.last_words()
        ends = fleet.log.read_text()[begun:].count("controller ended with status 1")
        return ends > up.LIVES_BEFORE_GIVING_UP

    await until(often, 120, every_s=0.1)
    said = fleet.log.read_text()[begun:]
    (told,) = (line for line in said.splitlines() if "the start waits for your decision" in line)
    assert sentence in told
