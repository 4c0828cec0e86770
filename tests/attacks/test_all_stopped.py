"""All workers of a fleet, stopped at once, recover soon after they continue.

They do so well before a breaker's wait is over.
"""

import os
import signal
from typing import Any

import pytest
from fleet import running

WORKERS = 3
FLAGS = ("--workers", str(WORKERS), "--itl-ms", "10", "--canary-interval", "2")
SOON = {"HOLDFAST_CONTROLLER__CANARY__TIMEOUT_S": "1"}
WAIT_S = 60  # the default --breaker-wait, after which they would be tried in any case


def out_of_service(status: dict[str, Any]) -> bool:
    return all(worker["breaker"] == "open" for worker in status["workers"])


def whole(status: dict[str, Any]) -> bool:
    return len(status["workers"]) == WORKERS and all(
        (worker["health"], worker["weight"], worker["breaker"]) == ("HEALTHY", 1, "closed")
        for worker in status["workers"]
    )


async def test_all_workers_stopped_at_once_return_with_their_first_good_canary(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with running(tmp_path_factory.mktemp("stopped") / "fleet", *FLAGS, environment=SOON) as fleet:
        processes = [worker["pid"] for worker in (await fleet.healthy(WORKERS))["workers"]]
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        await fleet.until(out_of_service, 60)
        for process in processes:
            os.kill(process, signal.SIGCONT)
        status = await fleet.until(whole, WAIT_S - 10)
        assert [worker["pid"] for worker in status["workers"]] == processes, "none was restarted"
