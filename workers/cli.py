"""Runs one worker process (`holdfast worker`)."""

import argparse
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from events.errors import HoldfastError, UsageError
from events.process.imports import without
from workers.config.settings import WorkerSettings, annotations, groups
from workers.config.settings_check import load_settings, with_broker_user
from workers.config.simulated_settings import FLAGS
from workers.exits import BROKE, FAILED, USAGE

RESOLVER_THREADS = "64"
GC_THRESHOLDS = (20_000, 20, 50)  # objects: startup creates many objects and almost no garbage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each worker setting, in groups.

    Some flags have an alias, which is the flag of NVIDIA Dynamo's mocker for the same setting.
    """
    defaults = WorkerSettings()
    for title, settings in groups().items():
        group = parser.add_argument_group(title)
        for name, description in settings.items():
            flags = ["--" + name.replace("_", "-"), *FLAGS.get(name, ())]
            text, value = description.replace("%", "%%"), getattr(defaults, name)
            if isinstance(value, bool):
                action = argparse.BooleanOptionalAction
                group.add_argument(*flags, dest=name, action=action, default=None, help=text)
            else:
                default = "" if value in (None, "") else f" (default: {value})"
                group.add_argument(*flags, dest=name, default=None, metavar="X", help=text + default)


def run_cli(args: argparse.Namespace) -> int:
    """Run a worker as configured by the flags and the environment; return its exit code."""
    return exit_code(lambda: _run({name: getattr(args, name, None) for name in annotations()}))


def exit_code(run: Callable[[], int]) -> int:
    """Call `run` and return its exit code. If `run` raises, report the error and return the error's exit code.

    The exit code is USAGE for a UsageError, FAILED for any other HoldfastError, and BROKE for every other exception.
    """
    try:
        return run()
    except UsageError as error:
        print(f"holdfast worker: {error}", file=sys.stderr)
        return USAGE
    except HoldfastError as error:
        print(f"holdfast worker: {error}", file=sys.stderr)
        return FAILED
    # Python's own exit code would be FAILED, which means that the worker recorded its end
    except Exception as error:
        import structlog

        structlog.get_logger(__name__).critical("worker_broke", exc_info=error)
        return BROKE


def _run(flags: Mapping[str, object]) -> int:
    gc.set_threshold(*GC_THRESHOLDS)
    settings = with_broker_user(load_settings(flags))
    if settings.upstreams is not None:
        # libuv's threads resolve host names; a name that does not resolve keeps one busy for seconds
        os.environ.setdefault("UV_THREADPOOL_SIZE", RESOLVER_THREADS)
    # optional imports of structlog (rich, greenlet) and nats-py (aiohttp)
    with without("rich", "greenlet", "aiohttp"):
        import uvloop

        from events.process import logs
        from workers import keeper
        from workers.runtime import run_worker

    logs.configure()
    kept = None if settings.watch_only else keeper.keep()
    return uvloop.run(run_worker(settings, kept))


def run(args: argparse.Namespace) -> NoReturn:
    """Run a worker, then end the process with the worker's exit code."""
    leave(run_cli(args))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker from the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="holdfast worker", description=__doc__, allow_abbrev=False)
    add_arguments(parser)
    return run_cli(parser.parse_args(argv))


def leave(code: int) -> NoReturn:
    """End the process with `code`.

    If the worker failed or other threads still run, skip Python's cleanup, which a thread stuck in an engine step would block.
    """
    with contextlib.suppress(OSError, ValueError):  # the readers of stdout and stderr may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    if code == FAILED or threading.active_count() > 1:
        os._exit(code)
    sys.exit(code)
