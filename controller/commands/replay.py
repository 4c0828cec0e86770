"""Runs `holdfast replay` and `holdfast request` on a fleet's journal and state store."""

import argparse
import asyncio
import sys

import structlog

from controller.adapters.postgres.store import PostgresStore
from controller.ports import StoreForbidden, StoreRefused, StoreUnavailable
from controller.processes import collector
from controller.processes.operator_client import find
from controller.replay import cli
from events.journal.nats import NatsJournal

REACH_S = 3.0  # timeout in seconds for connecting to the journal and to the state store
ALL_OF_IT = ("verify", "rebuild", "what-if")  # commands that may read the whole journal


def run(args: argparse.Namespace) -> int:
    """Connect to a fleet's journal and state store, run one replay command, and return its exit code.

    Raise HoldfastError if the command fails."""
    found = find(args.data)
    if not structlog.is_configured():
        # log to stderr, because stdout must contain only the result
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        url = found["database_owner_url" if args.replay == "rebuild" else "database_url"]
        return runner.run(_run(args, found["nats_url"], url))


async def _run(args: argparse.Namespace, nats_url: str, database_url: str) -> int:
    journal = await NatsJournal.connect(nats_url, f"replay:{args.replay}", wait_s=REACH_S, make=False)
    store = PostgresStore(database_url) if database_url else None
    try:
        if args.replay in ALL_OF_IT:
            collector.freeze_and_tune(collector.COLLECT_HISTORY_AT)
        return await cli.execute(args, journal, await reached(store))
    finally:
        if store is not None:
            await store.close()
        await journal.close()


async def reached(store: PostgresStore | None, within_s: float = REACH_S) -> PostgresStore | None:
    """Return the state store if it answers within `within_s` seconds, else print a note and return None.

    Without the store, replay reads only the journal, which is slower. Raise StoreForbidden if the store denies access."""
    if store is None:
        return None
    try:
        async with asyncio.timeout(within_s):
            await store.position()
    except StoreForbidden:
        raise
    except StoreRefused:  # the store answers but lacks tables, which a rebuild creates
        return store
    except (StoreUnavailable, TimeoutError) as error:
        print(
            f"holdfast: reading only the journal: {str(error) or 'the state store does not answer'}",
            file=sys.stderr,
        )
        return None
    return store
