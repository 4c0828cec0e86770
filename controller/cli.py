"""The `holdfast` command: reads arguments and composes a process. Imports wait until a command needs them.

Exit codes: 0 done, 1 failed, 2 usage, 3 a finding (`replay verify`, a projector whose store has lost rows).
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
)  # these move the cursor, and clean what they show themselves
CLOSED = (*ROLES, "up", "demo")  # who write into a fleet's directory


class Parser(argparse.ArgumentParser):
    """Says what was wrong in one sentence, and where help is: that of the command that was meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is not known here: argparse would leave it to the command above this one."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with 2, usage."""
        self.exit(USAGE, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


class VersionAction(argparse.Action):
    """Prints which Holdfast this is, and ends."""

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
                sys.stdout.flush()  # at the exit nobody could say any more that it failed
    except KeyboardInterrupt:  # also while a command's imports still run
        return INTERRUPTED
    except BrokenPipeError:  # `holdfast events | head`
        _hush()
        return 0
    except OSError as error:
        if _wanted(arguments) in ROLES:
            raise  # their log wants to know where
        _hush()
        print(f"holdfast: {error}", file=sys.stderr)
        return 1


def _hush() -> None:
    """Send what is still to be printed nowhere: Python would try once more at the exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _wanted(arguments: Sequence[str]) -> str | None:
    return next((a for a in arguments if not a.startswith("-")), None)


def _main(arguments: list[str]) -> int:
    wanted = _wanted(arguments)
    if wanted in COMMANDS:
        with without("rich", "greenlet"):  # structlog would draw tracebacks with the one, and knows the other
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
        os.umask(0o077)  # whatever they and their children write is their own user's alone
    if wanted in DRAWING or wanted in ROLES:
        return _guarded(args)
    with safe_output():  # names and reasons of others reach no terminal as they are
        return _guarded(args)


def parser_for(names: Container[str]) -> Parser:
    """Return the parser of all commands, with the flags of those of these names: each costs the imports behind it."""
    parser = Parser(
        prog="holdfast",
        description="Keeps the streams of an LLM inference fleet alive, and can say afterwards what happened and why.",
        epilog="`holdfast COMMAND --help` shows a command's flags. Exit codes: 0 done, 1 failed, 2 usage, 3 a finding.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action=VersionAction, nargs=0, help="say which version this is, and exit"
    )
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
    """Add --data, which nearly every command has."""
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("HOLDFAST_DATA", ".holdfast")),
        metavar="DIR",
        help="the fleet's data directory (default: .holdfast, or HOLDFAST_DATA)",
    )


def _up(parser: argparse.ArgumentParser) -> Run:
    with without("aiohttp"):  # nats-py wants it for WebSocket brokers
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
        worker.leave(worker.run_cli(args))  # even where an engine's thread is stuck in a step
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
        "tiny", help="a tiny seeded Llama, for tests and rehearsals", allow_abbrev=False
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
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="for which shell")

    def run(args: argparse.Namespace) -> int:
        import shtab

        print(shtab.complete(parser_for(COMMANDS), shell=args.shell))
        return 0

    return run


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], Run]]] = {
    "up": ("run a whole fleet: broker, database, controller, projector, planner, frontends, workers", _up),
    "demo": ("break a fleet under load in every way we know, and show what its users noticed", _demo),
    "status": ("show the fleet as it is", _operator("status")),
    "top": ("watch the fleet and what happens in it, on a terminal", _top),
    "events": ("show the facts on the journal", _operator("events")),
    "drain": ("give a worker nothing new; what it runs moves on, or finishes there", _operator("drain")),
    "resume": ("take a drained worker back into service", _operator("resume")),
    "route": ("ask a frontend which worker would get a prompt, and why", _route),
    "move": ("move what runs on a worker elsewhere, with its KV cache", _operator("move")),
    "restart": ("let workers end in good order, one after another, and come back", _operator("restart")),
    "chaos": ("break a worker on purpose, or heal it", _operator("chaos")),
    "replay": ("what happened, how it was, and why: read the journal", _replay),
    "request": ("what became of one request: where it was, how it moved, whose tokens it holds", _request),
    "journal": ("what on the journal is no event, and what shall not count as one", _journal),
    "golden": (
        "show, approve, retire, record, export and import goldens: the right answers to canaries",
        _golden,
    ),
    "fleet": ("which kinds of facts and which deciders each process knows, and what is in force", _fleet),
    "database": ("who may read and write the database, and how", _database),
    "nats": ("who may say and hear what at a broker of one's own", _nats),
    "webhooks": ("try a webhook, and see and send again what one has not taken", _webhooks),
    "simulate": ("drive the deciders through faults in virtual time", _simulate),
    "trace": ("analyze recorded requests, make more like them, and send them as load", _trace),
    "plan": ("how many workers there should be, now or on a recorded day", _plan),
    "cost": ("compare transfer with re-prefill on your hardware, and estimate failures and spares", _cost),
    "scale": (
        "set how many workers a model has, whatever the planner says, or leave that to it again",
        _scale,
    ),
    "profile": ("measure how fast a running engine is, for simulated ones to be as fast", _profile),
    "model": ("make a model to run", _model),
    "settings": ("print every setting and its effective value", _settings),
    "scrape-config": ("print a configuration of Prometheus for a fleet that runs", _scrape_config),
    "completion": ("print what lets a shell complete commands and flags", _completion),
    "controller": ("run the controller alone", _role("controller")),
    "projector": ("run the projector alone", _role("projector")),
    "planner": ("run the planner alone: how many workers each model should have", _role("planner")),
    "notifier": ("run the notifier alone: it tells webhooks what happens", _role("notifier")),
    "frontend": ("run a frontend alone", _role("frontend")),
    "worker": ("run a worker alone", _worker),
}

if __name__ == "__main__":
    sys.exit(main())
