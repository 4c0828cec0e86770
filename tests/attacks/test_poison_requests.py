"""A request that crashes the engine's process, repeated by many clients, costs two workers.

No other request suffers.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from fleet import client, running, streamed, undisturbed

from benchmarks.local_fleet import LocalFleet
from events.observations import RequestAbandoned, RequestPoisonous, WorkerLeft

WORKERS = 4
FATAL = [1007, 1008, 1009]
POISON = [300, 301, *FATAL, 302]
CLIENTS = 8
TOKENS = 60

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    folder: Path = tmp_path_factory.mktemp("poison")
    flags = ("--workers", str(WORKERS), "--itl-ms", "20", "--canary-interval", "1")
    told = {"HOLDFAST_WORKER_FATAL_TOKENS": ",".join(map(str, FATAL))}
    async with running(folder / "fleet", *flags, environment=told) as fleet:
        await fleet.healthy(WORKERS)
        yield fleet


async def poison(fleet: LocalFleet) -> openai.APIStatusError:
    """Send a request that crashes engines; return the refusal."""
    async with client(fleet) as api:
        with pytest.raises(openai.APIStatusError) as refused:
            await api.completions.create(model="sim", prompt=POISON, max_tokens=8)
        return refused.value


def prompt_of(number: int) -> list[int]:
    return [400 + number, 500, 600]


async def test_a_poisonous_request_costs_two_workers_however_often_it_is_repeated(fleet: LocalFleet) -> None:
    others = [asyncio.ensure_future(streamed(fleet, prompt_of(n), TOKENS)) for n in range(12)]
    refused = [await asyncio.gather(*[poison(fleet) for _ in range(CLIENTS)]) for _ in range(3)]
    assert {error.status_code for round_ in refused for error in round_} == {422}
    assert {error.code for round_ in refused for error in round_} == {"request_poisonous"}
    assert await asyncio.gather(*others) == [undisturbed(prompt_of(n), TOKENS) for n in range(12)]
    events = [event.fact for event in await fleet.events()]
    assert sum(isinstance(fact, WorkerLeft) for fact in events) == 2
    told = [fact for fact in events if isinstance(fact, RequestPoisonous)]
    assert len({fact.worker for fact in told}) == 2 and {fact.prompt_tokens for fact in told} == {len(POISON)}
    assert {fact.reason for fact in events if isinstance(fact, RequestAbandoned)} == {"request_poisonous"}
    await fleet.healthy(WORKERS)
    assert await streamed(fleet, prompt_of(99), TOKENS) == undisturbed(prompt_of(99), TOKENS)
