"""Defines the flags of the commands that inspect or administer parts of a fleet, such as its journal."""

import argparse
import re
from pathlib import Path

from controller.common_flags import output_flag, subcommands
from events.broker_users import worker_user

SINCE = (
    "a sequence, an instant (2026-03-01T12:00:03Z), a time of day in UTC (12:00:03), or a time span ago (10m)"
)
GOLDEN_TEXTS = {
    "list": "show the goldens: status, since when, and the workers that agreed",
    "record": "retire the goldens of a worker's canary key, and record its answers as provisional goldens",
    "approve": "approve provisional goldens, or the latest answers of a worker",
    "retire": "retire goldens: they convict no worker any more, and workers vote on the next answers",
    "export": "export the agreed goldens as JSON",
    "import": "validate a file written by `export`, and approve its goldens",
}
TEMPLATES = ("cloudevents", "slack", "pagerduty")
_ACCOUNT = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")
_WORKERS = re.compile(r"([^+]+?)(?:\+([1-9][0-9]{0,4}))?")


def journal(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `holdfast journal`."""
    command = subcommands(parser, "journal")
    text = "list messages that are not Holdfast events, and the event at which readers stop (exit code 3)"
    inspect = command("inspect", text)
    inspect.add_argument("--since", metavar="WHEN", help=f"first message to show: {SINCE}")
    output_flag(inspect)
    text = "exclude an event at which readers stop: all readers skip it permanently"
    quarantine = command("quarantine", text)
    text = "sequence of the event, as shown by `inspect`"
    quarantine.add_argument("seq", metavar="SEQ", type=_sequence, help=text)
    quarantine.add_argument("--why", metavar="TEXT", required=True, help="reason to record on the journal")


def _sequence(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a sequence (1, 2 …)")
    return int(text)


def golden(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `holdfast golden`."""
    command = subcommands(parser, "golden")
    for name, text in GOLDEN_TEXTS.items():
        add = (made := command(name, text)).add_argument
        if name == "list":
            output_flag(made)
        if name == "export":
            add("-o", "--output", type=Path, metavar="FILE", help="output file (default: standard output)")
        if name == "import":
            add("file", metavar="FILE", type=Path, help="file written by `holdfast golden export`")
            continue
        if name == "record":
            add("worker", metavar="WORKER", help="worker to record the answers of")
        else:
            add("--model", metavar="M", default="", help="select the goldens of this model")
            add("--key", metavar="KEY", default="", help="select the goldens of this canary key")
        if name == "approve":
            add("--worker", metavar="W", default="", help="approve the latest answers of this worker")
        if name in ("record", "approve", "retire"):
            text = "select this canary only; repeatable"
            add("--canary", metavar="C", action="append", default=[], help=text)


def fleet(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `holdfast fleet`."""
    command = subcommands(parser, "fleet")
    versions = "show which event kinds and decider version each process supports, and which are in force"
    allow = "put everything that this release supports in force; processes that do not support it stop"
    for name, text in (("versions", versions), ("allow", allow)):
        output_flag(command(name, text))


def database(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `holdfast database`."""
    command = subcommands(parser, "database")
    text = "print the URL for read access to the fleet's database (Grafana, psql, your own programs)"
    command("reader", text)
    text = "print the SQL that creates the accounts and their rights in your own database"
    grants = command("grants", text)
    for role in ("owner", "writer", "reader"):
        name = f"holdfast_{role}"
        text = f"name of the {role} account (default: {name})"
        grants.add_argument(f"--{role}", type=_account, default=name, metavar="NAME", help=text)
    command("migrate", "migrate the tables to this release, with the account in HOLDFAST_DATABASE_URL")
    text = "revert migrations before installing an older release, with the account of `migrate`"
    down = command("downgrade", text)
    text = "migration to return to, e.g. 0001; `base` drops every table, which the journal can rebuild"
    down.add_argument("--to", required=True, metavar="REVISION", help=text)


def _account(text: str) -> str:
    if not _ACCOUNT.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid account name")
    return text


def nats(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `holdfast nats`."""
    command = subcommands(parser, "nats")
    text = "print users and permissions for an external broker, and create missing seeds"
    add = command("permissions", text).add_argument
    text = "folder of the seeds (default: that of the fleet)"
    add("--keys", type=Path, metavar="FOLDER", help=text)
    text = "name of a worker; NAME+N: a process of N workers (`--count N`); repeatable"
    add("--worker", type=_user, action="append", default=[], metavar="NAME", help=text)
    text = "conf: the `authorization` block with nkeys; json: names and subjects only, for `nsc` or passwords"
    add("-o", dest="output", choices=("conf", "json"), default="conf", help=text)
    text = "print how a program connects to the broker to read events (see docs/guides/consumers.md)"
    output_flag(command("reader", text))


def _user(text: str) -> str:
    found = _WORKERS.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a worker's name nor NAME+N with N below 100000"
        )
    return worker_user(found[1], int(found[2] or 1))


def webhooks(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `holdfast webhooks`."""
    command = subcommands(parser, "webhooks")
    text = "send a sample event (an incident that opens, and for PagerDuty also closes), and print the answer"
    _to(command("test", text))
    dead = command("dead", "list the events that webhooks did not accept, oldest first, with the reason")
    dead.add_argument("--webhook", default="", metavar="NAME", help="list only those of this webhook")
    output_flag(dead)
    text = "send the events again that webhooks did not accept, oldest first; accepted ones leave the list"
    resend = command("resend", text)
    _to(resend)
    resend.add_argument("--webhook", default="", metavar="NAME", help="send only those of this webhook")


def _to(command: argparse.ArgumentParser) -> None:
    """Add the flags that describe a webhook: its URL, template and secret."""
    text = "URL of the webhook, or @FILE for a file that contains it"
    command.add_argument("url", metavar="URL", help=text)
    text = "format of the request (default: cloudevents)"
    command.add_argument("--template", choices=TEMPLATES, default="cloudevents", help=text)
    text = "file with the signing secret, or PagerDuty's routing key"
    command.add_argument("--secret-file", default="", metavar="FILE", help=text)


def settings(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast settings`."""
    output_flag(parser)
    kind = parser.add_mutually_exclusive_group()
    text = "write a commented configuration file with all settings (default: to standard output)"
    kind.add_argument("--write", nargs="?", const="-", metavar="FILE", help=text)
    kind.add_argument("--schema", action="store_true", help="print the JSON Schema of the configuration file")
