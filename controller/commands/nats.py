"""`holdfast nats permissions`: who may say and hear what at a broker of one's own, as nats-server's configuration reads it.
`holdfast nats reader`: how a program of one's own comes to the events."""

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
# Give every process the one seed of its user, in a folder, and name that: HOLDFAST_NATS_URL=nats://HOST:4222?keys=FOLDER
# The seeds (*.nk) of all users are in {}
"""


def prepare(parser: argparse.ArgumentParser, kind: type[argparse.ArgumentParser]) -> Run:
    """Add the command; `kind` parses its arguments. Return what runs it."""
    kinds = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=kind)
    text = "print users and their permissions for a broker of your own, and make the seeds that are missing"
    command = kinds.add_parser("permissions", help=text, description=text, allow_abbrev=False)
    command.add_argument("--data", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    command.add_argument(
        "--keys",
        type=Path,
        metavar="FOLDER",
        help="where the seeds are, or are to be (default: the fleet's own)",
    )
    command.add_argument(
        "--worker",
        type=_user,
        action="append",
        default=[],
        metavar="NAME",
        help="a worker's name; NAME+N: a process of N workers (`--count N`); may be given more than once",
    )
    command.add_argument(
        "-o",
        dest="output",
        choices=("conf", "json"),
        default="conf",
        help="conf: the block authorization, with nkeys; json: names and subjects alone, for `nsc` or passwords",
    )
    text = "print how a program of yours comes to the broker, to read events: see docs/consumers.md"
    reader = kinds.add_parser("reader", help=text, description=text, allow_abbrev=False)
    reader.add_argument("--data", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    reader.add_argument(
        "-o", dest="output", choices=("text", "json"), default="text", help="how to print (default: text)"
    )
    command.set_defaults(run_nats=_permissions)
    reader.set_defaults(run_nats=_reader)
    return lambda args: int(args.run_nats(args))


def _reader(args: argparse.Namespace) -> int:
    own = str(find(args.data, READER)["nats_url"])
    said = {
        "url": own,
        "server": ",".join(urls.addresses(own)),
        "nkey": urls.account(own).get("nkeys_seed", ""),
        "inbox": urls.inbox(own),
    }
    if args.output == "json":
        print(json.dumps(said, indent=1))
        return 0
    print(f"HOLDFAST_NATS_URL={said['url']}")
    print(f"\nserver  {said['server']}")
    print(f"nkey    {said['nkey'] or '(none: this broker asks nobody who he is, or the URL says it)'}")
    print(f"inbox   {said['inbox']}")
    return 0


def _user(text: str) -> str:
    found = _WORKERS.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no worker's name, or NAME+N with N below 100000")
    return worker_user(found[1], int(found[2] or 1))


def _permissions(args: argparse.Namespace) -> int:
    if args.output == "json":
        print(json.dumps([asdict(user) for user in permissions.users(args.worker)], indent=1))
        return 0
    own = FleetDir(args.data).broker_keys
    if args.keys is None and not own.is_dir():
        raise UsageError(f"there are no seeds in {own}: name the folder that shall have them with --keys")
    folder = (args.keys or own).resolve()
    users = BrokerUsers(folder)
    users.make(args.worker)
    print(HEAD.format(folder) + users.written(), end="")
    return 0
