"""A rebuild that stops in the middle, for a test to kill; prints the pid of its helper process."""

import asyncio
import sys
from pathlib import Path
from typing import Any

# run as a script: this project's packages first, because test folders have the same names; then the test modules
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(folder) for folder in (TESTS.parent, TESTS, TESTS / "fixtures")]

from fleet_history import History
from memory_journal import MemoryJournal

from controller.adapters.postgres.audit_helper import HelperPolicy
from controller.adapters.postgres.store import PostgresStore
from controller.replay.rebuild import rebuild


class Waiting(PostgresStore):
    """Waits for ever once everything is projected."""

    async def swap(self, fresh: Any, catch_up: Any, *, carry: bool) -> None:
        await fresh.complete()
        print(fresh.helper_pid, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    store: PostgresStore = Waiting(sys.argv[1], help_policy=HelperPolicy(events_min=1, cores_min=1))
    asyncio.run(rebuild(MemoryJournal(History().start().stream, "p"), store))
