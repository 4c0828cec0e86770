"""For any history, the projection equals the fold, and deciding again gives identical decisions."""

import asyncio
from collections.abc import Callable

import pytest
from fleet_history import History
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore
from test_replay_commands import journal

from controller.replay.verify import verify
from controller.runtime.projection.projector import Projector
from events import observations as o
from events.fact import Observation

WORKERS = ("w0", "w1", "w2")
OnFaultChange = Callable[[History, str, str], Observation]
FACTS: list[OnFaultChange] = [
    lambda h, w, i: h.passed(w, i),
    lambda h, w, i: h.passed(w, i, check="trial"),
    lambda h, w, i: h.failed(w, i),
    lambda h, w, i: h.failed(w, i, confirmed=True, reason="token_mismatch"),
    lambda h, w, i: h.migrated("req-1", w, "w0"),
    lambda h, w, i: o.WorkerSilent(worker=w, instance=i, silent_s=3.0, observer="controller"),
    lambda h, w, i: o.WorkerLeft(worker=w, instance=i, mode="immediate", exit=-9),
    lambda h, w, i: o.DrainRequested(worker=w, instance=i, by="operator"),
    lambda h, w, i: o.ResumeRequested(worker=w, instance=i, by="operator"),
    lambda h, w, i: o.RequestFailed(
        worker=w, instance=i, frontend="f", failures_in_a_row=3, reason="engine_error",
        routed_under=h.latest.position.number,
    ),
    lambda h, w, i: h.joined(w, i),
]  # fmt: skip
steps = st.one_of(
    st.tuples(st.just("say"), st.sampled_from(FACTS), st.sampled_from(WORKERS), st.sampled_from("ab")),
    st.tuples(st.just("decide"), st.integers(0, 3), st.sampled_from([0.0, 5.0, 70.0])),
    st.tuples(st.just("repeat"), st.integers(1, 5)),
)


def tell(history: History, told: list[tuple]) -> None:  # type: ignore[type-arg]
    since_decision = 0
    for step in told:
        if step[0] == "say":
            _, fact, worker, life = step
            history.say(fact(history, worker, f"{worker}-{life}"))
            since_decision += 1
        elif step[0] == "repeat":
            event = history.events[-step[1]]
            if event.source_number:
                history.repeat(event)
                since_decision += 1
        else:
            before = len(history.events)
            history.decide(lag=min(step[1], since_decision), seconds=step[2])
            if len(history.events) > before:
                since_decision = 0


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, max_size=40), st.integers(1, 9), st.integers(1, 10))
def test_any_history_is_projected_and_decided_again_identically(told: list, portion: int, every: int) -> None:  # type: ignore[type-arg]
    async def play() -> None:
        history, store = History().start(), MemoryStore(snapshot_every=every)
        tell(history, told)
        for until in [*range(portion, len(history.events), portion), len(history.events)]:
            await Projector(journal(history), store).catch_up(until)
        for since in (0, len(history.events) // 2):
            report = await verify(journal(history), store, since=since)
            assert report.difference is None, report.lines()
        assert report.position == len(history.events)

    asyncio.run(play())
