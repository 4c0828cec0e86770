"""A self-healing connection to Postgres that raises our own errors.

A link holds at most one connection and lets one task use it at a time: projector and readers have few statements and need them in
order. After any failure, the link drops the connection; the next use opens another.
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
    asyncpg.InvalidCachedStatementError,  # the tables changed under a prepared statement: it must be prepared again
    asyncpg.OperatorInterventionError,  # shutting down, starting up
    asyncpg.InsufficientResourcesError,  # out of disk, memory or connections
    asyncpg.PostgresSystemError,  # one of its own files is missing, or unreadable
    asyncpg.TransactionRollbackError,  # deadlock, serialisation: retry
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
    # a value that no column can hold; asyncpg's own is an InterfaceError too
    ((ValueError, OverflowError, TypeError), StoreCannotKeep),
    (AWAY, StoreUnavailable),
    ((asyncpg.PostgresError,), StoreCannotKeep),
)
"""Our own error for each kind of error that ends a connection; the first that matches."""


def plain(url: str) -> str:
    """Return a URL in asyncpg's form: SQLAlchemy's `postgresql+asyncpg://` becomes `postgresql://`."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme.split('+')[0]}{separator}{rest}"


def masked(url: str) -> str:
    """Return a URL that may be shown: without its password."""
    scheme, separator, rest = url.partition("://")
    account, at, place = rest.rpartition("@")
    return f"{scheme}{separator}{account.split(':')[0]}{at}{place}"


class Link:
    """A connection that is opened when needed and dropped when it fails."""

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
        """Yield the connection to one task at a time. Raise StoreUnavailable (StoreGone), StoreRefused or BadStoreUrl."""
        async with self._lock:
            try:
                yield await self._open()
            except _TABLES_MISSING as error:
                raise self._translated(StoreRefused, error) from error
            except BaseException as error:
                self._drop()  # cancelled in the middle of a statement, or a bug: start with a new connection
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
        """Close the connection, gracefully if that is quick."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                await connection.close(timeout=2.0)
            except AWAY:
                connection.terminate()


@asynccontextmanager
async def connected(url: str, schema: str = SCHEMA) -> AsyncIterator[Connection]:
    """Yield a connection that is closed after the block. Raise the errors of `Link.use`."""
    link = Link(url, schema)
    try:
        async with link.use() as connection:
            yield connection
    finally:
        await link.close()
