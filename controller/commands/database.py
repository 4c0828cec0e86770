"""`holdfast database reader | grants | migrate | downgrade`: accounts and schema of the state store."""

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
    """The fleet's database is not known yet: it has only begun to start. Try again."""


def prepare(parser: argparse.ArgumentParser, kind: type[argparse.ArgumentParser]) -> Run:
    """Add the commands; `kind` parses their arguments. Return what runs them."""
    kinds = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=kind)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = kinds.add_parser(
            name, help=text, description=text, allow_abbrev=False
        )
        made.add_argument("--data", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        made.set_defaults(database=name)
        return made

    command(
        "reader", "print the URL with which Grafana, psql or a program of yours may read the fleet's database"
    )
    grants = command(
        "grants", "print the SQL that makes accounts for a database of your own, and their rights"
    )
    for role, default in (("owner", OWNER), ("writer", WRITER), ("reader", READER)):
        grants.add_argument(
            f"--{role}", type=_account, default=default, metavar="NAME", help=f"its name (default: {default})"
        )
    command("migrate", "bring the tables up to date, as the account that HOLDFAST_DATABASE_URL names")
    down = command(
        "downgrade",
        "take migrations of the tables back, before an older release is installed; the account is that of `migrate`",
    )
    down.add_argument(
        "--to",
        required=True,
        metavar="REVISION",
        help="migration to return to, for example 0001; `base` drops every table (the journal can fill them again)",
    )
    return lambda args: _COMMANDS[args.database](args)


def _account(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of an account")
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
    print(f"the tables are those of this version (migration {HEAD})")
    return 0


def _downgrade(args: argparse.Namespace) -> int:
    from controller.adapters.postgres import migrate

    print(asyncio.run(migrate.take_back(_database(args), args.to)))
    return 0


def _database(args: argparse.Namespace) -> str:
    """Return the owner's URL, by the environment or of a fleet that runs."""
    return os.environ.get("HOLDFAST_DATABASE_URL") or str(_found(args)["database_owner_url"])


_COMMANDS: dict[str, Run] = {
    "reader": _reader,
    "grants": _grants,
    "migrate": _migrate,
    "downgrade": _downgrade,
}
