"""A compromised worker, with broker account and fleet key, is ejected and harms no other stream."""

import asyncio
import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
import pytest
from fleet import running, streamed, undisturbed
from nats.aio.client import Client
from waits import until

from benchmarks.local_fleet import LocalFleet
from controller.processes.operator_client import find
from events import codec, subjects
from events.fact import Fact
from events.journal.broker import INTAKE_REFUSES
from events.nats import keys
from events.nats.urls import addresses
from events.observations import IntrusionRefused, WorkerJoined, WorkerLeft

USER = "worker-w1"
FLAGS = ("--workers", "2", "--canary-interval", "1")
FLOOD = 20_000


async def test_a_compromised_worker_is_refused_reported_and_ejected_and_harms_no_other(
    tmp_path: Path,
) -> None:
    async with running(tmp_path / "fleet", *FLAGS) as fleet:
        await fleet.healthy(2)
        before = lives(await fleet.status())
        intruder = await Intruder.of(fleet)
        await intruder.past_all_permissions()
        await intruder.with_impossible_values()
        await intruder.with_a_context_of_one_token()
        assert await streamed(fleet, [300, 301, 302], 16) == undisturbed([300, 301, 302], 16)
        await intruder.floods()
        await intruder.is_ejected()
        began = time.monotonic()
        assert await streamed(fleet, [400, 401], 16) == undisturbed([400, 401], 16)
        assert time.monotonic() - began < 20
        assert lives(await fleet.status())["w0"] == before["w0"], "the other worker lives as before"
        wanted = ("publish to", "impossible value", "beyond its budget")

        async def all_reported() -> bool:
            tried = " | ".join(fact.tried for fact in await intruder.reported())
            return all(words in tried for words in wanted)

        await until(all_reported, 60, every_s=0.2)  # `up` reads the broker's log every 2 s
        assert {fact.who for fact in await intruder.reported()} == {USER}
        await intruder.close()


@pytest.mark.parametrize("source", ["frontend:frontend-0:x", "worker:w0:x"])
async def test_a_worker_that_names_another_source_is_refused_and_ejected(tmp_path: Path, source: str) -> None:
    async with running(tmp_path / "fleet", *FLAGS) as fleet:
        await fleet.healthy(2)
        intruder = await Intruder.of(fleet)
        left = WorkerLeft(worker="w1", instance="i", mode="graceful", exit=0)
        assert (await intruder.say(left, source))["error"]["err_code"] == INTAKE_REFUSES
        await intruder.is_ejected()
        (fact,) = (fact for fact in await intruder.reported() if fact.eject)
        assert fact.who == USER and "another source" in fact.tried
        assert await streamed(fleet, [400, 401], 16) == undisturbed([400, 401], 16)
        await intruder.close()


def lives(status: Any) -> dict[str, str]:
    return {worker["id"]: worker["instance"] for worker in status["workers"]}


class Intruder:
    """An attacker with a worker's broker account."""

    def __init__(self, fleet: LocalFleet, connection: Client, joined: WorkerJoined) -> None:
        self.fleet, self.connection, self.joined = fleet, connection, joined
        self.told: list[str] = []

    @classmethod
    async def of(cls, fleet: LocalFleet) -> "Intruder":
        (place,) = addresses(find(fleet.data)["nats_url"])
        seed = keys.seed_file(fleet.data / "secrets" / "nats", USER)
        facts = [event.fact for event in await fleet.events()]
        joined = next(f for f in reversed(facts) if isinstance(f, WorkerJoined) and f.worker == "w1")
        told: list[str] = []

        async def tell(error: Exception) -> None:
            told.append(str(error))

        connection = await nats.connect(
            place, nkeys_seed=str(seed), error_cb=tell, inbox_prefix=f"_INBOX.{USER}".encode(), allow_reconnect=False
        )  # fmt: skip
        made = cls(fleet, connection, joined)
        made.told = told
        return made

    async def past_all_permissions(self) -> None:
        """Publish to the journal itself, with a reply subject to which only controllers may publish; read it."""
        left = WorkerLeft(worker="w1", instance="i", mode="graceful", exit=0)
        places = (
            "live.retire.w0",
            "live.drain.w0",
            "$KV.HOLDFAST.controller",
            "fleet.decided.golden_retired",
        )
        for place in places:
            await self.connection.publish(
                subjects.subject(left), codec.encode_body(left), place, headers(left, "worker:w1:x", 1)
            )
            await self.connection.publish("$JS.API.STREAM.INFO.FLEET", b"", place)
        await self.connection.publish("$JS.API.STREAM.MSG.GET.FLEET", b'{"seq":1}', f"_INBOX.{USER}.x.1")
        await until(lambda: len(self.told) >= 2 * len(places) + 1)
        assert all("permissions violation" in error for error in self.told)

    async def is_ejected(self) -> None:
        """Wait until it is reported for that, and disconnected."""

        async def ejected() -> bool:
            return any(fact.eject for fact in await self.reported())

        await until(ejected, 60, every_s=0.2)
        await until(lambda: not self.connection.is_connected, 60)

    async def with_impossible_values(self) -> None:
        profile = replace(self.joined.profile, prefill_tokens_per_s=1e300)
        for claim in (replace(self.joined, context_tokens=0), replace(self.joined, profile=profile)):
            refused = await self.say(replace(claim, instance="i2"), "worker:w1:x")
            assert refused["error"]["err_code"] == INTAKE_REFUSES

    async def with_a_context_of_one_token(self) -> None:
        """Register a possible value that is meant to restrict the other workers."""
        claim = replace(self.joined, instance="i3", url="tcp://127.0.0.1:1", context_tokens=1)
        assert (await self.say(claim, "worker:w1:x", 2))["stream"] == "FLEET"

    async def floods(self) -> None:
        left = WorkerLeft(worker="w1", instance="i", mode="graceful", exit=0)
        said, body = headers(left, "worker:w1:x", 3), bytes(4000)
        subject = subjects.fact_of_worker(USER, subjects.subject(left))
        try:
            async with asyncio.timeout(20):  # nats-py may wait forever on a closed connection
                for n in range(FLOOD):
                    await self.connection.publish(subject, body, f"_INBOX.{USER}.f.{n}", said)
        except Exception as error:  # it is disconnected meanwhile
            self.told.append(repr(error))

    async def say(self, fact: Fact, source: str, number: int = 1) -> Any:
        subject = subjects.fact_of_worker(USER, subjects.subject(fact))
        answer = await self.connection.request(
            subject, codec.encode_body(fact), 10, headers=headers(fact, source, number)
        )
        return json.loads(answer.data)

    async def reported(self) -> list[IntrusionRefused]:
        return [e.fact for e in await self.fleet.events() if isinstance(e.fact, IntrusionRefused)]

    async def close(self) -> None:
        if self.connection.is_connected:
            await self.connection.close()


def headers(fact: Fact, source: str, number: int) -> dict[str, str]:
    return codec.encode_headers(
        fact, id=codec.new_id(), source=source, source_number=number, said_at=datetime.now(UTC)
    )
