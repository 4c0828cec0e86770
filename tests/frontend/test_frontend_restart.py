"""A frontend dies, and the next one of its name reports what it could not report. With a real broker."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from frontend_kit import joined
from scripted_worker import ScriptedWorker
from waits import until

from controller.processes import last_served as served
from events.journal.nats import NatsJournal
from events.observations import CanaryFailed, CanaryPassed, ExposureUnknown, ResumeRequested

pytestmark = pytest.mark.servers


@contextmanager
def frontend_process(url: str, data: Path) -> Iterator[None]:
    """Run the frontend f0, and kill it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    command = [sys.executable, "-m", "controller.cli", "frontend", "--name", "f0", "--port", "0"]
    with (data / "f0.log").open("ab") as log:
        child = subprocess.Popen(
            [*command, "--data", str(data)],
            env={**environment, "HOLDFAST_NATS_URL": url},
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        child.kill()
        child.wait()


def canary(kind: type[Any], **more: Any) -> Any:
    about = {"worker": "w1", "instance": "i1", "canary_key": "k", "canary": "c1", "check_type": "scheduled"}
    return kind(**about, sent_under=0, sent_at=datetime.now(UTC), latency_ms=1.0, **more)


async def unknown(journal: NatsJournal) -> list[ExposureUnknown]:
    found: list[ExposureUnknown] = []
    async for batch in journal.read(0, until=await journal.last_seq()):
        found += [event.fact for event in batch if isinstance(event.fact, ExposureUnknown)]
    return found


@pytest.mark.slow
async def test_a_conviction_that_a_dead_frontend_missed_is_reported_once(
    nats_url: str, tmp_path: Path
) -> None:
    path = served.path_of(tmp_path, "f0")

    async def serve(seq: int) -> None:
        """Let the frontend run until it has stored that it has read up to this event."""
        began = datetime.now(UTC)

        def so_far() -> bool:
            left = served.read(path)
            return left is not None and left.seq >= seq and left.until > began

        with frontend_process(nats_url, tmp_path):
            await until(so_far)

    journal = await NatsJournal.connect(nats_url, "test")
    try:
        journal.observe(joined(ScriptedWorker("w1", port=1)))
        journal.observe(canary(CanaryPassed))
        assert await journal.flush(5)
        await serve(2)
        failed = canary(CanaryFailed, reason="token_mismatch", confirmed=True, golden="agreed")
        journal.observe(failed)
        # acquitted before the frontend runs again
        journal.observe(ResumeRequested(worker="w1", instance="i1"))
        assert await journal.flush(5)
        await serve(5)  # by then it has reported everything
        await serve(5)
        (fact,) = await unknown(journal)
        assert (fact.frontend, fact.worker, fact.instance) == ("f0", "w1", "i1")
        assert fact.since < fact.until
    finally:
        await journal.close()
