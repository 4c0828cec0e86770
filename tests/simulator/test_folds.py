"""The folds of a run share the results of equal steps, and are compared with an independent fold."""

from datetime import UTC, datetime

from controller.deciders.fleet import Fleet, evolve
from controller.simulator.checks.folds import differs
from controller.simulator.world.machines import PROFILE
from controller.simulator.world.surroundings import Remembered
from events.fact import Observation, Recorded
from events.observations import CanaryFailed, WorkerJoined

AT = datetime(2026, 1, 1, tzinfo=UTC)
JOINED = WorkerJoined(
    worker="w0", instance="i1", url="tcp://w0:1", model="m", revision="r", tokenizer="t", engine="simulated",
    engine_version="1", dtype="fp32", tp=1, device="cpu", profile=PROFILE, canary_key="k", pid=1,
)  # fmt: skip
FAILED = CanaryFailed(
    worker="w0", instance="i1", canary="c0", canary_key="k", check_type="scheduled", sent_under=0, sent_at=AT,
    latency_ms=1.0, reason="timeout", confirmed=False,
)  # fmt: skip


def recorded(seq: int, fact: Observation) -> Recorded:
    return Recorded(seq, AT, fact, f"e{seq}")


def test_equal_steps_are_computed_once() -> None:
    taken: list[int] = []

    def counted(fleet: Fleet, event: Recorded) -> Fleet:
        taken.append(event.seq)
        return evolve(fleet, event)

    fold, nothing = Remembered(counted), Fleet()
    join, fail = recorded(1, JOINED), recorded(2, FAILED)
    one = fold(nothing, join)
    assert fold(nothing, join) is one == evolve(Fleet(), join)
    two = fold(one, fail)
    assert fold(one, fail) is two == evolve(one, fail)
    assert fold(Fleet(), join) == one  # an equal but not identical fleet is another step
    assert taken == [1, 2, 1]


def test_a_fold_that_misses_a_fact_differs_even_if_it_was_equal_before() -> None:
    before = evolve(Fleet(), recorded(1, JOINED))
    after = evolve(before, recorded(2, FAILED))
    assert not list(differs(before, before, None, "f1"))
    assert "w0 is" in next(differs(before, after, (before, before), "f1 at 2"))
    assert not list(differs(after, after, (before, before), "f1 at 2"))
