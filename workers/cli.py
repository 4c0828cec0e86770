"""`holdfast worker`: one worker process."""

import argparse
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from events.errors import HoldfastError, UsageError
from events.process.imports import without
from workers.config.settings import WorkerSettings, annotations
from workers.config.settings_check import as_ourselves, load_settings
from workers.config.simulated_settings import FLAGS
from workers.exits import BROKE, FELL, USAGE

COLLECT_AT = (20_000, 20, 50)  # objects: a start makes many, and next to no garbage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each setting, and the names that Dynamo's mocker has for some."""
    defaults = WorkerSettings()
    for name, annotation in annotations().items():
        flag, text = "--" + name.replace("_", "-"), get_args(annotation)[-1].description.replace("%", "%%")
        # argparse shows the flags that a parser has nowhere else
        if any(flag in action.option_strings for action in parser._actions):
            continue
        flags = [flag, *FLAGS.get(name, ())]
        value = getattr(defaults, name)
        if isinstance(value, bool):
            parser.add_argument(
                *flags, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            default = "" if value in (None, "") else f" (default: {value})"
            parser.add_argument(*flags, dest=name, default=None, metavar="X", help=text + default)


def run_cli(args: argparse.Namespace) -> int:
    """Run a worker as the flags and the environment say; return its exit code."""
    return exit_code(lambda: _run({name: getattr(args, name, None) for name in annotations()}))


def exit_code(run: Callable[[], int]) -> int:
    """Run a worker; return its exit code, also where it raises: why is said on stderr."""
    try:
        return run()
    except UsageError as error:
        print(f"holdfast worker: {error}", file=sys.stderr)
        return USAGE
    except HoldfastError as error:
        print(f"holdfast worker: {error}", file=sys.stderr)
        return FELL
    except Exception as error:  # Python's own exit code would be FELL, and say that the fleet knows of it
        import structlog

        structlog.get_logger(__name__).critical("worker_broke", exc_info=error)
        return BROKE


def _run(flags: Mapping[str, Any]) -> int:
    gc.set_threshold(*COLLECT_AT)
    settings = as_ourselves(load_settings(flags))
    with without("rich", "greenlet", "aiohttp"):  # wanted by structlog, structlog and nats-py
        import uvloop

        from events.process import logs
        from workers import keeper
        from workers.runtime import run_worker

    logs.configure()
    kept = None if settings.watch_only else keeper.keep()
    return uvloop.run(run_worker(settings, kept))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker from the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="holdfast worker", description=__doc__, allow_abbrev=False)
    add_arguments(parser)
    return run_cli(parser.parse_args(argv))


def leave(code: int) -> None:
    """End the process with `code`: at once if it fell, and even where an engine's thread is stuck in a step."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads them any more
        sys.stdout.flush()
        sys.stderr.flush()
    if code == FELL or threading.active_count() > 1:
        os._exit(code)
    sys.exit(code)
