"""`holdfast controller | projector | planner | notifier | frontend`: runs one role, as `up` does."""

import argparse
import asyncio
import gc
import importlib
import os
from pathlib import Path

from controller.config.flags import add_flags, gather
from controller.config.sections import section
from controller.processes.collector import COLLECT_AT
from events.errors import BadSetting, HoldfastError
from events.nats.urls import as_user
from events.process.imports import without_ca_certificates
from workers.exits import LINGER_S, exit_within

CONNECTS_TO_WORKERS = ("controller", "frontend")
REQUIRES_DATABASE = ("projector", "planner")
# modules that do not have the name of the role
MODULES = {"planner": "planning.planner", "notifier": "notifying.notifier"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a role to the parser of the role's command. The command has the name of the role."""
    # collect rarely, because the objects of the following imports are never freed
    gc.set_threshold(*COLLECT_AT)
    role = parser.get_default("command")
    parser.add_argument("--name", default=role, help=f"name of this process (default: {role})")
    parser.add_argument(
        "--nats-url",
        default=os.environ.get("HOLDFAST_NATS_URL", ""),
        metavar="URL",
        help="URL of the broker (default: HOLDFAST_NATS_URL)",
    )
    parser.add_argument(
        "--database-url",
        default=os.environ.get("HOLDFAST_DATABASE_URL", ""),
        metavar="URL",
        help="URL of the database (default: HOLDFAST_DATABASE_URL)",
    )
    if role in CONNECTS_TO_WORKERS:
        text = "file with the fleet key, which workers must have too (default: none, no check)"
        parser.add_argument(
            "--fleet-key-file",
            default=os.environ.get("HOLDFAST_FLEET_KEY_FILE", ""),
            metavar="FILE",
            help=text,
        )
    add_flags(parser, section(role))


def run(args: argparse.Namespace) -> int:
    """Run a role until it ends, and return the exit code.

    Raise BadSetting if a setting is invalid or a required URL is missing. Errors of the role's process are raised too.
    """
    from controller import logs
    from events.fleet_key import FleetKey

    logs.configure()
    role = args.command
    settings = gather(section(role), role, vars(args))
    if role in REQUIRES_DATABASE and not args.database_url:
        raise BadSetting(f"the {role} needs --database-url or HOLDFAST_DATABASE_URL")
    if not args.nats_url and not getattr(settings, "static", None):
        raise BadSetting(f"the {role} needs --nats-url or HOLDFAST_NATS_URL")
    key = FleetKey.read(Path(args.fleet_key_file)) if getattr(args, "fleet_key_file", "") else None
    # NumPy starts a BLAS thread per core, which takes a tenth of a frontend's start. Routing multiplies no matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with without_ca_certificates():  # for aiohttp, which these roles import to serve and request HTTP
        module = importlib.import_module(f"controller.processes.{MODULES.get(role, role)}")
    start = getattr(module, f"run_{role}")
    work = start(
        settings,
        nats_url=as_user(args.nats_url, role),
        database_url=args.database_url or None,
        data=args.data,
        name=args.name,
        **({"key": key} if role in CONNECTS_TO_WORKERS else {}),
    )
    return _run(work)


def _run(work: object) -> int:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            result: int = runner.run(work)  # type: ignore[arg-type]
        except* HoldfastError as group:
            raise _first(group) from None
        exit_within(LINGER_S, result)
        return result


def _first(group: BaseExceptionGroup[HoldfastError]) -> HoldfastError:
    """Return the first error of an exception group, at any depth."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, HoldfastError)
    return error
