"""The `holdfast` command: parses arguments and runs one command or process. Imports are lazy.

Exit codes: 0 success, 1 failure, 2 usage error, 3 finding (`replay verify`, or a projector that finds rows missing in its store).
"""

import argparse
import os
import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, NoReturn

from controller.config.variables import refuse_unknown
from controller.terminal_text import safe_output
from events.errors import Finding, HoldfastError, UsageError
from events.process.imports import without

Run = Callable[[argparse.Namespace], int]
USAGE = 2
FINDING = 3
INTERRUPTED = 130
ROLES = ("controller", "projector", "planner", "notifier", "frontend", "worker")
DRAWING = (
    "up",
    "demo",
    "top",
    "status",
    "plan",
)  # these move the cursor and escape untrusted text themselves
CLOSED = (*ROLES, "up", "demo")  # commands that write into a fleet's directory


class Parser(argparse.ArgumentParser):
    """Argument parser that reports usage errors in one sentence, with the `--help` of the command that failed."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reject unknown arguments here. argparse would pass them to the parent command's parser."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2 (usage)."""
        self.exit(USAGE, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


class VersionAction(argparse.Action):
    """Prints the version and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version

        print(f"holdfast {version('holdfast')}")
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
    if wanted in COMMANDS:
        with without("rich", "greenlet"):  # structlog imports both if they are installed
            import structlog  # noqa: F401
    parser = parser_for({wanted} if wanted else ())
    if not arguments:
        parser.print_help(sys.stderr)
        return USAGE
    args = parser.parse_args(arguments)
    if wanted not in ROLES:  # they set up their own logs
        from events.process import logs

        logs.quiet()
    if wanted in CLOSED:
        os.umask(0o077)  # files that they and their children create are private to the user
    if wanted in DRAWING or wanted in ROLES:
        return _guarded(args)
    with safe_output():  # names and reasons from workers and clients are untrusted
        return _guarded(args)


def parser_for(names: Container[str]) -> Parser:
    """Return the parser of all commands. Only the commands in `names` get their flags, because flags cost imports."""
    parser = Parser(
        prog="holdfast",
        description="Keeps the streams of an LLM inference fleet alive, and shows afterwards what happened and why.",
        epilog="`holdfast COMMAND --help` shows a command's flags. Exit codes: 0 success, 1 failure, 2 usage error, 3 finding.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=VersionAction, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    for name, (text, prepare) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name in names:
            command.set_defaults(run=prepare(command))
    return parser


def _guarded(args: argparse.Namespace) -> int:
    try:
        refuse_unknown(os.environ)
        run: Run = args.run
        return run(args)
    except UsageError as error:
        _say_why(error)
        return USAGE
    except HoldfastError as error:
        _say_why(error)
        return FINDING if isinstance(error, Finding) else 1


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


def _up(parser: argparse.ArgumentParser) -> Run:
    with without("aiohttp"):  # nats-py imports it for WebSocket brokers only
        from controller.processes import up, up_flags

    data_flag(parser)
    up_flags.add_arguments(parser)
    return up.run_cli


def _demo(parser: argparse.ArgumentParser) -> Run:
    from controller.demo import cli as demo

    demo.add_arguments(parser)
    return demo.run_cli


def _role(role: str) -> Callable[[argparse.ArgumentParser], Run]:
    def prepare(parser: argparse.ArgumentParser) -> Run:
        from controller.processes import roles

        data_flag(parser)
        return roles.prepare(role, parser)

    return prepare


def _worker(parser: argparse.ArgumentParser) -> Run:
    from workers import cli as worker

    worker.add_arguments(parser)

    def run(args: argparse.Namespace) -> int:
        worker.leave(worker.run_cli(args))  # exits even if an engine thread is stuck in a step
        return 0

    return run


def _operator(name: str) -> Callable[[argparse.ArgumentParser], Run]:
    def prepare(parser: argparse.ArgumentParser) -> Run:
        with without("aiohttp"):
            from controller.commands import operator_commands

        data_flag(parser)
        return operator_commands.prepare(name, parser)

    return prepare


def _replay(parser: argparse.ArgumentParser) -> Run:
    with without("aiohttp"):
        from controller.commands import operator_commands

    data_flag(parser)
    return operator_commands.prepare_replay(parser)


def _request(parser: argparse.ArgumentParser) -> Run:
    with without("aiohttp"):
        from controller.commands import operator_commands

    data_flag(parser)
    return operator_commands.prepare_request(parser)


def _journal(parser: argparse.ArgumentParser) -> Run:
    with without("aiohttp"):
        from controller.commands import journal

    data_flag(parser)
    return journal.prepare(parser, Parser)


def _fleet(parser: argparse.ArgumentParser) -> Run:
    with without("aiohttp"):
        from controller.commands import fleet

    data_flag(parser)
    return fleet.prepare(parser, Parser)


def _golden(parser: argparse.ArgumentParser) -> Run:
    with without("aiohttp"):
        from controller.commands.goldens import commands

    data_flag(parser)
    return commands.prepare(parser, Parser)


def _database(parser: argparse.ArgumentParser) -> Run:
    with without("aiohttp"):
        from controller.commands import database

    data_flag(parser)
    return database.prepare(parser, Parser)


def _nats(parser: argparse.ArgumentParser) -> Run:
    with without("aiohttp"):
        from controller.commands import nats

    data_flag(parser)
    return nats.prepare(parser, Parser)


def _route(parser: argparse.ArgumentParser) -> Run:
    from controller.commands import route

    data_flag(parser)
    return route.prepare(parser)


def _simulate(parser: argparse.ArgumentParser) -> Run:
    from controller.simulator import cli as simulate

    simulate.add_arguments(parser)
    return simulate.run_cli


def _trace(parser: argparse.ArgumentParser) -> Run:
    from controller.trace import cli as trace

    trace.add_arguments(parser)
    return trace.run_cli


def _plan(parser: argparse.ArgumentParser) -> Run:
    from controller.commands import plan

    data_flag(parser)
    return plan.prepare(parser)


def _cost(parser: argparse.ArgumentParser) -> Run:
    from controller.commands import cost

    return cost.prepare(parser)


def _scale(parser: argparse.ArgumentParser) -> Run:
    with without("aiohttp"):
        from controller.commands import scale

    data_flag(parser)
    return scale.prepare(parser)


def _profile(parser: argparse.ArgumentParser) -> Run:
    from controller.profiler import cli as profiler

    profiler.add_arguments(parser)
    return profiler.run_cli


def _model(parser: argparse.ArgumentParser) -> Run:
    from workers.engines import tiny

    kinds = parser.add_subparsers(title="models", metavar="KIND", required=True, parser_class=Parser)
    command = kinds.add_parser(
        "tiny", help="create a tiny seeded Llama for tests and rehearsals", allow_abbrev=False
    )
    tiny.add_arguments(command)
    return tiny.run_cli


def _settings(parser: argparse.ArgumentParser) -> Run:
    from controller.commands import show_settings

    return show_settings.prepare(parser)


def _webhooks(parser: argparse.ArgumentParser) -> Run:
    with without("aiohttp"):
        from controller.commands import webhooks

    data_flag(parser)
    return webhooks.prepare(parser, Parser)


def _scrape_config(parser: argparse.ArgumentParser) -> Run:
    from controller.commands import scrape_config

    data_flag(parser)
    return scrape_config.prepare(parser)


def _top(parser: argparse.ArgumentParser) -> Run:
    with without("aiohttp"):
        from controller.commands import top

    data_flag(parser)
    return top.prepare(parser)


def _completion(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell to generate the script for")

    def run(args: argparse.Namespace) -> int:
        import shtab

        print(shtab.complete(parser_for(COMMANDS), shell=args.shell))
        return 0

    return run


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], Run]]] = {
    "up": (
        "run a whole fleet on this host: broker, database, controller, projector, planner, frontends, workers",
        _up,
    ),
    "demo": ("inject every known fault into a fleet under load, and show the impact on its users", _demo),
    "status": ("show the current state of the fleet", _operator("status")),
    "top": ("watch the fleet and its latest events in a terminal", _top),
    "events": ("show the events on the journal", _operator("events")),
    "drain": ("stop sending new requests to a worker; running ones finish there or move", _operator("drain")),
    "resume": ("return a drained worker to service", _operator("resume")),
    "route": ("ask a frontend which worker would get a prompt, and why", _route),
    "move": (
        "move the running requests of a worker to other workers, with their KV cache",
        _operator("move"),
    ),
    "restart": ("restart workers gracefully, one after another", _operator("restart")),
    "chaos": ("inject a fault into a worker, or heal it", _operator("chaos")),
    "replay": ("show past events, past states and the reasons for decisions, from the journal", _replay),
    "request": (
        "show the history of one request: its workers, its moves, and which worker produced which tokens",
        _request,
    ),
    "journal": ("inspect messages on the journal that are not events, and quarantine events", _journal),
    "golden": (
        "show, approve, retire, record, export and import goldens: the expected answers to canaries",
        _golden,
    ),
    "fleet": (
        "show which event kinds and decider versions each process supports, and which are in force",
        _fleet,
    ),
    "database": ("manage the schema and the accounts of the database", _database),
    "nats": ("print users and permissions for an external broker", _nats),
    "webhooks": ("test a webhook, and list or resend events that a webhook did not accept", _webhooks),
    "simulate": ("run the deciders through faults in virtual time", _simulate),
    "trace": ("analyze recorded requests, generate similar ones, and replay them as load", _trace),
    "plan": ("show how many workers each model should have, now or on a recorded day", _plan),
    "cost": ("compare transfer with re-prefill on your hardware, and estimate failures and spares", _cost),
    "scale": (
        "set the number of workers of a model, overriding the planner, or return control to the planner",
        _scale,
    ),
    "profile": (
        "measure the speed of a running engine, so that simulated engines can reproduce it",
        _profile,
    ),
    "model": ("create a model to run", _model),
    "settings": ("print every setting and its effective value", _settings),
    "scrape-config": ("print a Prometheus configuration for a running fleet", _scrape_config),
    "completion": ("print a shell completion script", _completion),
    "controller": ("run a controller", _role("controller")),
    "projector": ("run a projector", _role("projector")),
    "planner": ("run a planner, which decides how many workers each model should have", _role("planner")),
    "notifier": ("run a notifier, which sends events to webhooks", _role("notifier")),
    "frontend": ("run a frontend", _role("frontend")),
    "worker": ("run a worker", _worker),
}

if __name__ == "__main__":
    sys.exit(main())
