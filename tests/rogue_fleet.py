"""A fleet of one worker with a rogue worker beside it, and the reports about that one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fleet import running
from waits import until

from benchmarks.attack.rogue import RogueWorker
from benchmarks.local_fleet import LocalFleet
from events.decisions import HealthChanged
from events.observations import IntrusionRefused, WorkerJoined

FLAGS = ("--canary-interval", "0.3", "--breaker-wait", "0.3", "--breaker-backoff", "1")


@asynccontextmanager
async def with_rogue(
    tmp_path: Path, *flags: str, environment: dict[str, str] | None = None, workers: int = 1, **about: Any
) -> AsyncIterator[tuple[LocalFleet, RogueWorker]]:
    """A fleet of `workers`, with a rogue worker that serves beside it. `about`: the rogue worker's arguments."""
    flags = ("--workers", str(workers), *FLAGS, *flags)
    async with running(tmp_path / "fleet", *flags, environment=environment) as fleet:
        await fleet.healthy(workers)
        async with RogueWorker(fleet.data, **about) as rogue:
            await fleet.healthy(workers + 1)
            yield fleet, rogue


async def refused(fleet: LocalFleet) -> list[IntrusionRefused]:
    """Return all reports of attempts so far."""
    return [event.fact for event in await fleet.events() if isinstance(event.fact, IntrusionRefused)]


async def reported(fleet: LocalFleet, words: str, within_s: float = 20.0) -> IntrusionRefused:
    """Wait for the report of an attempt with these words."""

    async def found() -> IntrusionRefused | None:
        return next((fact for fact in await refused(fleet) if words in fact.tried), None)

    return await until(found, within_s, words, every_s=0.1)


async def ejected(fleet: LocalFleet, worker: str, within_s: float = 20.0) -> HealthChanged:
    """Wait until a worker is taken out of service for its attempts."""

    async def found() -> HealthChanged | None:
        decided = [event.fact for event in await fleet.events() if isinstance(event.fact, HealthChanged)]
        return next((one for one in decided if one.worker == worker and "intrusion" in one.reason), None)

    return await until(found, within_s, every_s=0.1)


async def instances(fleet: LocalFleet) -> dict[str, str]:
    """Return the current life of each worker."""
    return {worker["id"]: worker["instance"] for worker in (await fleet.status())["workers"]}


async def addresses(fleet: LocalFleet) -> dict[str, str]:
    """Return the address of each worker."""
    facts = [event.fact for event in await fleet.events()]
    return {fact.worker: fact.url for fact in facts if isinstance(fact, WorkerJoined)}
