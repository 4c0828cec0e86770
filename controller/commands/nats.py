"""`holdfast nats permissions | reader`: users of an external broker, and access for event readers.

`permissions` prints them as nats-server's configuration. `reader` prints how a program of yours connects."""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from controller.adapters.embedded.nats_users import BrokerUsers
from controller.processes.fleet_dir import FleetDir
from controller.processes.operator_client import find
from events import permissions
from events.broker_users import worker_user
from events.errors import UsageError
from events.nats import urls

READER = "reader"
Run = Callable[[argparse.Namespace], int]
_WORKERS = re.compile(r"([^+]+?)(?:\+([1-9][0-9]{0,4}))?")
HEAD = """# Users of a Holdfast fleet: what each may publish and subscribe to, and nothing else.
# Give each process only the seed of its user, in a folder, and set HOLDFAST_NATS_URL=nats://HOST:4222?keys=FOLDER
# The seeds (*.nk) of all users are in {}
"""


def prepare(parser: argparse.ArgumentParser, kind: type[argparse.ArgumentParser]) -> Run:
    """Add the subcommands, parsed by `kind`. Return the function that runs them."""
    kinds = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=kind)
    text = "print users and permissions for an external broker, and create missing seeds"
    command = kinds.add_parser("permissions", help=text, description=text, allow_abbrev=False)
    command.add_argument("--data", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    command.add_argument(
        "--keys",
        type=Path,
        metavar="FOLDER",
        help="folder of the seeds (default: that of the fleet)",
    )
    command.add_argument(
        "--worker",
        type=_user,
        action="append",
        default=[],
        metavar="NAME",
        help="name of a worker; NAME+N: a process of N workers (`--count N`); repeatable",
    )
    command.add_argument(
        "-o",
        dest="output",
        choices=("conf", "json"),
        default="conf",
        help="conf: the `authorization` block with nkeys; json: names and subjects only, for `nsc` or passwords",
    )
    text = "print how a program connects to the broker to read events (see docs/guides/consumers.md)"
    reader = kinds.add_parser("reader", help=text, description=text, allow_abbrev=False)
    reader.add_argument("--data", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    reader.add_argument(
        "-o", dest="output", choices=("text", "json"), default="text", help="output format (default: text)"
    )
    command.set_defaults(run_nats=_permissions)
    reader.set_defaults(run_nats=_reader)
    return lambda args: int(args.run_nats(args))


def _reader(args: argparse.Namespace) -> int:
    own = str(find(args.data, READER)["nats_url"])
    access = {
        "url": own,
        "server": ",".join(urls.addresses(own)),
        "nkey": urls.account(own).get("nkeys_seed", ""),
        "inbox": urls.inbox(own),
    }
    if args.output == "json":
        print(json.dumps(access, indent=1))
        return 0
    print(f"HOLDFAST_NATS_URL={access['url']}")
    print(f"\nserver  {access['server']}")
    print(f"nkey    {access['nkey'] or '(none: this broker needs no login, or the URL contains it)'}")
    print(f"inbox   {access['inbox']}")
    return 0


def _user(text: str) -> str:
    found = _WORKERS.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a worker's name nor NAME+N with N below 100000"
        )
    return worker_user(found[1], int(found[2] or 1))


def _permissions(args: argparse.Namespace) -> int:
    if args.output == "json":
        print(json.dumps([asdict(user) for user in permissions.users(args.worker)], indent=1))
        return 0
    own = FleetDir(args.data).broker_keys
    if args.keys is None and not own.is_dir():
        raise UsageError(f"no seeds in {own}: name the folder to create them in with --keys")
    folder = (args.keys or own).resolve()
    users = BrokerUsers(folder)
    users.make(args.worker)
    print(HEAD.format(folder) + users.written(), end="")
    return 0
