"""The request plane's part in a planned move: notifications of each side, without false blame."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from frontend_kit import joined
from moving_worker import MovingWorker
from scripted_worker import Act, ScriptedWorker, undisturbed
from transports import Road
from waits import until

from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.worker_links import Address
from controller.deciders.fleet import Fleet, evolve
from controller.ports import LostCause, WorkerUnreachable
from controller.router.trust import TrustedSource
from events.decisions import HealthChanged, HealthStatus
from events.fact import Recorded
from events.wire import Chunk, Committed, Generate, Reserved, Sampling

PROMPT = [300, 301, 302]
SLOW_S = 0.05  # per token: all actions of a test are faster than an answer


class RecordingSink:
    """A sink, and a transfer sink, that records its notifications."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.heard: list[str] = []
        self.offer: Reserved | None = None

    def take(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens

    def flush(self) -> None:
        pass

    def lost(self, cause: LostCause, detail: str) -> None:
        self.heard.append(f"lost {cause}")

    def reserved(self, frame: Reserved) -> None:
        self.offer = frame
        self.heard.append("reserved")

    def declined(self, stream: int, why: str) -> None:
        self.heard.append(f"declined {stream}")

    def committed(self, frame: Committed) -> None:
        self.heard.append(f"committed {len(frame.tokens)}")


def question(count: int = 200) -> Generate:
    return Generate(0, "r", list(PROMPT), len(PROMPT), Sampling(max_tokens=count))


def trusted(worker: ScriptedWorker) -> TrustedSource:
    now, fleet = datetime.now(UTC), Fleet()
    well = HealthChanged(
        number=1, worker=worker.name, instance=worker.instance, before=HealthStatus.SUSPICIOUS,
        after=HealthStatus.HEALTHY, reason="joined", weight=1.0, decided_at=now,
    )  # fmt: skip
    for seq, fact in enumerate((joined(worker), well), 1):
        fleet = evolve(fleet, Recorded(seq, now, fact, f"e{seq}"))
    return TrustedSource(fleet.workers[worker.name])


@asynccontextmanager
async def pair(road: Road) -> AsyncIterator[tuple[RequestPlaneClient, MovingWorker, MovingWorker]]:
    """A source that streams, and a target, both connected."""
    source, target = MovingWorker("w1", step_s=SLOW_S), MovingWorker("w2")
    plane = road.plane("f1")
    for worker in (source, target):
        await road.lay(worker).start()
    plane.set_workers({w.name: Address(w.instance, w.url) for w in (source, target)})
    task = asyncio.create_task(plane.run())
    await until(lambda: len(plane.connected) == 2)
    try:
        yield plane, source, target
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for worker in (source, target):
            await worker.stop()


async def test_a_stream_continues_at_the_target_under_the_reserved_number(road: Road) -> None:
    async with pair(road) as (plane, source, target):
        old, carrier, new = RecordingSink(), RecordingSink(), RecordingSink()
        stream = plane.open("w1", "i1", question(), old)
        there = plane.reserve("w2", "i1", question(), 64, carrier)
        await until(lambda: carrier.offer and len(old.tokens) > 3)
        assert carrier.offer is not None
        plane.ship(trusted(source), stream, carrier.offer, carrier)
        await until(lambda: len(carrier.heard) == 2)
        plane.adopt("w2", there, new)
        assert source.shipments[0].grants == carrier.offer.grants
        assert carrier.heard == ["reserved", f"committed {len(old.tokens)}"]
        plane.cancel("w1", stream)
        await until(lambda: source.cancelled == [stream])
        await until(lambda: len(old.tokens) + len(carrier.tokens) + len(new.tokens) == 200)
        assert old.tokens + carrier.tokens + new.tokens == undisturbed(PROMPT, 200)
        assert target.cancelled == []


async def test_a_reservation_is_notified_of_the_end_of_its_connection_and_can_be_cancelled(
    road: Road,
) -> None:
    async with pair(road) as (plane, _, target):
        first, second = RecordingSink(), RecordingSink()
        given_up = plane.reserve("w2", "i1", question(), 64, first)
        plane.reserve("w2", "i1", question(), 64, second)
        await until(lambda: first.offer and second.offer)
        plane.cancel("w2", given_up)
        await until(lambda: target.cancelled == [given_up])
        plane.cancel("w2", given_up)
        target.drop()
        await until(lambda: second.heard[-1] == "lost disconnected")
        assert (first.heard, second.heard) == (["reserved"], ["reserved", "lost disconnected"])
        assert target.cancelled == [given_up]


async def test_a_decline_is_delivered_once_and_a_late_one_is_dropped(road: Road) -> None:
    async with pair(road) as (plane, source, target):
        old, carrier = RecordingSink(), RecordingSink()
        stream = plane.open("w1", "i1", question(60), old)
        target.answers = "no"
        there = plane.reserve("w2", "i1", question(), 64, carrier)
        await until(lambda: carrier.heard == [f"declined {there}"])
        source.ships = "no"
        plane.ship(trusted(source), stream, Reserved(there, [b"?"]), carrier)
        await until(lambda: carrier.heard[1:] == [f"declined {stream}"])
        plane.stay("w1", stream)
        await until(lambda: source.stays == [stream])
        source.step_s = 0.0
        await until(lambda: old.tokens == undisturbed(PROMPT, 60))
        plane.stay("w1", stream)  # it has ended
        with pytest.raises(WorkerUnreachable):
            plane.ship(trusted(source), stream, Reserved(there, [b"?"]), carrier)
        with pytest.raises(WorkerUnreachable):
            plane.reserve("w2", "i9", question(), 64, carrier)


async def test_a_reservation_alone_owes_no_frame_and_is_no_hang(road: Road) -> None:
    async with pair(road) as (plane, source, target):
        carrier = RecordingSink()
        plane.reserve("w2", "i1", question(), 64, carrier)
        await until(lambda: carrier.offer)
        plane.open("w1", "i1", question(60), streaming := RecordingSink())
        await until(lambda: streaming.tokens)
        target.silent = True
        source.silent = True
        await until(lambda: streaming.heard)  # longer than any open stream may be silent
        assert streaming.heard[0].startswith("lost stalled")
        assert (plane.watch.hangs, plane.connected.get("w2")) == (1, "i1")


async def test_a_source_after_the_stop_of_its_only_stream_is_not_stuck(road: Road) -> None:
    async with pair(road) as (plane, source, target):
        source.ships = "stops"
        old, carrier = RecordingSink(), RecordingSink()
        stream = plane.open("w1", "i1", question(100), old)
        there = plane.reserve("w2", "i1", question(), 64, carrier)
        await until(lambda: carrier.offer and len(old.tokens) > 3)
        assert carrier.offer is not None
        plane.ship(trusted(source), stream, carrier.offer, carrier)
        target.step_s = SLOW_S
        plane.open("w2", "i1", question(1000), streaming := RecordingSink())
        await until(lambda: streaming.tokens)
        target.silent = True
        await until(lambda: streaming.heard)  # longer than any open stream may be silent
        assert streaming.heard[0].startswith("lost stalled")
        assert (plane.watch.hangs, old.heard, plane.connected.get("w1")) == (1, [], "i1")
        plane.cancel("w2", there)
        plane.stay("w1", stream)
        source.step_s = 0.0
        await until(lambda: old.tokens == undisturbed(PROMPT, 100))


async def test_a_target_that_fails_after_the_commit_ends_an_open_stream(road: Road) -> None:
    async with pair(road) as (plane, source, target):
        target.always = Act(after=2, how="disconnect")
        old, carrier = RecordingSink(), RecordingSink()
        stream = plane.open("w1", "i1", question(100), old)
        plane.reserve("w2", "i1", question(), 64, carrier)
        await until(lambda: carrier.offer)
        assert carrier.offer is not None
        plane.ship(trusted(source), stream, carrier.offer, carrier)
        await until(lambda: carrier.heard[-1] == "lost disconnected")
        assert carrier.heard[1].startswith("committed") and len(carrier.tokens) == 2
