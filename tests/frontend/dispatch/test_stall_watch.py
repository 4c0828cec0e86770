"""A stream without tokens moves with reason `stalled` although its worker runs.

An excused stream stays. Times are virtual here, except for the whole frontends at the end.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from frontend_kit import TOKENS, first_goes_to, frontend, joined, text_of
from msgspec import structs
from scripted_worker import Act, ScriptedWorker, undisturbed

from controller.frontend.dispatch.live_request import RunningRequests
from controller.frontend.dispatch.stall_watch import StallWatch
from controller.frontend.request.failures import Failure
from controller.frontend.request.state import RequestState, RequestTerms
from controller.frontend.settings import AdmissionSettings, StallSettings
from controller.migration.planned_move import Transfer
from controller.router.endpoints import Endpoint
from events.observations import RequestFailed, RequestMigrated
from events.wire import Load

PROMPT = [300, 301, 302]
FLOOR, CEILING = 10.0, 60.0


@dataclass(eq=False)
class Stream:
    """One stream, as the stall watch sees it."""

    stats: SimpleNamespace
    dispatch: SimpleNamespace | None
    state: RequestState = field(
        default_factory=lambda: RequestState(
            RequestTerms(), 0.0, phase="running", has_output=True, begun=True
        )
    )
    request: object = field(default_factory=lambda: SimpleNamespace(id="r", model="m", prompt=PROMPT))
    accepted: list[int] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def length(self) -> int:
        return len(PROMPT) + len(self.accepted)


class Bench:
    """A watch over the streams of one worker, with a clock controlled by the test."""

    def __init__(self, **settings: object) -> None:
        self.now, self.latency, self.load, self.reads = 100.0, 1.0, Load(running=2), False
        self.running = RunningRequests()
        self.endpoint = Endpoint(joined(ScriptedWorker("w")))
        self.counted = 0
        table = SimpleNamespace(knobs=lambda model: SimpleNamespace(latency=self.latency))
        plane = SimpleNamespace(load=lambda worker: self.load, others_work=self.others_work)
        self.watch = StallWatch(
            StallSettings(floor_s=FLOOR, ceiling_s=CEILING, **settings),
            AdmissionSettings(first_token_s=120.0),
            cast(Any, table),
            self.running,
            cast(Any, plane),
            self.now,
        )

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> str:
        return "before" if self.reads else "beside"

    def tick(self) -> None:
        """Sweep once, and note what has stalled."""
        for live, dispatch, failure in self.watch.tick(self.now):
            assert dispatch is live.dispatch
            cast(Stream, live).failure = failure
            self.counted += 1

    def stream(self, pace_s: float = 0.03, tokens: int = 50, **changes: object) -> Stream:
        """Add a stream that has just received a token."""
        first = self.now - pace_s * (tokens - 1)
        stats = SimpleNamespace(
            first_at=first, last_at=self.now, attempt_at=first, counted=tokens, began_at=first
        )
        one = Stream(stats, SimpleNamespace(endpoint=self.endpoint))
        one.state = structs.replace(one.state, **changes)
        self.running.begin(cast(Any, one), self.endpoint, 1)
        return one

    def run(self, seconds: float, *going: Stream) -> float | None:
        """Let time pass; the `going` streams get tokens. Return the time after which a stream had stalled."""
        began = self.now
        while self.now < began + seconds:
            self.now += 0.1
            for one in going:
                one.stats.first_at += self.now - one.stats.last_at  # its pace stays the same
                one.stats.last_at = self.now
            self.tick()
            if self.counted:
                return self.now - began
        return None


def test_one_stuck_stream_among_healthy_ones_stalls_at_the_floor() -> None:
    bench = Bench()
    stuck, others = bench.stream(), [bench.stream() for _ in range(3)]
    after = bench.run(30, *others)
    assert after is not None and FLOOR < after < FLOOR + 1
    assert stuck.failure is not None and (stuck.failure.reason, stuck.failure.one_stream) == ("stalled", True)
    assert all(other.failure is None for other in others)


@pytest.mark.parametrize(("pace_s", "limit_s"), [(0.1, FLOOR), (1.0, 20.0), (2.0, 40.0), (10.0, CEILING)])
def test_the_limit_is_a_multiple_of_the_streams_own_pace_between_floor_and_ceiling(
    pace_s: float, limit_s: float
) -> None:
    bench = Bench()
    bench.stream(pace_s)
    after = bench.run(200, bench.stream())
    assert after is not None and limit_s < after < limit_s + 1


def test_a_stream_without_a_known_pace_is_held_to_the_slowest_of_its_worker() -> None:
    bench = Bench()
    young, slow = bench.stream(tokens=1), bench.stream(pace_s=1.0)
    after = bench.run(200, slow)
    assert young.failure is not None and after is not None and 20.0 < after < 21.0
    bench = Bench()
    bench.stream(tokens=2)
    after = bench.run(200)
    assert after is not None and CEILING < after < CEILING + 1


def test_a_stream_that_may_be_preempted_in_its_workers_queue_has_until_the_ceiling() -> None:
    bench = Bench()
    bench.stream()
    bench.load = Load(running=2, waiting=1)
    after = bench.run(200, bench.stream())
    assert after is not None and CEILING < after < CEILING + 1


def test_a_worker_that_reads_a_long_prompt_for_all_is_not_stalled() -> None:
    bench = Bench()
    one, other = bench.stream(), bench.stream()
    bench.reads = True
    assert bench.run(600) is None and one.failure is other.failure is None
    bench.reads = False  # a stream after its prefill produces tokens, or is stuck
    assert bench.run(3) is not None


def test_a_prefill_that_does_not_delay_other_streams_excuses_nothing() -> None:
    bench = Bench()
    bench.stream()
    bench.reads = True
    after = bench.run(30, bench.stream())
    assert after is not None and after < FLOOR + 1


def test_a_stream_that_may_not_move_has_until_the_ceiling() -> None:
    bench = Bench()
    bench.stream(terms=RequestTerms(forbidden="guided_decoding"))
    after = bench.run(200, bench.stream())
    assert after is not None and CEILING < after < CEILING + 1


def test_a_stream_moving_to_another_worker_is_left_to_that_move() -> None:
    bench = Bench()
    bench.stream(transfer=Transfer())
    assert bench.run(200, bench.stream()) is None


def test_a_first_token_has_its_own_limit_also_after_a_move() -> None:
    bench = Bench()
    first = bench.stream(has_output=False, begun=False)
    moved = bench.stream(has_output=False)
    moved.stats.attempt_at = bench.now
    after = bench.run(300, bench.stream())
    assert after is not None and 120 < after < 121
    assert (first.failure, moved.failure is not None) == (None, True)


def test_our_own_late_loop_blames_no_stream() -> None:
    bench = Bench()
    one = bench.stream()
    bench.now += 100.0  # the loop was blocked; its sockets are full of tokens
    bench.tick()
    one.stats.last_at = bench.now
    assert bench.run(FLOOR - 1) is None and one.failure is None


def test_a_stream_without_a_worker_is_not_stalled() -> None:
    bench = Bench()
    bench.stream().dispatch = None
    assert bench.run(200) is None


def test_limits_scale_with_the_latency_factor_of_the_degradation_level() -> None:
    bench = Bench()
    bench.latency = 2.0
    bench.stream()
    after = bench.run(200, bench.stream())
    assert after is not None and 2 * FLOOR < after < 2 * FLOOR + 1


SOON = {"floor_s": 0.5, "ceiling_s": 30.0, "sweep_s": 0.05}


async def test_one_stuck_stream_continues_elsewhere_exactly_while_its_worker_serves_others() -> None:
    first = ScriptedWorker("w1", step_s=0.02, acts=deque([Act(after=6, how="quiet"), Act()]))
    other = ScriptedWorker("w2", step_s=0.02)
    async with frontend(stall=SOON) as kit:
        await first_goes_to(kit, first, other)
        stuck = asyncio.create_task(kit.stream(model="m", prompt=PROMPT, max_tokens=20))
        events = await asyncio.wait_for(stuck, 30)
        assert text_of(events) == TOKENS.decode(undisturbed(PROMPT, 20))
        (moved,) = kit.said(RequestMigrated)
        assert (moved.cause, moved.source, moved.target, moved.tokens) == ("stalled", "w1", "w2", 6)
        assert first.why == ["elsewhere"]
        assert kit.counted("holdfast_stalled_streams_total") == {(): 1.0}
        (failed,) = kit.said(RequestFailed)
        assert (failed.worker, failed.reason) == ("w1", "stalled")


async def test_an_attempt_after_a_move_without_tokens_moves_again() -> None:
    first = ScriptedWorker("w1", acts=deque([Act(after=6, how="error")]))
    mute = ScriptedWorker("w2", always=Act(after=0, how="quiet"))
    third = ScriptedWorker("w3")
    async with frontend(stall=SOON, admission={"first_token_s": 1.0}) as kit:
        await first_goes_to(kit, first, mute)
        await kit.add(third)
        events = await asyncio.wait_for(kit.stream(model="m", prompt=PROMPT, max_tokens=20), 30)
        assert text_of(events) == TOKENS.decode(undisturbed(PROMPT, 20))
