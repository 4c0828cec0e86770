"""A worker in the fleet: its registration, heartbeats, commands and end."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from engine_contract import prompt
from memory_journal import MemoryJournal, MemoryStream
from plain_frontend import PlainFrontend
from structlog.testing import capture_logs
from waits import turns
from worker_life import ABOUT, DIED, Begin, Eventually, Life

from events import subjects
from events.errors import HoldfastError
from events.observations import (
    DrainFinished,
    EngineFaulted,
    KvLayout,
    ShutdownBegan,
    WorkerJoined,
    WorkerLeft,
)
from events.wire import Hello
from workers.config.settings import WorkerConfig
from workers.engines.engine import Announce, Deliver, EngineDead, discard_events
from workers.engines.faults import EngineFaults
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.migration.trust import SenderDistrusted, TrustedSender
from workers.worker import InferenceWorker


async def test_a_worker_registers_all_that_others_need(begin: Begin) -> None:
    life = await begin(itl_s=0.02, migration_limit=5)
    (joined,) = life.facts
    assert isinstance(joined, WorkerJoined)
    assert joined.url == f"tcp://127.0.0.1:{life.port}"
    assert (joined.worker, joined.instance, joined.model, joined.tokenizer) == (
        "w0",
        "i1",
        "sim",
        "builtin:sim",
    )
    assert (joined.engine, joined.exact, joined.migration_limit) == ("simulated", True, 5)
    assert joined.canary_key == "sim|1|builtin:sim|simulated|1|none|tp1|simulated"
    assert joined.profile.tpot_ms[0] == (1, 20.0)


async def test_a_worker_sends_a_heartbeat_with_its_load_every_second(
    begin: Begin, eventually: Eventually
) -> None:
    life = await begin()
    await eventually(lambda: len(life.beats) >= 2)
    first, second = life.beats[:2]
    assert {**first, "at": "", "seq": 0} == {
        **ABOUT, "at": "", "seq": 0, "draining": False, "convicted": False, "batch": 1.0,
        "load": {
            "running": 0, "waiting": 0, "kv_used": 0, "kv_total": 32768, "active_tokens": 0, "canaries": 0, "batch": 0,
            "closed_s": 0.0, "weight": 1.0,
        },
    }  # fmt: skip
    assert (first["seq"], second["seq"]) == (1, 2)


async def test_a_worker_serves_without_a_broker(begin: Begin) -> None:
    life = await begin()
    life.bus.reachable = life.stream.reachable = False
    frontend = await PlainFrontend.connect(life.port)
    assert len(await frontend.answer(frontend.ask(prompt()))) == 16
    frontend.transport.close()
    assert await life.end() == 0


async def test_a_drain_lets_streams_finish_and_is_recorded_once(begin: Begin, eventually: Eventually) -> None:
    life = await begin()
    frontend = await PlainFrontend.connect(life.port)
    stream = frontend.ask(prompt(), max_tokens=60)
    await frontend.until(lambda: frontend.tokens(stream))
    body = {"instance": "i1", "deadline_s": 20}
    answers = [await life.bus.request(subjects.command("drain", "w0"), body) for _ in range(3)]
    assert answers[0] == {"draining": True, "in_flight": 1}
    assert len(await frontend.answer(stream)) == 60
    await eventually(lambda: len(life.facts) > 1)
    assert life.facts[1:] == [DrainFinished(**ABOUT, completed=1, migrated=0)]
    await eventually(lambda: life.beats[-1]["draining"])
    assert frontend.beats[-1].draining
    assert (await life.bus.request(subjects.command("drain", "w0"), body))["in_flight"] == 0
    assert len(life.facts) == 2
    frontend.transport.close()


async def test_a_drain_past_its_deadline_sends_streams_elsewhere(
    begin: Begin, eventually: Eventually
) -> None:
    life = await begin(itl_s=0.01)
    frontend = await PlainFrontend.connect(life.port)
    stream = frontend.ask(prompt(), max_tokens=10_000)
    await frontend.until(lambda: frontend.tokens(stream))
    await life.bus.request(subjects.command("drain", "w0"), {"instance": "i1", "deadline_s": 0.05})
    await frontend.answer(stream)
    await eventually(lambda: len(life.facts) > 1)
    assert life.facts[1:] == [DrainFinished(**ABOUT, completed=0, migrated=1)]
    frontend.transport.close()


async def test_a_cancelled_drain_ends_no_stream_at_its_deadline(begin: Begin) -> None:
    life = await begin(itl_s=0.01)
    frontend = await PlainFrontend.connect(life.port)
    stream = frontend.ask(prompt(), max_tokens=60)
    await frontend.until(lambda: frontend.tokens(stream))
    await life.bus.request(subjects.command("drain", "w0"), {"instance": "i1", "deadline_s": 0.1})
    await life.bus.request(subjects.command("resume", "w0"), {"instance": "i1"})
    assert len(await frontend.answer(stream)) == 60
    assert len(life.facts) == 1  # no drain has finished
    frontend.transport.close()


async def test_a_resumed_worker_accepts_requests_and_its_next_drain_counts_afresh(
    begin: Begin, eventually: Eventually
) -> None:
    life = await begin()
    frontend = await PlainFrontend.connect(life.port)
    drain = {"instance": "i1", "deadline_s": 5}
    await life.bus.request(subjects.command("drain", "w0"), drain)
    refused = frontend.ask(prompt())
    await frontend.answer(refused)
    await eventually(lambda: len(life.facts) == 2)
    answer = await life.bus.request(subjects.command("resume", "w0"), {"instance": "i1"})
    assert answer == {"draining": False, "in_flight": 0}
    assert len(await frontend.answer(frontend.ask(prompt()))) == 16
    await life.bus.request(subjects.command("drain", "w0"), drain)
    await eventually(lambda: len(life.facts) == 3)
    assert life.facts[1:] == [DrainFinished(**ABOUT, completed=0, migrated=0)] * 2
    frontend.transport.close()


async def test_a_drain_counts_the_streams_that_a_frontend_moved_before_the_worker_knew(
    begin: Begin, eventually: Eventually
) -> None:
    life = await begin(itl_s=0.01)
    frontend, other = [await PlainFrontend.connect(life.port, Hello(name)) for name in ("f1", "f2")]
    moved, first, second, late = [frontend.ask(prompt(salt=n), max_tokens=10_000) for n in range(4)]
    unknowing = other.ask(prompt(salt=5), max_tokens=10_000)
    await frontend.until(lambda: all(frontend.tokens(stream) for stream in (moved, first, second, late)))
    frontend.cancel(moved, "elsewhere")  # an operator's earlier move
    frontend.cancel(first, "drained")
    frontend.cancel(second, "drained")
    await eventually(lambda: life.worker.server.in_flight == 2)
    begun = other.ask(prompt(salt=6), max_tokens=4)  # this frontend does not know of the drain yet
    assert len(await other.answer(begun)) == 4
    await life.bus.request(subjects.command("drain", "w0"), {"instance": "i1", "deadline_s": 20})
    frontend.cancel(late, "drained")
    other.cancel(unknowing, "gone")
    await eventually(lambda: len(life.facts) > 1)
    assert life.facts[1:] == [DrainFinished(**ABOUT, completed=1, migrated=3, cancelled=1)]
    frontend.transport.close()
    other.transport.close()


async def test_a_drain_cancelled_before_the_worker_knew_does_not_count_for_the_next_one(
    begin: Begin, eventually: Eventually
) -> None:
    life = await begin(itl_s=0.01)
    frontend = await PlainFrontend.connect(life.port)
    stream = frontend.ask(prompt(), max_tokens=10_000)
    await frontend.until(lambda: frontend.tokens(stream))
    frontend.cancel(stream, "drained")
    assert len(await frontend.answer(frontend.ask(prompt(salt=1)))) == 16  # so it was resumed
    await life.bus.request(subjects.command("drain", "w0"), {"instance": "i1", "deadline_s": 20})
    await eventually(lambda: len(life.facts) > 1)
    assert life.facts[1:] == [DrainFinished(**ABOUT, completed=0, migrated=0)]
    frontend.transport.close()


async def test_a_request_for_an_earlier_life_is_refused(begin: Begin) -> None:
    life = await begin()
    answer = await life.bus.request(subjects.command("drain", "w0"), {"instance": "i0", "deadline_s": 5})
    assert answer == {"error": "i0 is gone; worker w0 is i1 now"}
    assert life.worker.server.drain.refusal is None


@pytest.mark.parametrize("deadline_s", [-1, "soon", True, float("inf")])
async def test_an_invalid_deadline_is_refused_with_a_message(begin: Begin, deadline_s: Any) -> None:
    life = await begin()
    with pytest.raises(HoldfastError, match=r"deadline_s = .*: expected a finite number of at least 0"):
        life.worker.commands.on_drain({"deadline_s": deadline_s})
    assert life.worker.server.drain.refusal is None


# --- leaving


async def test_a_stopped_worker_drains_and_leaves_gracefully(begin: Begin) -> None:
    life = await begin()
    frontend = await PlainFrontend.connect(life.port)
    stream = frontend.ask(prompt(), max_tokens=60)
    await frontend.until(lambda: frontend.tokens(stream))
    life.stop.set()
    assert len(await frontend.answer(stream)) == 60
    assert await life.end() == 0
    assert life.facts[1:] == [
        ShutdownBegan(**ABOUT, mode="graceful", grace_s=60.0, reason="signal"),
        DrainFinished(**ABOUT, completed=1, migrated=0),
        WorkerLeft(**ABOUT, mode="graceful", exit=0),
    ]
    await frontend.lost()


async def test_a_canary_is_refused_because_the_worker_leaves(begin: Begin) -> None:
    life = await begin(itl_s=0.01)
    frontend = await PlainFrontend.connect(life.port)
    canary = frontend.ask(prompt(), canary=True, max_tokens=10_000)
    await frontend.until(lambda: frontend.tokens(canary))
    assert await life.end() == 0
    await frontend.answer(canary)
    ended = frontend.end(canary)
    assert ended is not None and (ended.error or "").startswith("engine_shutdown")
    assert life.facts[2] == DrainFinished(**ABOUT, completed=0, migrated=0)


@pytest.mark.parametrize("grace_s", [0.05, 0.0])
async def test_streams_that_outlast_the_grace_period_go_elsewhere(begin: Begin, grace_s: float) -> None:
    life = await begin(itl_s=0.01, grace_s=grace_s)
    frontend = await PlainFrontend.connect(life.port)
    streams = [frontend.ask(prompt(salt=n), max_tokens=10_000) for n in range(3)]
    await frontend.until(lambda: all(frontend.tokens(stream) for stream in streams))
    assert await life.end() == 0
    ends = [frontend.end(stream) for stream in streams]
    assert all(end is not None and (end.error or "").startswith("engine_shutdown") for end in ends)
    assert DrainFinished(**ABOUT, completed=0, migrated=3) in life.facts
    frontend.transport.close()


async def test_a_dead_engine_ends_the_worker_at_once(begin: Begin) -> None:
    life = await begin(itl_s=0.01)
    frontend = await PlainFrontend.connect(life.port)
    stream = frontend.ask(prompt(), max_tokens=10_000)
    await frontend.until(lambda: frontend.tokens(stream))
    await life.bus.request(subjects.command("chaos", "w0"), {"fault": "die"})
    async with asyncio.timeout(20):
        assert await life.running == 1
    await frontend.answer(stream)
    end = frontend.end(stream)
    assert end is not None and (end.error or "").startswith("engine_shutdown")
    assert life.facts[1:] == [
        EngineFaulted(**ABOUT, reason=DIED, fatal=True),
        ShutdownBegan(**ABOUT, mode="self_initiated", grace_s=0, reason=DIED),
        DrainFinished(**ABOUT, completed=0, migrated=1),
        WorkerLeft(**ABOUT, mode="self_initiated", exit=1),
    ]
    frontend.transport.close()


async def test_an_instance_that_is_considered_dead_ends_without_an_engine_fault(begin: Begin) -> None:
    life = await begin(itl_s=0.01)
    await life.bus.request(subjects.command("retire", "w0"), {"instance": ABOUT["instance"]})
    async with asyncio.timeout(20):
        assert await life.running == 1
    assert [fact.kind() for fact in life.facts[1:]] == ["shutdown_began", "drain_finished", "worker_left"]
    assert life.facts[-1] == WorkerLeft(**ABOUT, mode="self_initiated", exit=1)


class Stillborn(SimulatedEngine):
    """An engine that fails to start, or never finishes starting."""

    def __init__(self, reason: str | None) -> None:
        super().__init__(EngineShape())
        self.reason = reason

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        if self.reason:
            raise EngineDead(self.reason)
        await asyncio.Event().wait()


async def test_an_engine_that_cannot_start_gives_one_clear_error_and_no_fact(begin: Begin) -> None:
    life = await begin(engine=Stillborn("the weights are missing"))
    with pytest.raises(EngineDead, match="the weights are missing"):
        await life.running
    assert life.facts == []


async def test_a_worker_can_be_stopped_while_its_engine_loads(begin: Begin) -> None:
    stop = asyncio.Event()
    worker = InferenceWorker(
        WorkerConfig(name="w0", instance="i1"),
        Stillborn(None),
        MemoryJournal(MemoryStream(), "worker:w0"),
        None,
    )
    running = asyncio.ensure_future(worker.run(stop))
    await turns()
    stop.set()
    async with asyncio.timeout(20):
        assert await running == 0


async def test_a_port_in_use_gives_one_clear_error(begin: Begin) -> None:
    first = await begin()
    second = await begin(port=first.port)
    with pytest.raises(HoldfastError, match=f"cannot listen on port {first.port} of 127.0.0.1"):
        await second.running


# --- rehearsals and errors


async def test_a_raising_engine_causes_one_fact_for_many_requests(begin: Begin) -> None:
    life = await begin()
    frontend = await PlainFrontend.connect(life.port)
    assert "fault" in await life.bus.request(
        subjects.command("chaos", "w0"), {"fault": "error", "argument": 0}
    )
    for n in range(5):
        await frontend.answer(frontend.ask(prompt(salt=n)))
    faults = [fact for fact in life.facts if isinstance(fact, EngineFaulted)]
    assert len(faults) == 1
    assert not faults[0].fatal
    frontend.transport.close()


async def test_a_fault_with_a_duration_heals_by_itself(begin: Begin, eventually: Eventually) -> None:
    life = await begin()
    await life.bus.request(subjects.command("chaos", "w0"), {"fault": "blackhole", "duration": 0.05})
    assert life.worker.server.connections.blackholed
    await eventually(lambda: not life.worker.server.connections.blackholed)


def faults_of(life: Life) -> EngineFaults:
    engine = life.worker.engine
    assert isinstance(engine, SimulatedEngine)
    return engine.each[0].scheduler.faults


async def test_each_fault_has_its_own_duration(begin: Begin, eventually: Eventually) -> None:
    life = await begin()
    faults = faults_of(life)

    async def play(fault: str, **more: float) -> None:
        assert "error" not in await life.bus.request(
            subjects.command("chaos", "w0"), {"fault": fault, **more}
        )

    await play("slow", argument=3, duration=0.05)
    await play("corrupt", argument=5)
    await play("blackhole")
    await eventually(lambda: faults.slow == 1.0)
    assert faults.corrupt_one_in == 5 and life.worker.server.connections.blackholed, "until it is healed"
    await play("blackhole", duration=0.05)  # the same fault again, from now on
    await eventually(lambda: not life.worker.server.connections.blackholed)
    assert faults.corrupt_one_in == 5
    await play("heal")
    assert faults == EngineFaults()


async def test_a_repeated_fault_replaces_the_first(begin: Begin, eventually: Eventually) -> None:
    life = await begin()
    faults = faults_of(life)
    await life.bus.request(subjects.command("chaos", "w0"), {"fault": "error", "duration": 0.05})
    await life.bus.request(subjects.command("chaos", "w0"), {"fault": "error"})
    await life.bus.request(subjects.command("chaos", "w0"), {"fault": "slow", "duration": 3600})
    await life.bus.request(subjects.command("chaos", "w0"), {"fault": "slow", "duration": 0.1})
    await eventually(lambda: faults.slow == 1.0)
    assert faults.error


async def test_a_heal_cancels_the_durations_of_earlier_faults(begin: Begin, eventually: Eventually) -> None:
    life = await begin()
    faults = faults_of(life)
    await life.bus.request(subjects.command("chaos", "w0"), {"fault": "error", "duration": 0.05})
    await life.bus.request(subjects.command("chaos", "w0"), {"fault": "heal"})
    await life.bus.request(subjects.command("chaos", "w0"), {"fault": "error"})
    await life.bus.request(subjects.command("chaos", "w0"), {"fault": "slow", "duration": 0.1})
    await eventually(lambda: faults.slow == 1.0)
    assert faults.error


async def test_a_worker_in_a_blackhole_sends_nothing_on_the_bus_either(
    begin: Begin, eventually: Eventually
) -> None:
    life = await begin()
    await eventually(lambda: life.beats)
    await life.bus.request(subjects.command("chaos", "w0"), {"fault": "blackhole"})
    before = len(life.beats)
    await life.worker.beats.beat()
    assert len(life.beats) == before
    await life.bus.request(subjects.command("chaos", "w0"), {"fault": "heal"})
    await life.worker.beats.beat()
    assert len(life.beats) == before + 1


@pytest.mark.parametrize(
    ("fault", "config", "words"),
    [
        ("earthquake", {}, "cannot rehearse 'earthquake'"),
        ("xid", {}, "cannot rehearse 'xid': it needs the devices of a simulated group"),
        ("slow", {"chaos": False}, "configured to refuse"),
    ],
)
async def test_faults_that_cannot_be_rehearsed_are_refused_with_a_message(
    begin: Begin, fault: str, config: dict[str, Any], words: str
) -> None:
    life = await begin(**config)
    answer = await life.bus.request(subjects.command("chaos", "w0"), {"fault": fault})
    assert words in str(answer["error"])


async def test_two_processes_under_one_name_are_logged(begin: Begin, eventually: Eventually) -> None:
    with capture_logs() as logs:
        life = await begin()
        await eventually(lambda: life.bus.entries)
        for _ in range(3):
            await life.bus.publish(subjects.beat("w0"), {"worker": "w0", "instance": "other"})
    assert [line["other"] for line in logs if line["event"] == "name_taken"] == ["other"]


async def test_a_worker_registers_its_kv_cache_layout_and_its_topology(begin: Begin) -> None:
    engine = SimulatedEngine(EngineShape(tp=4, kv_block_bytes=8192))
    life = await begin(engine=engine, nvlink_domain="rack-3", rail="r1")
    joined = next(fact for fact in life.facts if isinstance(fact, WorkerJoined))
    assert joined.kv == KvLayout(layers=1, kv_heads=4, head_size=256, element_bytes=1)
    assert (joined.topology.nvlink_domain, joined.topology.rail) == ("rack-3", "r1")


async def test_a_worker_limits_its_batch_on_command_and_reports_it_in_heartbeats(
    begin: Begin,
) -> None:
    engine = SimulatedEngine(EngineShape(batch_max=8))
    life = await begin(engine=engine)
    beaten = asyncio.Event()

    async def heard(subject: str, body: Mapping[str, Any]) -> None:
        if body.get("batch") == 0.5:
            beaten.set()

    subject = subjects.command("batch", "w0")
    assert await life.bus.request(subject, {"instance": "i1", "share": 0.5}, 5) == {"batch": 0.5}
    assert engine.each[0].scheduler.batch_limit == 4
    await life.bus.subscribe(subjects.beat("w0"), heard)
    await asyncio.wait_for(beaten.wait(), 10)
    for wrong in (0, -1, 1.5, None, "half", True):
        answer = await life.bus.request(subject, {"instance": "i1", "share": wrong}, 5)
        assert "number" in str(answer["error"]), wrong
    assert "error" in await life.bus.request(subject, {"instance": "i0", "share": 0.25}, 5)
    assert engine.each[0].scheduler.batch_limit == 4
    assert await life.bus.request(subject, {"instance": "i1", "share": 1}, 5) == {"batch": 1.0}
    assert engine.each[0].scheduler.batch_limit == 8


async def test_a_convicted_worker_is_notified_and_reports_it(begin: Begin) -> None:
    life = await begin()
    trust = life.worker.server.moves.trust
    subject = subjects.command("distrust", "w0")
    answer = await life.bus.request(subject, {"instance": "i1", "reason": "corrupt"}, 5)
    assert answer == {"convicted": True} and "corrupt" in trust.reason
    with pytest.raises(SenderDistrusted):
        TrustedSender(trust)
    assert "error" in await life.bus.request(subject, {"instance": "i0", "reason": ""}, 5)
    answer = await life.bus.request(subject, {"instance": "i1", "reason": ""}, 5)
    assert answer == {"convicted": False} and not trust.reason
