"""A rebuild that stands still in the middle, for a test to kill: says the pid of the process that helps it."""

import asyncio
import sys
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).parents[1])
)  # run as a script: the tests' own modules are beside this folder

from made_history import History

from controller.adapters import audit_helper
from controller.adapters.postgres import PostgresStore
from controller.replay.rebuild import rebuild
from events.journal.memory import MemoryJournal


class Waiting(PostgresStore):
    """Waits for ever once everything is projected."""

    async def swap(self, fresh: Any, catch_up: Any) -> None:
        await fresh.complete()
        print(fresh._helper.pid, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    audit_helper.WORTH_IT = audit_helper.CORES_MIN = 1
    asyncio.run(rebuild(MemoryJournal(History().start().stream, "p"), Waiting(sys.argv[1])))
