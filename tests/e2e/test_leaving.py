"""One of four workers shuts down under load: no request fails, and it soon gets no new ones."""

from pathlib import Path

import first_database
import pytest

from benchmarks.serving.leaving import STREAMS, two_frontends
from events.decisions import DrainStarted
from events.observations import DrainFinished, RequestMigrated, ShutdownBegan, WorkerLeft


@pytest.mark.attack
async def test_no_frontend_sends_a_leaving_worker_anything_after_a_second(tmp_path: Path) -> None:
    first_database.lay_in_fleet(tmp_path / "data")
    async with two_frontends(tmp_path, pause_s=0.05) as both:
        seen = await both.leave("w2")
    assert not seen.failed and not seen.wrong
    assert len(seen.streams) == STREAMS
    assert {short.frontend for short in seen.short} == set(both.urls), "both were asked all the time"
    assert max(seen.last_ms.values()) <= 1000
    (told,) = (f for f in seen.facts if isinstance(f, DrainStarted))
    assert told.reason.startswith("shutdown")
    began, drained, left = (
        f for f in seen.facts if isinstance(f, ShutdownBegan | DrainFinished | WorkerLeft)
    )
    assert isinstance(began, ShutdownBegan) and (began.mode, began.reason) == ("graceful", "signal")
    assert isinstance(drained, DrainFinished)
    assert (drained.cancelled, drained.failed) == (0, 0)
    moved = [f for f in seen.facts if isinstance(f, RequestMigrated) and f.source == "w2"]
    assert drained.migrated == sum(
        f.tokens > 0 for f in moved
    )  # requests that it refused had never started there
    assert left == WorkerLeft(worker="w2", instance=began.instance, mode="graceful", exit=0)
