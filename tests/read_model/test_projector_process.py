"""The projector as a process."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from controller.adapters.embedded.server import EmbeddedServer

pytestmark = pytest.mark.servers

SCRIPT = """
import asyncio, sys
from pathlib import Path
from waits import until
from controller.adapters.postgres.store import PostgresStore
from controller.processes.projector import run_projector
from controller.runtime.settings import ProjectorSettings
from events.journal.nats import NatsJournal
from events.observations import ResumeRequested
from events.process.presence import present

async def main(nats_url, database_url, data):
    journal, store = await NatsJournal.connect(nats_url, "test:process"), PostgresStore(database_url)
    where = {"nats_url": nats_url, "database_url": database_url, "data": data, "name": "projector"}
    projecting = asyncio.ensure_future(run_projector(ProjectorSettings(admin_port=0), **where))
    await until(lambda: present(data), 60)
    ready = set(sys.modules)
    journal.observe(ResumeRequested(worker="w0", instance="w0-a"))


    async def stored():
        return (await store.position()).seq >= 1

    await until(stored, 60)
    print([name for name in set(sys.modules) - ready if name.startswith(("sqlalchemy", "controller."))])
    projecting.cancel()

asyncio.run(main(*sys.argv[1:3], Path(sys.argv[3])))
"""


@pytest.mark.slow
async def test_the_first_events_do_not_wait_for_imports(
    own_nats: EmbeddedServer, database_url: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SCRIPT, own_nats.url, database_url, str(tmp_path / "data")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    try:
        async with asyncio.timeout(60):
            said, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert said.decode().splitlines()[-1:] == ["[]"], said.decode() + complaint.decode()
