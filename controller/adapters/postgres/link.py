"""A connection to Postgres that reconnects after failures and raises Holdfast's own errors.

A link has at most one connection, which only one task at a time may use. One connection suffices, because the projector and the
readers run few statements, one after another. After any failure, the link drops the connection, and the next use opens a new one.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import asyncpg

from controller.read_model.errors import (
    StoreForbidden,
    StoreGone,
    StoreLogin,
    StoreReadOnly,
    StoreRefused,
    StoreUnavailable,
)
from events.errors import HoldfastError

SCHEMA = "holdfast"
HEAD = "0002"  # the newest migration; a test compares it with the migrations folder
WRITES = "holdfast-projector"  # application_name of connections that write the projection


CONNECT_S = 5.0
COMMAND_S = 60.0

Connection: TypeAlias = Any  # asyncpg has no types


class StoreCannotKeep(HoldfastError):
    """The state store refuses a statement, and would refuse it again: this is a bug in Holdfast."""


class BadStoreUrl(HoldfastError):
    """A database URL has the form postgresql://user:password@host:port/database."""


AWAY = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # asyncpg's error for a connection that broke between two of its own messages
    asyncpg.InvalidCachedStatementError,  # the tables of a prepared statement have changed, so it must be prepared again
    asyncpg.OperatorInterventionError,  # shutting down, starting up
    asyncpg.InsufficientResourcesError,  # out of disk, memory or connections
    asyncpg.PostgresSystemError,  # a file of the database is missing or unreadable
    asyncpg.TransactionRollbackError,  # deadlock or serialisation failure, after which a retry may succeed
)
FORBIDDEN = (asyncpg.InsufficientPrivilegeError,)
LOGIN = (asyncpg.InvalidAuthorizationSpecificationError,)  # no such account, or a wrong password
READ_ONLY = (asyncpg.ReadOnlySQLTransactionError,)  # SQLSTATE 25006: a standby, or a reader's account
_TABLES_MISSING = (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError)
_TRANSLATIONS: tuple[tuple[tuple[type[BaseException], ...], type[HoldfastError]], ...] = (
    ((asyncpg.InvalidCatalogNameError,), StoreGone),
    (READ_ONLY, StoreReadOnly),  # the next connection may reach the new primary
    (LOGIN, StoreLogin),
    (FORBIDDEN, StoreForbidden),
    # a value that no column can store; asyncpg's error for it is an InterfaceError too
    ((ValueError, OverflowError, TypeError), StoreCannotKeep),
    (AWAY, StoreUnavailable),
    ((asyncpg.PostgresError,), StoreCannotKeep),
)
"""The Holdfast error for each kind of error that ends a connection. The first entry that matches applies."""


def plain(url: str) -> str:
    """Return a database URL for asyncpg: with `postgresql://` instead of SQLAlchemy's `postgresql+asyncpg://`."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme.split('+')[0]}{separator}{rest}"


def masked(url: str) -> str:
    """Return a database URL without its password, so that it may be shown."""
    scheme, separator, rest = url.partition("://")
    account, at, place = rest.rpartition("@")
    return f"{scheme}{separator}{account.split(':')[0]}{at}{place}"


class Link:
    """A database connection that is opened when it is used and dropped when it fails."""

    def __init__(self, url: str, schema: str = SCHEMA, settings: Mapping[str, str] | None = None) -> None:
        self._url = plain(url)
        self._settings = {
            "search_path": schema,
            "jit": "off",
            "application_name": "holdfast",
            **(settings or {}),
        }
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Connection]:
        """Yield the connection, to one task at a time. Other tasks wait.

        Raise StoreUnavailable (or a subclass) if the database cannot be reached or used now, StoreRefused if tables or rights are
        missing, and BadStoreUrl for an invalid URL.
        """
        async with self._lock:
            try:
                yield await self._open()
            except _TABLES_MISSING as error:
                raise self._translated(StoreRefused, error) from error
            except BaseException as error:
                self._drop()  # the connection may be in the middle of a statement, for example after a cancellation
                kind = next((kind for kinds, kind in _TRANSLATIONS if isinstance(error, kinds)), None)
                if kind is None:
                    raise
                raise self._translated(kind, error) from error

    def _translated(self, kind: type[HoldfastError], error: BaseException) -> HoldfastError:
        return kind(f"{masked(self._url)}: {str(error) or type(error).__name__}. {kind.__doc__}")

    async def _open(self) -> Connection:
        if self._connection is None or self._connection.is_closed():
            try:
                self._connection = await asyncpg.connect(
                    self._url, timeout=CONNECT_S, command_timeout=COMMAND_S, server_settings=self._settings
                )
            except ValueError as error:  # asyncpg cannot read the URL
                raise self._translated(BadStoreUrl, error) from error
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
        self._connection = None

    async def close(self) -> None:
        """Close the connection gracefully, or terminate it after 2 s."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                await connection.close(timeout=2.0)
            except AWAY:
                connection.terminate()


@asynccontextmanager
async def connected(url: str, schema: str = SCHEMA) -> AsyncIterator[Connection]:
    """Yield a connection that is closed after the `with` block. Raise the errors of `Link.use`."""
    link = Link(url, schema)
    try:
        async with link.use() as connection:
            yield connection
    finally:
        await link.close()
