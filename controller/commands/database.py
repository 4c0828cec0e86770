"""`holdfast database`: manages the accounts and the schema of the state store."""

import argparse
import asyncio
import os
from collections.abc import Callable

from controller.adapters.postgres.link import HEAD, SCHEMA
from controller.read_model.grants import script
from events.errors import HoldfastError

Run = Callable[[argparse.Namespace], int]


class NoDatabase(HoldfastError):
    """The database of the fleet is not known yet: the fleet is still starting. Try again."""


def _found(args: argparse.Namespace) -> dict[str, object]:
    from controller.processes.operator_client import find

    found = find(args.data)
    if not found["database_url"]:
        raise NoDatabase
    return found


def _reader(args: argparse.Namespace) -> int:
    print(_found(args)["database_url"])
    return 0


def _grants(args: argparse.Namespace) -> int:
    print(script(SCHEMA, owner=args.owner, writer=args.writer, reader=args.reader))
    return 0


def _migrate(args: argparse.Namespace) -> int:
    from controller.adapters.postgres import migrate

    asyncio.run(migrate.upgrade(_database(args)))
    print(f"the tables are at migration {HEAD}, as this release needs")
    return 0


def _downgrade(args: argparse.Namespace) -> int:
    from controller.adapters.postgres import migrate

    print(asyncio.run(migrate.take_back(_database(args), args.to)))
    return 0


def _database(args: argparse.Namespace) -> str:
    """Return the database URL of the owner account, from HOLDFAST_DATABASE_URL or from a running fleet."""
    return os.environ.get("HOLDFAST_DATABASE_URL") or str(_found(args)["database_owner_url"])


_COMMANDS: dict[str, Run] = {
    "reader": _reader,
    "grants": _grants,
    "migrate": _migrate,
    "downgrade": _downgrade,
}


def run(args: argparse.Namespace) -> int:
    """Run one subcommand of `holdfast database`, and return its exit code. Raise HoldfastError if the subcommand fails."""
    return _COMMANDS[args.database](args)
