"""Errors of the state store.

They have a module of their own, so that schema migrations can import them without `controller.ports`.
"""

from events.errors import HoldfastError


class StoreUnavailable(HoldfastError):
    """The state store (Postgres) cannot be reached. Frontends route by the fold they hold; the journal keeps everything."""


class StoreGone(StoreUnavailable):
    """The server of the state store has no such database. Create it (`createdb`); the projector fills it from the journal."""


class StoreReadOnly(StoreUnavailable):
    """The state store accepts no writes now: the server is a standby, or the account is read-only (`holdfast database grants`).
    Processes that write wait until the store accepts writes again."""


class StoreLogin(StoreUnavailable):
    """The state store rejects this account's login: the password does not match, or the account is missing. Correct the URL or
    the account; processes that need the store retry by themselves."""


class StoreRefused(HoldfastError):
    """The state store does not have the tables that this version needs. `holdfast up` migrates it; so does the projector.
    Tables that were lost are rebuilt by `holdfast replay rebuild`."""


class StoreForbidden(StoreRefused):
    """The state store does not permit this to the account: `holdfast database grants` prints what each account needs."""
