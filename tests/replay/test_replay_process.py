"""The replay commands as processes, against real servers."""

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest
from fleet_history import History, publish
from typed_commands import run_command

from controller.adapters.postgres.store import PostgresStore
from controller.commands import replay
from controller.runtime.projection.projector import Projector
from events.journal.nats import NatsJournal

pytestmark = pytest.mark.servers


async def typed(nats_url: str, database_url: str, *words: str) -> tuple[int, str, str]:
    """Run `holdfast replay …` and return exit code, standard output and standard error."""
    servers = {"HOLDFAST_NATS_URL": nats_url, "HOLDFAST_DATABASE_URL": database_url}
    done = await asyncio.to_thread(run_command, ["replay", *words], os.environ | servers)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
async def test_every_command_answers(nats_url: str, database_url: str, tmp_path: Path) -> None:
    history = History().start().corruption()
    journal = await NatsJournal.connect(nats_url, "projector:test", tmp_path)
    last = await publish(nats_url, history.events)
    store = PostgresStore(database_url)
    await Projector(journal, store).catch_up(last)
    await store.close()
    await journal.close()
    code, out, _ = await typed(nats_url, database_url, "verify")
    assert code == 0 and "no difference" in out
    code, out, _ = await typed(nats_url, database_url, "timeline", "--worker", "w2", "-o", "json")
    assert code == 0 and [json.loads(line) for line in out.splitlines()]
    code, out, _ = await typed(nats_url, database_url, "at", str(last), "-o", "json")
    assert code == 0 and len(json.loads(out)["workers"]) == 3
    code, out, _ = await typed(nats_url, database_url, "why", f"decision:{history.latest.position.number}")
    assert code == 0 and "because" in out
    code, out, _ = await typed(nats_url, database_url, "rebuild", "-o", "json")
    assert code == 0 and json.loads(out)["position"] == last
    code, out, err = await typed(nats_url, database_url, "at", "tomorrow")
    assert (code, out) == (1, "") and "'tomorrow' is not a place in the journal" in err


async def test_without_a_store_the_journal_answers(nats_url: str) -> None:
    journal = await NatsJournal.connect(nats_url, "projector:test")
    last = await publish(nats_url, History().start().events)
    await journal.close()
    nowhere = "postgresql://holdfast@127.0.0.1:1/nowhere"
    code, out, err = await typed(nats_url, nowhere, "at", str(last))
    assert code == 0 and "w0" in out and "reading only the journal" in err
    code, _, err = await typed(nats_url, nowhere, "verify")
    assert code == 1 and "needs the state store" in err


async def test_an_unreachable_journal_is_reported(database_url: str) -> None:
    code, _, err = await typed("nats://127.0.0.1:1", database_url, "verify")
    assert code == 1 and len(err.strip().splitlines()[-1]) < 400


async def test_a_store_that_does_not_answer_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as deaf:  # accepts connections and never answers
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        store = PostgresStore(f"postgresql://x@127.0.0.1:{deaf.getsockname()[1]}/x")
        assert await replay.reached(store, within_s=0.2) is None
        await store.close()
    assert "reading only the journal: the state store does not answer" in capsys.readouterr().err
