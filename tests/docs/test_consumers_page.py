"""The programs of docs/guides/consumers.md run as the user `reader`, and resume where they stopped."""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typed_commands import run_command

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.nats_users import BrokerUsers, configuration
from events import permissions
from events.decisions import BreakerOpened
from events.follow import follow
from events.journal.nats import NatsJournal
from events.nats.urls import as_user, with_keys
from events.observations import CanaryFailed, RequestExposed, WorkerHeard

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "consumers.md").read_text()
AT = datetime(2026, 1, 1, tzinfo=UTC)
WITHIN_S = 20.0

pytestmark = pytest.mark.servers


def program(name: str) -> str:
    """Return one of the page's programs."""
    (found,) = re.findall(
        rf"^<!-- a test runs this program: {name} -->\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
    )
    return str(found)


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A broker that admits only known users, each with its permissions."""
    seeds = tmp_path / "seeds"
    BrokerUsers(seeds).make([])
    server = await start_nats(tmp_path / "nats", users=configuration(permissions.users([]), seeds))
    yield with_keys(server.url, seeds)
    await server.kill()


def environment(url: str) -> dict[str, str]:
    """Return the environment of the programs, from the output of `holdfast nats reader`."""
    done = run_command(("nats", "reader", "-o", "json"), {"HOLDFAST_NATS_URL": url})
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["inbox"] == "_INBOX.reader"
    return {"HOLDFAST_NATS_URL": said["url"], "SERVER": said["server"], "NKEY": said["nkey"]}


async def lines(file: Path, url: str, wanted: int, *words: str) -> Sequence[str]:
    """Run a program until it has printed `wanted` lines, then kill it like a crash."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(file), *words),
        env={**os.environ, **environment(url)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    found: list[str] = []
    try:
        async with asyncio.timeout(WITHIN_S):
            while len(found) < wanted:
                found.append((await process.stdout.readline()).decode().strip())
                assert found[-1], "it has ended"
    finally:
        process.kill()
        await process.communicate()
    return found


def heard(number: int) -> WorkerHeard:
    return WorkerHeard(worker="w1", instance=f"i{number}", observer="o")


def failed(worker: str) -> CanaryFailed:
    return CanaryFailed(
        worker=worker, instance="i", canary_key="k", canary="c", check_type="scheduled", sent_under=0, sent_at=AT,
        latency_ms=5.0, reason="token_mismatch", confirmed=True,
    )  # fmt: skip


async def test_the_nats_py_program_resumes_where_it_stopped(url: str, tmp_path: Path) -> None:
    text, file = program("nats-py"), tmp_path / "consumer.py"
    assert len([line for line in text.splitlines() if line.strip()]) <= 21
    file.write_text(text)
    journal = await NatsJournal.connect(as_user(url, "controller"), "test:docs", tmp_path / "spool")
    try:
        said = [journal.observe(heard(n)) for n in range(5)]
        assert await journal.flush(5)
        first = [json.loads(line) for line in await lines(file, url, 5, "audit", "fleet.observed.>")]
        assert [row["id"] for row in first] == said
        assert first[0]["kind"] == "holdfast.worker_heard" and first[0]["instance"] == "i0"
        later = [journal.observe(heard(n)) for n in range(5, 8)]
        assert await journal.flush(5)
        second = [json.loads(line) for line in await lines(file, url, 3, "audit", "fleet.observed.>")]
    finally:
        await journal.close()
    fresh = [row["id"] for row in second if row["id"] not in said]
    assert fresh == later[: len(fresh)] and fresh


@pytest.mark.slow
async def test_the_typed_program_prints_the_selected_events(url: str, tmp_path: Path) -> None:
    (file := tmp_path / "pager.py").write_text(program("follow"))
    journal = await NatsJournal.connect(as_user(url, "controller"), "test:docs", tmp_path / "spool")
    clients = await NatsJournal.connect(as_user(url, "frontend"), "test:clients", tmp_path / "other")
    try:
        journal.observe(heard(1))
        journal.observe(failed("w2"))
        assert await journal.flush(5)
        clients.observe(
            RequestExposed(
                frontend="f", request="r-7", model="m", worker="w2", instance="i", first=0, last=3, finished=True, action="none"
            )
        )  # fmt: skip
        assert await clients.flush(5)
        found = await lines(file, url, 2)
    finally:
        await journal.close()
        await clients.close()
    assert [line.partition(" ")[2] for line in found] == [
        "w2 answered wrong: token_mismatch",
        "r-7 holds tokens of w2",
    ]


async def test_a_consumer_without_a_name_starts_from_the_beginning_each_time(
    url: str, tmp_path: Path
) -> None:
    journal = await NatsJournal.connect(as_user(url, "controller"), "test:docs", tmp_path / "spool")
    try:
        said = [journal.observe(heard(n)) for n in range(3)]
        assert await journal.flush(5)
        for _ in range(2):
            following = follow(environment(url)["HOLDFAST_NATS_URL"])
            async with asyncio.timeout(WITHIN_S):
                found = [(await anext(following)).id for _ in said]
            await following.aclose()
            assert found == said
    finally:
        await journal.close()


async def test_the_faststream_program_prints_opened_breakers(url: str, tmp_path: Path) -> None:
    (file := tmp_path / "breakers.py").write_text(program("faststream"))
    journal = await NatsJournal.connect(as_user(url, "controller"), "controller:docs", tmp_path / "spool")
    try:
        journal.observe(failed("w2"))
        assert await journal.flush(5)
        opened = BreakerOpened(
            number=1,
            decided_at=AT,
            worker="w2",
            instance="i",
            retry_at=AT,
            wait_s=60.0,
            reason="token_mismatch",
        )
        await journal.append([opened], through=1, after=0)
        (line,) = await lines(file, url, 1)
    finally:
        await journal.close()
    assert line.partition(" ")[2] == "w2 token_mismatch"
