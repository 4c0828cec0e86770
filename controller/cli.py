"""The `holdfast` command: parses arguments and runs one command or process. Imports are lazy.

Exit codes: 0 success, 1 failure, 2 usage error, 3 finding (`replay verify`, or a projector that finds rows missing in its store).
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from controller.config.flag_groups import COMMON, group_flags, short_help
from controller.config.variables import refuse_unknown
from controller.terminal_text import safe_output
from events.errors import Finding, HoldfastError, UsageError
from events.process.imports import without

USAGE = 2
FINDING = 3
INTERRUPTED = 130
ROLES = ("controller", "projector", "planner", "notifier", "frontend", "worker")
DRAWING = ("up", "demo", "top", "status", "plan")  # move the cursor, and escape untrusted text themselves
PRINTING = ("settings", "completion")  # commands that log nothing
CONFIGURED = (*ROLES, "up", "settings")  # commands with --config
CONFIG = "TOML file with settings, and for `up` its flags; environment and flags override it (docs/reference/commands.md)"
CLOSED = (*ROLES, "up", "demo")  # commands that write into a fleet's directory


class Parser(argparse.ArgumentParser):
    """Argument parser that reports usage errors in one sentence, with the `--help` of the command that failed."""

    commands: Mapping[str, argparse.ArgumentParser]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reject unknown arguments here. argparse would pass them to the parent command's parser."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def format_help(self) -> str:
        """Return the help text. For a command with many flags it lists only the common ones."""
        common = COMMON.get(self.get_default("command"))
        return short_help(self, common) if common else super().format_help()

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2 (usage)."""
        self.exit(USAGE, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


class VersionAction(argparse.Action):
    """Prints version and commit, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from controller.commands.version import version_text

        print(version_text())
        parser.exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _main(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # a failure during interpreter exit could not be reported
    except KeyboardInterrupt:  # also while a command's imports still run
        return INTERRUPTED
    except BrokenPipeError:  # `holdfast events | head`
        _hush()
        return 0
    except OSError as error:
        if _wanted(arguments) in ROLES:
            raise  # the role's log shows the traceback
        _hush()
        print(f"holdfast: {error}", file=sys.stderr)
        return 1


def _hush() -> None:
    """Redirect stdout to /dev/null. Python would flush again at exit and report a second error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _wanted(arguments: Sequence[str]) -> str | None:
    return next((a for a in arguments if not a.startswith("-")), None)


def _main(arguments: list[str]) -> int:
    wanted = _wanted(arguments)
    try:
        parser, arguments = _prepared(wanted, arguments)
    except UsageError as error:
        _say_why(error)
        return USAGE
    if not arguments:
        parser.print_help(sys.stderr)
        return USAGE
    args = parser.parse_args(arguments)
    if wanted not in PRINTING:
        with without("rich", "greenlet"):  # structlog imports both if they are installed
            from events.process import logs
        if wanted not in ROLES:  # roles set up their own logs
            logs.quiet()
    if wanted in CLOSED:
        os.umask(0o077)  # files that they and their children create are private to the user
    if wanted in DRAWING or wanted in ROLES:
        return _guarded(args)
    with safe_output():  # names and reasons from workers and clients are untrusted
        return _guarded(args)


def _prepared(wanted: str | None, arguments: list[str]) -> tuple[Parser, list[str]]:
    """Return the parser, and the arguments with those that the configuration file adds. Raise UsageError."""
    path = _config_file(arguments) if wanted in CONFIGURED else None
    if path is None or wanted is None:
        return parser_for({wanted} if wanted else ()), arguments
    from controller.commands.configuration import config_file

    if wanted in ROLES:
        config_file.apply(path, os.environ, (wanted,))
        return parser_for({wanted}), arguments  # the file's settings are now in the environment
    from controller.processes.up_flags import VARIABLES, flags_by_key, setting_of

    given = [*arguments, *(flag for flag, variable in VARIABLES.items() if variable in os.environ)]
    table = config_file.apply(path, os.environ)
    parser = parser_for({wanted, "up"})
    added = config_file.arguments(path, table, flags_by_key(parser.commands["up"]), setting_of, given)
    if wanted == "up":
        at = arguments.index(wanted) + 1
        arguments[at:at] = added
    return parser, arguments


def _config_file(arguments: Sequence[str]) -> Path | None:
    """Return the file that the last --config names. Raise UsageError if it names none."""
    found = None
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if flag == "--config" or flag.startswith("--config="):
            found = flag.partition("=")[2] if "=" in flag else value
    if found == "":
        raise UsageError("--config needs a FILE")
    return None if found is None else Path(found)


def parser_for(names: Container[str]) -> Parser:
    """Return the parser of all commands. Only the commands in `names` get their flags, because flags cost imports."""
    parser = Parser(
        prog="holdfast",
        description="Keeps the streams of an LLM inference fleet alive, and shows afterwards what happened and why.",
        epilog="`holdfast COMMAND --help` shows a command's flags. Exit codes: 0 success, 1 failure, 2 usage error, 3 finding.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=VersionAction, nargs=0, help="print version and commit, and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    parser.commands = commands.choices
    for name, one in COMMANDS.items():
        command = commands.add_parser(name, help=one.help, description=one.help, allow_abbrev=False)
        if name not in names:
            continue
        command.set_defaults(command=name)
        if one.data:
            data_flag(command)
        if name in CONFIGURED:
            command.add_argument("--config", type=Path, metavar="FILE", help=CONFIG)
        _loaded(one.flags)(command)
        if name in COMMON:
            group_flags(command)
    return parser


def _guarded(args: argparse.Namespace) -> int:
    try:
        refuse_unknown(os.environ)
        return _run(args)
    except UsageError as error:
        _say_why(error)
        return USAGE
    except HoldfastError as error:
        _say_why(error)
        return FINDING if isinstance(error, Finding) else 1


def _run(args: argparse.Namespace) -> int:
    command = COMMANDS[args.command]
    with nullcontext() if command.aiohttp else without("aiohttp"):
        run = _loaded(command.run)
    result = run(args)
    if isinstance(result, int):
        return result
    import asyncio

    return int(asyncio.run(result))


def _loaded(place: str) -> Callable[..., Any]:
    """Import `module:function`."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _say_why(error: HoldfastError) -> None:
    """Print an error, which may quote a worker or a server."""
    with safe_output():
        print(f"holdfast: {error}", file=sys.stderr)


def data_flag(parser: argparse.ArgumentParser) -> None:
    """Add --data, which nearly every command accepts."""
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("HOLDFAST_DATA", ".holdfast")),
        metavar="DIR",
        help="data directory of the fleet (default: .holdfast, or HOLDFAST_DATA)",
    )


def tiny_model(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand of `holdfast model`."""
    from workers.engines import tiny

    kinds = parser.add_subparsers(title="models", metavar="KIND", required=True)
    text = "create a tiny seeded Llama for tests and rehearsals"
    tiny.add_arguments(kinds.add_parser("tiny", help=text, allow_abbrev=False))


def completion_flags(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `holdfast completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell to generate the script for")


def completion(args: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    import shtab

    print(shtab.complete(parser_for(COMMANDS), shell=args.shell))
    return 0


class CliCommand(NamedTuple):
    """One command: its help, and the functions that add its flags and run it, as `module:function`. The functions are imported
    when they are needed, so that `--help` imports no slow module."""

    help: str
    flags: str
    run: str
    data: bool = True  # whether it has --data
    aiohttp: bool = False  # whether it needs aiohttp, which nats-py imports for WebSocket brokers only


OPERATING = "controller.commands.flags.operating:"
INSPECTING = "controller.commands.flags.inspecting:"
OPERATOR = "controller.commands.operator_commands:"
ROLE = ("controller.processes.roles:add_arguments", "controller.processes.roles:run", True, True)

COMMANDS: dict[str, CliCommand] = {
    "up": CliCommand(
        "run a whole fleet on this host: broker, database, controller, projector, planner, frontends, workers",
        "controller.processes.up_flags:add_arguments",
        "controller.processes.up:run",
    ),
    "demo": CliCommand(
        "inject every known fault into a fleet under load, and show the impact on its users",
        "controller.demo.flags:add_arguments",
        "controller.demo.cli:run",
        data=False,
        aiohttp=True,
    ),
    "status": CliCommand(
        "show the current state of the fleet", OPERATING + "status", "controller.commands.status:run"
    ),
    "top": CliCommand(
        "watch the fleet and its latest events in a terminal",
        OPERATING + "top",
        "controller.commands.top:run",
    ),
    "events": CliCommand("show the events on the journal", OPERATING + "events", OPERATOR + "show_events"),
    "drain": CliCommand(
        "stop sending new requests to a worker; running ones finish there or move",
        OPERATING + "drain",
        OPERATOR + "drain",
    ),
    "resume": CliCommand("return a drained worker to service", OPERATING + "resume", OPERATOR + "resume"),
    "route": CliCommand(
        "ask a frontend which worker would get a prompt, and why",
        OPERATING + "route",
        "controller.commands.route:run",
    ),
    "move": CliCommand(
        "move the running requests of a worker to other workers, with their KV cache",
        OPERATING + "move",
        OPERATOR + "move",
    ),
    "restart": CliCommand(
        "restart workers gracefully, one after another", OPERATING + "restart", OPERATOR + "restart_workers"
    ),
    "chaos": CliCommand("inject a fault into a worker, or heal it", OPERATING + "chaos", OPERATOR + "chaos"),
    "replay": CliCommand(
        "show past events, past states and the reasons for decisions, from the journal",
        "controller.replay.flags:add_arguments",
        "controller.commands.replay:run",
    ),
    "request": CliCommand(
        "show the history of one request: its workers, its moves, and which worker produced which tokens",
        "controller.replay.flags:add_request_arguments",
        "controller.commands.replay:run",
    ),
    "journal": CliCommand(
        "inspect messages on the journal that are not events, and quarantine events",
        INSPECTING + "journal",
        "controller.commands.journal:run",
    ),
    "golden": CliCommand(
        "show, approve, retire, record, export and import goldens: the expected answers to canaries",
        INSPECTING + "golden",
        "controller.commands.goldens.commands:run",
    ),
    "fleet": CliCommand(
        "show which event kinds and decider versions each process supports, and which are in force",
        INSPECTING + "fleet",
        "controller.commands.fleet:run",
    ),
    "database": CliCommand(
        "manage the schema and the accounts of the database",
        INSPECTING + "database",
        "controller.commands.database:run",
    ),
    "nats": CliCommand(
        "print users and permissions for an external broker",
        INSPECTING + "nats",
        "controller.commands.nats:run",
    ),
    "webhooks": CliCommand(
        "test a webhook, and list or resend events that a webhook did not accept",
        INSPECTING + "webhooks",
        "controller.commands.webhooks:run",
    ),
    "simulate": CliCommand(
        "run the deciders through faults in virtual time",
        "controller.simulator.cli:add_arguments",
        "controller.simulator.cli:run_cli",
        data=False,
    ),
    "trace": CliCommand(
        "analyze recorded requests, generate similar ones, and replay them as load",
        "controller.trace.cli:add_arguments",
        "controller.trace.cli:run_cli",
        data=False,
        aiohttp=True,
    ),
    "plan": CliCommand(
        "show how many workers each model should have, now or on a recorded day",
        "controller.commands.flags.planning:plan",
        "controller.commands.plan:run",
    ),
    "cost": CliCommand(
        "compare transfer with re-prefill on your hardware, and estimate failures and spares",
        "controller.commands.cost:add_arguments",
        "controller.commands.cost:run",
        data=False,
    ),
    "scale": CliCommand(
        "set the number of workers of a model, overriding the planner, or return control to the planner",
        OPERATING + "scale",
        "controller.commands.scale:run",
    ),
    "profile": CliCommand(
        "measure the speed of a running engine, so that simulated engines can reproduce it",
        "controller.profiler.flags:add_arguments",
        "controller.profiler.cli:run",
        data=False,
        aiohttp=True,
    ),
    "model": CliCommand(
        "create a model to run", "controller.cli:tiny_model", "workers.engines.tiny:run_cli", data=False
    ),
    "settings": CliCommand(
        "print every setting and its effective value",
        INSPECTING + "settings",
        "controller.commands.show_settings:run",
        data=False,
    ),
    "scrape-config": CliCommand(
        "print a Prometheus configuration for a running fleet",
        "controller.commands.scrape_config:add_arguments",
        "controller.commands.scrape_config:run",
    ),
    "completion": CliCommand(
        "print a shell completion script",
        "controller.cli:completion_flags",
        "controller.cli:completion",
        data=False,
    ),
    "controller": CliCommand("run a controller", *ROLE),
    "projector": CliCommand("run a projector", *ROLE),
    "planner": CliCommand("run a planner, which decides how many workers each model should have", *ROLE),
    "notifier": CliCommand("run a notifier, which sends events to webhooks", *ROLE),
    "frontend": CliCommand("run a frontend", *ROLE),
    "worker": CliCommand(
        "run a worker", "workers.cli:add_arguments", "workers.cli:run", data=False, aiohttp=True
    ),
}

if __name__ == "__main__":
    sys.exit(main())
