"""`holdfast nats`: prints the users of an external broker, or how an event reader connects.

`permissions` prints the users as nats-server's configuration. `reader` prints the URL with which an operator's own program can
read events."""

import argparse
import json
from dataclasses import asdict

from controller.adapters.embedded.nats_users import BrokerUsers
from controller.processes.fleet_dir import FleetDir
from controller.processes.operator_client import find
from events import permissions
from events.errors import UsageError
from events.nats import urls

READER = "reader"
HEAD = """# Users of a Holdfast fleet: what each may publish and subscribe to, and nothing else.
# Give each process only the seed of its user, in a folder, and set HOLDFAST_NATS_URL=nats://HOST:4222?keys=FOLDER
# The seeds (*.nk) of all users are in {}
"""


def run(args: argparse.Namespace) -> int:
    """Run the subcommand `reader` or `permissions`, and return exit code 0. Raise HoldfastError if the subcommand fails."""
    return _reader(args) if args.nats == "reader" else _permissions(args)


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
