"""`holdfast database`: manages the accounts and the schema of the state store."""

import argparse
import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from controller.adapters.postgres.schema import HEAD, SCHEMA
from controller.read_model.grants import OWNER, READER, WRITER, script
from events.errors import HoldfastError

Run = Callable[[argparse.Namespace], int]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")


class NoDatabase(HoldfastError):
    """The database of the fleet is not known yet: the fleet is still starting. Try again."""


def prepare(parser: argparse.ArgumentParser, kind: type[argparse.ArgumentParser]) -> Run:
    """Add the subcommands, parsed by `kind`. Return the function that runs them."""
    kinds = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=kind)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = kinds.add_parser(
            name, help=text, description=text, allow_abbrev=False
        )
        made.add_argument("--data", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        made.set_defaults(database=name)
        return made

    command(
        "reader", "print the URL for read access to the fleet's database (Grafana, psql, your own programs)"
    )
    grants = command(
        "grants", "print the SQL that creates the accounts and their rights in your own database"
    )
    for role, default in (("owner", OWNER), ("writer", WRITER), ("reader", READER)):
        grants.add_argument(
            f"--{role}",
            type=_account,
            default=default,
            metavar="NAME",
            help=f"name of the {role} account (default: {default})",
        )
    command("migrate", "migrate the tables to this release, with the account in HOLDFAST_DATABASE_URL")
    down = command(
        "downgrade",
        "revert migrations before installing an older release, with the account of `migrate`",
    )
    down.add_argument(
        "--to",
        required=True,
        metavar="REVISION",
        help="migration to return to, e.g. 0001; `base` drops every table, which the journal can rebuild",
    )
    return lambda args: _COMMANDS[args.database](args)


def _account(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid account name")
    return text


def _found(args: argparse.Namespace) -> dict[str, Any]:
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
    """Return the owner's URL, from the environment or from a running fleet."""
    return os.environ.get("HOLDFAST_DATABASE_URL") or str(_found(args)["database_owner_url"])


_COMMANDS: dict[str, Run] = {
    "reader": _reader,
    "grants": _grants,
    "migrate": _migrate,
    "downgrade": _downgrade,
}
