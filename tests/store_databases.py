"""Stores and databases for tests: one per test, cloned from a migrated one (25 ms instead of 300)."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import asyncpg
import first_database
import pytest
from memory_store import MemoryStore, MemoryTables

from controller.adapters.embedded.cluster_sql import connect_rights
from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.postgres.store import PostgresStore

_numbers = itertools.count()
AnyStore = MemoryStore | PostgresStore
OpenStore = Callable[..., AnyStore]


def on(url: str, database: str) -> str:
    """Return the URL of another database of the same server."""
    return re.sub(r"/[^/]*$", f"/{database}", url)


async def execute(url: str, statement: str, *arguments: object) -> Any:
    """Run one statement on a new connection and return its result."""
    connection = await asyncpg.connect(url, timeout=10)
    try:
        return await connection.fetch(statement, *arguments)
    finally:
        await connection.close()


async def tamper(tester_url: str, statement: str, *arguments: object) -> None:
    """Run one statement as no role of a fleet could: no trigger sees it."""
    connection = await asyncpg.connect(tester_url, timeout=10)
    try:
        await connection.execute("SET session_replication_role = replica")
        await connection.execute(statement, *arguments)
    finally:
        await connection.close()


async def clone(server: EmbeddedServer, template: str = first_database.NAME) -> str:
    """Make a fresh copy of a database, with the same owner, and return the owner's URL."""
    name = f"t{next(_numbers)}"
    tester = first_database.tester_url(server)
    await execute(tester, f"CREATE DATABASE {name} TEMPLATE {template}")
    for statement in connect_rights(name):
        await execute(tester, statement)
    return on(first_database.urls(server).owner, name)


async def drop(server: EmbeddedServer, url: str) -> None:
    """Drop a database that `clone` made."""
    async with asyncio.timeout(20):
        await execute(
            first_database.tester_url(server), f"DROP DATABASE {url.rpartition('/')[2]} WITH (FORCE)"
        )


@pytest.fixture
def database_url(postgres_server: EmbeddedServer, background: Any) -> Iterator[str]:
    """A migrated database for one test, as its owner sees it."""
    url = background.run(clone(postgres_server))
    yield url
    background.run(drop(postgres_server, url))


@pytest.fixture
def tester_url(postgres_server: EmbeddedServer, database_url: str) -> str:
    """The same database, as a superuser sees it."""
    return first_database.tester_url(postgres_server, database_url.rpartition("/")[2])


@pytest.fixture
def empty_database_url(postgres_server: EmbeddedServer, background: Any) -> Iterator[str]:
    """An empty database for one test."""
    url = background.run(clone(postgres_server, "template1"))
    yield url
    background.run(drop(postgres_server, url))


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.servers)])
def place_to_store(request: pytest.FixtureRequest) -> str | MemoryTables:
    """The place of one test's store: a database's URL, or tables in memory."""
    return request.getfixturevalue("database_url") if request.param == "postgres" else MemoryTables()


@pytest.fixture
async def open_store(place_to_store: str | MemoryTables) -> AsyncIterator[OpenStore]:
    """`open_store(snapshot_every=…)` opens one more handle on the test's store."""
    opened: list[AnyStore] = []

    def make(snapshot_every: int = 5_000) -> AnyStore:
        if isinstance(place_to_store, str):
            opened.append(PostgresStore(place_to_store, snapshot_every=snapshot_every))
        else:
            opened.append(MemoryStore(place_to_store, snapshot_every=snapshot_every))
        return opened[-1]

    yield make
    for store in opened:
        await store.close()
