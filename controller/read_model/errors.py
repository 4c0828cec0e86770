"""What a connection to the state store may raise, for those who need no more of the ports: a migration, above all."""

from events.errors import HoldfastError


class StoreUnavailable(HoldfastError):
    """The state store (Postgres) cannot be reached. Frontends route by the fold they hold; the journal keeps everything."""


class StoreGone(StoreUnavailable):
    """The server of the state store has no such database. Make it (`createdb`), and the projector fills it from the journal."""


class StoreReadOnly(StoreUnavailable):
    """The state store takes no writes now: the server is a standby, or the account only reads (`holdfast database grants`).
    Writers wait until it does."""


class StoreLogin(StoreUnavailable):
    """The state store does not let this account in: the password is another one, or the account is missing. Correct the URL or
    the account; what needs the store tries again by itself."""


class StoreRefused(HoldfastError):
    """The state store does not hold the tables that this version needs. `holdfast up` migrates it; so does the projector.
    Tables that were lost are made anew by `holdfast replay rebuild`."""


class StoreForbidden(StoreRefused):
    """The state store does not let this account do that: `holdfast database grants` prints what each account needs."""
