"""Implements the `holdfast` program, which parses arguments and runs one command or process.

A command's modules are imported only when the command runs.

Exit codes: 0 success, 1 failure, 2 usage error, 3 finding. Findings are a difference that `replay verify` reports, an event at
which readers stop (`journal inspect`), and rows that a projector misses in its store.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

from controller.config.flag_groups import COMMON, group_flags, short_help
from controller.config.variables import refuse_unknown
from controller.terminal_text import safe_output
from events.errors import Finding, HoldfastError, UsageError
from events.process.imports import without

USAGE = 2
FINDING = 3
INTERRUPTED = 130
ROLES = ("controller", "projector", "planner", "notifier", "frontend", "worker")
# commands that move the cursor, and escape untrusted text themselves
DRAWING = ("up", "demo", "top", "status", "plan")
PRINTING = ("settings", "completion")  # commands that log nothing
CONFIGURED = (*ROLES, "up", "settings")  # commands with --config
CONFIG = "TOML file with settings, and for `up` its flags; environment and flags override it (docs/reference/commands.md)"
# commands without --data
DATALESS = ("demo", "simulate", "trace", "cost", "profile", "model", "settings", "completion", "worker")
# the other commands run without aiohttp, which nats-py imports but needs only for WebSocket brokers
WITH_AIOHTTP = (*ROLES, "demo", "trace", "profile")
SHELLS = ("bash", "zsh", "fish")  # with a completion script
COMPLETIONS = (
    Path(__file__).parent / "commands" / "completions"
)  # written by tests/fixtures/reference_docs.py
CLOSED = (*ROLES, "up", "demo")  # commands that write into a fleet's directory


class Parser(argparse.ArgumentParser):
    """Argument parser that reports a usage error in one sentence and names the command's `--help`."""

    commands: Mapping[str, argparse.ArgumentParser]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, and report unknown ones as errors of this command.

        Without this override, argparse would report unknown arguments as errors of the parent command.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def format_help(self) -> str:
        """Return the help text. For a command with many flags, the text lists only the common flags."""
        common = COMMON.get(self.get_default("command"))
        return short_help(self, common) if common else super().format_help()

    def error(self, message: str) -> NoReturn:
        """Print a usage error and exit with code 2."""
        self.exit(USAGE, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


class VersionAction(argparse.Action):
    """Prints the version and commit of Holdfast, and exits with code 0."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from controller.commands.version import version_text

        print(version_text())
        parser.exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return its exit code.

    If `argv` is None, the arguments are those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _main(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, because an error of flushing at interpreter exit could not be reported
    except KeyboardInterrupt:  # Ctrl-C, even while a command's modules are still imported
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as in `holdfast events | head`
        _hush()
        return 0
    except OSError as error:
        if _wanted(arguments) in ROLES:
            raise  # the role's log shows the traceback
        _hush()
        print(f"holdfast: {error}", file=sys.stderr)
        return 1


def _hush() -> None:
    """Redirect stdout to /dev/null after a write to stdout has failed.

    At exit, Python flushes stdout again. Without the redirection, this flush would report a second error.
    """
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
        os.umask(0o077)  # files that the process and its children create are private to the user
    if wanted in DRAWING or wanted in ROLES:
        return _guarded(args)
    with safe_output():  # names and reasons from workers and clients are untrusted
        return _guarded(args)


def _prepared(wanted: str | None, arguments: list[str]) -> tuple[Parser, list[str]]:
    """Return the parser, and the arguments including those that the configuration file adds.

    `wanted` is the name of the command, if the arguments contain one. Raise UsageError if --config has no value, and
    BadConfigFile or BadSetting if the file is invalid.
    """
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
    """Return the file that the last --config names, or None without --config.

    Raise UsageError if --config has no value.
    """
    found = None
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if flag == "--config" or flag.startswith("--config="):
            found = flag.partition("=")[2] if "=" in flag else value
    if found == "":
        raise UsageError("--config needs a FILE")
    return None if found is None else Path(found)


def parser_for(names: Container[str]) -> Parser:
    """Return the parser of all commands. Only the commands in `names` get their flags, because adding flags imports modules."""
    parser = Parser(
        prog="holdfast",
        description="Keeps the streams of an LLM inference fleet alive, and shows afterwards what happened and why.",
        epilog="`holdfast COMMAND --help` shows a command's flags. Exit codes: 0 success, 1 failure, 2 usage error, 3 finding.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=VersionAction, nargs=0, help="print version and commit, and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    parser.commands = commands.choices
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name not in names:
            continue
        command.set_defaults(command=name)
        if name not in DATALESS:
            data_flag(command)
        if name in CONFIGURED:
            command.add_argument("--config", type=Path, metavar="FILE", help=CONFIG)
        _loaded(PLACES[name][0])(command)
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
    with nullcontext() if args.command in WITH_AIOHTTP else without("aiohttp"):
        run = _loaded(PLACES[args.command][1])
    result = run(args)
    if isinstance(result, int):
        return result
    import asyncio

    return int(asyncio.run(result))


def _loaded(place: str) -> Callable[..., Any]:
    """Import and return the function that `place` names as `module:function`."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _say_why(error: HoldfastError) -> None:
    """Print an error on stderr. Control characters are escaped, because the error may quote text from a worker or a server."""
    with safe_output():
        print(f"holdfast: {error}", file=sys.stderr)


def data_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag --data, which selects the data directory of the fleet."""
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("HOLDFAST_DATA", ".holdfast")),
        metavar="DIR",
        help="data directory of the fleet (default: .holdfast, or HOLDFAST_DATA)",
    )


def tiny_model(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand `tiny` of `holdfast model`, which creates a tiny Llama model for tests."""
    from workers.engines import tiny

    kinds = parser.add_subparsers(title="models", metavar="KIND", required=True)
    text = "create a tiny seeded Llama for tests and rehearsals"
    tiny.add_arguments(kinds.add_parser("tiny", help=text, description=text, allow_abbrev=False))


def completion_flags(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `holdfast completion`."""
    parser.add_argument("shell", choices=SHELLS, help="shell of the script")


def completion(args: argparse.Namespace) -> int:
    """Print the completion script of a shell.

    The script is generated in advance, because shells run this command at their start and wait for it.
    """
    print((COMPLETIONS / f"holdfast.{args.shell}").read_text(encoding="utf-8"), end="")
    return 0


COMMANDS = {
    "up": "run a whole fleet on this host: broker, database, controller, projector, planner, frontends, workers",
    "demo": "inject every known fault into a fleet under load, and show the impact on its users",
    "status": "show the current state of the fleet",
    "top": "watch the fleet and its latest events in a terminal",
    "events": "show the events on the journal",
    "drain": "stop sending new requests to a worker; running ones finish there or move",
    "resume": "return a drained worker to service",
    "route": "ask a frontend which worker would get a prompt, and why",
    "move": "move the running requests of a worker to other workers, with their KV cache",
    "restart": "restart workers gracefully, one after another",
    "chaos": "inject a fault into a worker, or heal it",
    "upstream": "add, remove, pause, resume or list the upstreams of a running fleet",
    "reload": "have the processes of a fleet read their files again, and show what changed",
    "replay": "show past events, past states and the reasons for decisions, from the journal",
    "request": "show the history of one request: its workers, its moves, and which worker produced which tokens",
    "journal": "inspect messages on the journal that are not events, and quarantine events",
    "golden": "show, approve, retire, record, export and import goldens: the expected answers to canaries",
    "fleet": "show which event kinds and decider versions each process supports, and which are in force",
    "database": "manage the schema and the accounts of the database",
    "nats": "print users and permissions for an external broker",
    "webhooks": "test a webhook, and list or resend events that a webhook did not accept",
    "simulate": "run the deciders through faults in virtual time",
    "trace": "analyze recorded requests, generate similar ones, and replay them as load",
    "plan": "show how many workers each model should have, now or on a recorded day",
    "cost": "compare transfer with re-prefill on your hardware, and estimate failures and spares",
    "scale": "set the number of workers of a model, overriding the planner, or return control to the planner",
    "profile": "measure the speed of a running engine, so that simulated engines can reproduce it",
    "model": "create a model to run",
    "settings": "print every setting and its effective value",
    "scrape-config": "print a Prometheus configuration for a running fleet",
    "completion": "print a shell completion script",
    "controller": "run a controller",
    "projector": "run a projector",
    "planner": "run a planner, which decides how many workers each model should have",
    "notifier": "run a notifier, which sends events to webhooks",
    "frontend": "run a frontend",
    "worker": "run a worker",
}
"""The help of each command."""
PLACES = {
    "up": ("controller.processes.up_flags:add_arguments", "controller.processes.up:run"),
    "demo": ("controller.demo.flags:add_arguments", "controller.demo.cli:run"),
    "status": ("controller.commands.flags.operating:status", "controller.commands.status:run"),
    "top": ("controller.commands.flags.operating:top", "controller.commands.top:run"),
    "events": (
        "controller.commands.flags.operating:events",
        "controller.commands.operator_commands:show_events",
    ),
    "drain": ("controller.commands.flags.operating:drain", "controller.commands.operator_commands:drain"),
    "resume": ("controller.commands.flags.operating:resume", "controller.commands.operator_commands:resume"),
    "route": ("controller.commands.flags.operating:route", "controller.commands.route:run"),
    "move": ("controller.commands.flags.operating:move", "controller.commands.operator_commands:move"),
    "restart": (
        "controller.commands.flags.operating:restart",
        "controller.commands.operator_commands:restart_workers",
    ),
    "chaos": ("controller.commands.flags.operating:chaos", "controller.commands.operator_commands:chaos"),
    "upstream": (
        "controller.commands.flags.operating:upstream",
        "controller.commands.upstreams.commands:run",
    ),
    "reload": ("controller.commands.flags.operating:reload", "controller.commands.upstreams.reload:run"),
    "replay": ("controller.replay.flags:add_arguments", "controller.commands.replay:run"),
    "request": ("controller.replay.flags:add_request_arguments", "controller.commands.replay:run"),
    "journal": ("controller.commands.flags.inspecting:journal", "controller.commands.journal:run"),
    "golden": ("controller.commands.flags.inspecting:golden", "controller.commands.goldens.commands:run"),
    "fleet": ("controller.commands.flags.inspecting:fleet", "controller.commands.fleet:run"),
    "database": ("controller.commands.flags.inspecting:database", "controller.commands.database:run"),
    "nats": ("controller.commands.flags.inspecting:nats", "controller.commands.nats:run"),
    "webhooks": ("controller.commands.flags.inspecting:webhooks", "controller.commands.webhooks:run"),
    "simulate": ("controller.simulator.cli:add_arguments", "controller.simulator.cli:run_cli"),
    "trace": ("controller.trace.cli:add_arguments", "controller.trace.cli:run_cli"),
    "plan": ("controller.commands.flags.planning:plan", "controller.commands.plan:run"),
    "cost": ("controller.commands.cost:add_arguments", "controller.commands.cost:run"),
    "scale": ("controller.commands.flags.operating:scale", "controller.commands.scale:run"),
    "profile": ("controller.profiler.flags:add_arguments", "controller.profiler.cli:run"),
    "model": ("controller.cli:tiny_model", "workers.engines.tiny:run_cli"),
    "settings": ("controller.commands.flags.inspecting:settings", "controller.commands.show_settings:run"),
    "scrape-config": (
        "controller.commands.scrape_config:add_arguments",
        "controller.commands.scrape_config:run",
    ),
    "completion": ("controller.cli:completion_flags", "controller.cli:completion"),
    "worker": ("workers.cli:add_arguments", "workers.cli:run"),
    **dict.fromkeys(
        ROLES[:-1], ("controller.processes.roles:add_arguments", "controller.processes.roles:run")
    ),
}
"""The functions that add a command's flags and run it. They are imported when needed, so that `--help` imports no slow module."""

if __name__ == "__main__":
    sys.exit(main())
