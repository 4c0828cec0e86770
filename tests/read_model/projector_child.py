"""A projector process that kills itself with SIGKILL when it reaches a step for the n-th time.

python projector_child.py NATS_URL DATABASE_URL SPOOL UNTIL STEP N
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from projector_steps import JournalSteps, StoreSteps

from controller.adapters.postgres.store import PostgresStore
from controller.runtime.projection.projector import Projector
from events.journal.nats import NatsJournal


async def main(nats_url: str, database_url: str, spool: str, until: int, wanted: str, nth: int) -> None:
    seen = 0

    async def step(name: str) -> None:
        nonlocal seen
        seen += name == wanted
        if name == wanted and seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    journal = await NatsJournal.connect(nats_url, "projector:child", Path(spool))
    store = PostgresStore(database_url, snapshot_every=20)
    await Projector(JournalSteps(journal, step), StoreSteps(store, step)).catch_up(until)
    await store.close()
    await journal.close()


if __name__ == "__main__":
    nats_url, database_url, spool, until, wanted, nth = sys.argv[1:]
    asyncio.run(main(nats_url, database_url, spool, int(until), wanted, int(nth)))
