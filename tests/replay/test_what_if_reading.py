"""A long part of the journal is read by several processes, with the same result as by one."""

import os
from collections.abc import AsyncIterator
from dataclasses import fields
from itertools import pairwise

import pytest
from fleet_history import History, publish
from hypothesis import given
from hypothesis import strategies as st

from controller.deciders.fleet import Fleet
from controller.replay.whatif.journal_stretch import GOOD, SERVED_AFTER_S, StretchRead, TooMuch
from controller.replay.whatif.reading import HelperGone, helpers, stretches
from controller.replay.whatif.recording import Recording, recorded
from events.fact import Decision
from events.journal.nats import NatsJournal
from events.observations import RequestFailed, RequestsServed


def long_history() -> History:
    """Return a history with all that a stretch distinguishes: canaries of several instances, requests, decisions, faults."""
    history = History().start(4)
    for n in range(6):
        history.corruption(f"w{n % 3}")
        history.decide()
        history.recovery(f"w{n % 3}")
        history.say(history.passed("w3"), history.failed("w3"), history.passed("w3", canary=f"c{n}"))
        history.say(history.exposed(f"r{n}", "w3"), history.joined("w3", f"life-{n // 2}"))
        history.say(served("w0"), *([request_failed("w0")] if n in (2, 5) else []), served("w0"))
        history.say(history.passed("w3", f"life-{n // 2}", canary="c9"))
        history.decide(seconds=400.0)
    return history


def served(worker: str) -> RequestsServed:
    return RequestsServed(
        worker=worker, instance=f"{worker}-a", frontend="f0", count=3, tokens=90, ttft_ms=20.0, itl_ms=9.0, routed_under=0,
        window_s=5.0,
    )  # fmt: skip


def request_failed(worker: str) -> RequestFailed:
    return RequestFailed(
        worker=worker,
        instance=f"{worker}-a",
        frontend="f0",
        failures_in_a_row=1,
        reason="timeout",
        routed_under=0,
    )


HISTORY = long_history()


def whole(*parts: StretchRead) -> Recording:
    """Return the recording of these consecutive parts."""

    async def told() -> AsyncIterator[StretchRead]:
        for part in parts:
            yield part

    waiting = recorded(Fleet(), told())
    try:
        waiting.send(None)
    except StopIteration as done:
        found: Recording | None = done.value
    assert found is not None
    return found


def stretch(first: int, last: int, decided: int = 0) -> StretchRead:
    found = StretchRead(decided)
    for event in HISTORY.events[first:last]:
        found.take(event)
    return found


def plain(recording: Recording) -> dict[str, object]:
    """Return everything in a recording as comparable values."""
    found = {one.name: getattr(recording, one.name) for one in fields(recording)}
    weights = found.pop("weights")
    return {**found, "steps": dict(weights.steps), "gpus": weights.gpus}


@pytest.mark.slow
@given(st.sets(st.integers(1, len(HISTORY.events) - 1), max_size=4))
def test_a_history_read_in_parts_is_the_same(cuts: set[int]) -> None:
    bounds = [0, *sorted(cuts), len(HISTORY.events)]
    parts = [stretch(first, last) for first, last in pairwise(bounds)]
    assert plain(whole(*parts)) == plain(whole(stretch(0, len(HISTORY.events))))


def test_a_recording_keeps_requests_exposures_and_evidence() -> None:
    found = whole(stretch(0, 100), stretch(100, len(HISTORY.events)))
    assert found.served == {"w0": (36, 60.0)}
    assert len(found.exposed["w3"]) == 6
    kept = [one for one in found.happened if isinstance(one.fact, RequestsServed)]
    assert 0 < len(kept) < 12  # only those within ten minutes after a failure
    failed_at = [one.at for one in found.happened if isinstance(one.fact, RequestFailed)]
    assert all(any(0 <= one.at - at < SERVED_AFTER_S for at in failed_at) for one in kept)
    wrong = [one for one in found.adverse["w2"] if one.what == "token_mismatch"]
    assert wrong and [one.at for one in found.adverse["w2"]] == sorted(one.at for one in found.adverse["w2"])
    assert all(told.good is not None for told in found.canaries.values() if GOOD in told.said)


@pytest.mark.parametrize(("first", "second"), [(0.5, 1.0), (1.0, 0.5)])
def test_prober_skew_and_canary_results_are_merged_across_parts(first: float, second: float) -> None:
    history = History()
    history.say(history.failed("w0"), history.passed("w0"))
    parts = []
    for event, late in zip(history.events, (first, second), strict=True):
        parts.append(StretchRead(skew={"prober": late}))
        parts[-1].take(event)
    parts[0].add(parts[1])
    (told,) = parts[0].canaries.values()
    assert parts[0].skew["prober"] == 0.5
    assert told.good == history.events[1].fact and len(told.facts) == 1


def test_the_event_limit_applies_to_the_sum_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.replay.whatif.journal_stretch.EVENTS_MAX", 30)
    with pytest.raises(TooMuch, match="more than 30 events"):
        whole(stretch(0, 20), stretch(20, 40))


@pytest.mark.servers
async def test_processes_read_a_real_journal_in_parallel(nats_url: str) -> None:
    journal = await NatsJournal.connect(nats_url, "controller:reads")
    last = await publish(nats_url, HISTORY.events)
    try:
        alone = await recorded(Fleet(), stretches(journal, 0, last, 0))
        found = [one async for one in stretches(journal, 0, last, 0, 2)]
        assert [one.events for one in found] == [last * (n + 1) // 6 - last * n // 6 for n in range(6)]
        assert alone is not None and plain(whole(*found)) == plain(alone)
        decided = sum(isinstance(one.fact, Decision) for one in HISTORY.events)
        assert sum([one.events async for one in stretches(journal, 0, last, last, 2)]) == last - decided
    finally:
        await journal.close()


def test_a_killed_helper_process_is_reported() -> None:
    with pytest.raises(HelperGone, match="out of memory"), helpers(2) as pool:
        list(pool.map(os._exit, [9]))
