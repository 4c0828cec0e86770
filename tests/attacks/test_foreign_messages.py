"""Nonsense on the journal's subjects does not stop a fleet, which can report what it was."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import nats
import nats.js.errors
from fleet import holdfast, running, streamed, undisturbed
from nats.aio.client import Client
from waits import until

from benchmarks.local_fleet import LocalFleet
from controller.adapters.embedded.server import EmbeddedServer
from controller.processes.operator_client import read_all
from events import codec, subjects
from events.decisions import Absorbed
from events.fact import Decision, Fact, Skipped
from events.journal import messages
from events.observations import Profile, WorkerHeard, WorkerJoined

HEARD = WorkerHeard(worker="w0", instance="i", observer="none")
NOTHING = Profile(kv_blocks=0, block_tokens=0, max_batch=0, prefill_tokens_per_s=0.0, tpot_ms=())
JOINED = WorkerJoined(
    worker="w\x01-\u2028", instance="i", url="nonsense", model="sim", revision="", tokenizer="builtin:sim",
    engine="simulated", engine_version="", dtype="", tp=0, device="", profile=NOTHING, canary_key="", pid=0,
    context_tokens=0, dp=0,
)  # fmt: skip


def headers(fact: Fact, kind: str = "") -> dict[str, str]:
    made = codec.encode_headers(
        fact, id=codec.new_id(), source="stranger:x", source_number=1, said_at=datetime.now(UTC)
    )
    return {**made, "ce-type": f"holdfast.{kind or fact.kind()}"}


async def test_nonsense_stops_no_process_and_unknown_events_stop_folds_until_quarantined(
    tmp_path: Path, own_nats: EmbeddedServer
) -> None:
    unprotected = {"HOLDFAST_NATS_URL": own_nats.url}  # the embedded broker denies such publications
    async with running(tmp_path / "fleet", "--workers", "2", environment=unprotected) as fleet:
        await fleet.healthy(2)
        before = await fleet.until(lambda s: s["projector"]["lag"] == 0)
        pids = {p["name"]: p["pid"] for p in before["processes"]}
        broker = await nats.connect(own_nats.url)
        stream = broker.jetstream()
        nasty = [
            await stream.publish("fleet.observed.worker.w0.canary_passed", b"no headers"),
            await stream.publish("fleet.observed.worker.w0.worker_heard", b"{bad", headers=headers(HEARD)),
            await stream.publish(
                "fleet.observed.worker.w0.worker_heard", bytes(4_000_000), headers=headers(HEARD)
            ),
            await stream.publish("fleet.decided.health_changed", b"\x00\xff"),
        ]
        await stream.publish(
            "fleet.observed.worker.w_-_.worker_joined", codec.encode_body(JOINED), headers=headers(JOINED)
        )
        drained = await asyncio.to_thread(holdfast, "drain", "w1", "--data", str(fleet.data))
        assert drained.returncode == 0, drained.stderr
        after = await fleet.until(lambda s: s["projector"]["lag"] == 0 and health(s, "w1") == "DRAINING")
        assert {p["name"]: p["pid"] for p in after["processes"]} == pids, "no process has been restarted"
        for command in (["events"], ["replay", "verify"], ["replay", "timeline"], ["replay", "rebuild"]):
            ran = await asyncio.to_thread(holdfast, *command, "--data", str(fleet.data))
            assert ran.returncode == 0, ran.stdout + ran.stderr
        assert await streamed(fleet, [300, 301, 302], 16) == undisturbed([300, 301, 302], 16)
        looked = await asyncio.to_thread(
            holdfast, "journal", "inspect", "-o", "json", "--data", str(fleet.data)
        )
        assert looked.returncode == 0, looked.stderr
        found = json.loads(looked.stdout)["messages"]
        assert [m["seq"] for m in found] == [ack.seq for ack in nasty] and {m["state"] for m in found} == {
            "skipped"
        }
        assert len([e for e in await read_all(fleet.data) if isinstance(e.fact, Skipped)]) == len(nasty)

        async with asyncio.timeout(240):
            await quarantined(fleet, broker)
            await forged(fleet, broker)
        await broker.close()


async def quarantined(fleet: LocalFleet, broker: Client) -> None:
    """Publish an event that may be a newer version's: every fold stops until an operator has decided."""
    place = ["--data", str(fleet.data)]
    unknown = headers(HEARD, "worker_dreamt")
    seq = (
        await broker.jetstream().publish("fleet.observed.worker.w0.worker_dreamt", b"{}", headers=unknown)
    ).seq
    looked = await asyncio.to_thread(holdfast, "journal", "inspect", *place)
    assert looked.returncode == 3 and f"holdfast journal quarantine {seq} --why" in looked.stdout
    log = fleet.data / "logs" / "projector.log"
    await until(lambda: f"event {seq}, on" in log.read_text(), 60)
    assert (await asyncio.to_thread(holdfast, "replay", "verify", *place)).returncode == 1
    decided = await asyncio.to_thread(holdfast, "journal", "quarantine", str(seq), "--why", "a slip", *place)
    assert decided.returncode == 0, decided.stderr
    await fleet.until(lambda s: (s["projector"]["lag"], s["journal"]["last_seq"] > seq) == (0, True), 60)
    verified = await asyncio.to_thread(holdfast, "replay", "verify", *place)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert await streamed(fleet, [400, 401], 16) == undisturbed([400, 401], 16)


async def forged(fleet: LocalFleet, broker: Client) -> None:
    """Publish a decision as a controller would, with a number that is not next: every fold stops until an operator has
    decided. Then all continue by themselves."""
    place = ["--data", str(fleet.data)]
    seq, number = await out_of_turn(fleet, broker)
    sentence = f"decision {number + 90}, at {seq}, is out of turn, {number + 1} is next"
    logs = [fleet.data / "logs" / f"{name}.log" for name in ("controller", "projector", "frontend-0")]
    await until(lambda: all(sentence in log.read_text() for log in logs), 60)
    looked = await asyncio.to_thread(holdfast, "journal", "inspect", "-o", "json", *place)
    told = json.loads(looked.stdout)
    assert looked.returncode == 3 and told["stops_at"] == seq
    assert told["messages"][-1]["why"] == f"decision {number + 90}, out of turn: expected {number + 1}"
    verified = await asyncio.to_thread(holdfast, "replay", "verify", *place)
    assert verified.returncode == 1 and sentence in verified.stderr
    assert await streamed(fleet, [500, 501], 16) == undisturbed([500, 501], 16)
    good = next(e.seq for e in await fleet.events() if isinstance(e.fact, Decision))
    refused = await asyncio.to_thread(holdfast, "journal", "quarantine", str(good), "--why", "no", *place)
    assert refused.returncode == 1 and f"event {good} is a " in refused.stderr
    decided = await asyncio.to_thread(holdfast, "journal", "quarantine", str(seq), "--why", "forged", *place)
    assert decided.returncode == 0, decided.stderr

    await fleet.until(lambda s: (s["projector"]["lag"], health(s, "w1")) == (0, "DRAINING"), 60)
    for command in (["resume", "w1"], ["drain", "w0"]):
        told_so = await asyncio.to_thread(holdfast, *command, *place)
        assert told_so.returncode == 0, told_so.stderr
    await fleet.until(lambda s: (s["projector"]["lag"], health(s, "w0")) == (0, "DRAINING"), 60)

    async def reads_on() -> bool:
        return await asyncio.to_thread(chosen, fleet) == "w1"

    await until(reads_on, 60, every_s=0.1)
    next_one = next(e.fact for e in await fleet.events(seq) if isinstance(e.fact, Decision))
    assert next_one.number == number + 1
    verified = await asyncio.to_thread(holdfast, "replay", "verify", *place)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert await streamed(fleet, [600, 601], 16) == undisturbed([600, 601], 16)


async def out_of_turn(fleet: LocalFleet, broker: Client) -> tuple[int, int]:
    """Return the sequence of a forged decision, and the number of the last decision before it."""
    while True:
        events = await fleet.events()
        number = next(e.fact.number for e in reversed(events) if isinstance(e.fact, Decision))
        after = max(
            e.seq for e in events if isinstance(e.fact, Decision) or getattr(e.fact, "decided", False)
        )
        fact = Absorbed(number=number + 90, decided_at=datetime.now(UTC))
        said = headers(fact) | {"source-number": "0", "through": str(events[-1].seq)} | messages.fence(after)
        try:
            ack = await broker.jetstream().publish(
                subjects.subject(fact), codec.encode_body(fact), headers=said
            )
        except nats.js.errors.APIError:
            continue  # a controller was faster
        return ack.seq, number


def chosen(fleet: LocalFleet) -> str:
    """Return the worker that a frontend would choose now; "" if it has none."""
    asked = holdfast("route", "--prompt", "x", "-o", "json", "--data", str(fleet.data))
    return "" if asked.returncode else str(json.loads(asked.stdout)["chosen"]["worker"])


def health(status: dict, worker: str) -> str:  # type: ignore[type-arg]
    return next((str(w["health"]) for w in status["workers"] if w["id"] == worker), "")
