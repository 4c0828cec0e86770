"""Plans which processes `holdfast up` starts, and the environment of each process."""

import argparse
import os
import sys
from collections.abc import Iterator

from controller.processes.children import Child
from controller.processes.fleet_dir import FleetDir
from controller.processes.notifying.webhook_flags import has_notifier, webhook_variables
from controller.processes.up_flags import controller_variables, frontend_variables, listed_upstreams, spares
from events.broker_users import worker_user
from workers.config.settings_check import UPSTREAMS_NAME

GRACE = "HOLDFAST_FRONTEND__GRACE_S"
GRACE_S = 10.0  # default for `up`, so that Ctrl-C does not block a terminal for long


def seconds(variable: str, default: float) -> float:
    """Return the number of seconds that the environment variable `variable` sets.

    Return `default` if the variable is missing or invalid. An invalid value is not reported here, because the process that
    uses the variable refuses to start and reports the reason.
    """
    try:
        return float(os.environ.get(variable) or default)
    except ValueError:
        return default


def frontend_grace_s() -> float:
    """Return the number of seconds for which streams may continue when the fleet stops."""
    return seconds(GRACE, GRACE_S)


def plan(args: argparse.Namespace, directory: FleetDir) -> Iterator[Child]:
    """Yield all processes that can start without the database: controller, notifier, frontends, workers and spares."""
    yield _child(directory, "controller", "controller", _controller(args))
    if has_notifier(args, os.environ):
        yield _child(directory, "notifier", "notifier", webhook_variables(args))
    for n in range(args.frontends):
        own = {
            "HOLDFAST_FRONTEND__HOST": args.host,
            "HOLDFAST_FRONTEND__PORT": str(args.port),
            "HOLDFAST_FRONTEND__REQUEST_PLANE": args.request_plane,
            GRACE: os.environ.get(GRACE) or str(GRACE_S),
            **frontend_variables(args),
        }
        yield _child(directory, "frontend", f"frontend-{n}", own)
    if args.upstreams is not None:
        yield upstreams(args, directory)
        return
    workers, share = len(names(args)), args.workers_per_process
    for n in range(0, workers, share):
        count = min(share, workers - n)
        yield worker(args, directory, n, count)
    for n in range(len(spare_names(args))):
        yield spare(args, directory, n)


def worker(args: argparse.Namespace, directory: FleetDir, number: int, count: int = 1) -> Child:
    """Return one process that runs `count` workers, which are numbered consecutively, starting with `number`."""
    own = {**_worker(args, number), "HOLDFAST_WORKER_COUNT": str(count)}
    return _child(directory, "worker", f"w{number}", own, count)


def upstreams(args: argparse.Namespace, directory: FleetDir) -> Child:
    """Return the process that runs one worker for each upstream of a file."""
    own = {
        "HOLDFAST_WORKER_ENGINE": args.engine,
        "HOLDFAST_WORKER_UPSTREAMS": str(args.upstreams.resolve()),
        **_shared(args),
    }
    return _child(directory, "worker", UPSTREAMS_NAME, own, 0)


def spare(args: argparse.Namespace, directory: FleetDir, number: int) -> Child:
    """Return the process of the spare with this number."""
    own = {**_worker(args, len(names(args)) + number), "HOLDFAST_WORKER_SPARE": "true"}
    return _child(directory, "worker", f"s{number}", own)


def names(args: argparse.Namespace) -> list[str]:
    """Return the names of the fleet's workers at the start, without the spares."""
    if args.upstreams is not None:
        return [
            entry.name for entry in listed_upstreams(args.upstreams) if not (entry.pause or entry.discover)
        ]
    servers = len(args.upstream) - spares(args, 0) if args.engine == "openai" else args.workers
    return [f"w{n}" for n in range(servers)]


def spare_names(args: argparse.Namespace) -> list[str]:
    """Return the names of the fleet's spares."""
    return [f"s{n}" for n in range(spares(args, len(names(args))))]


def accounts(args: argparse.Namespace, child: Child) -> list[str]:
    """Return the broker accounts of a process's workers. Workers that come later create their accounts themselves."""
    if child.role != "worker":
        return []
    if child.workers:
        return [worker_user(child.name, child.workers)]
    return [worker_user(name) for name in names(args)]


def database_processes(args: argparse.Namespace, directory: FleetDir) -> Iterator[Child]:
    """Yield the processes that need the database: the projector, and the planner unless it is off."""
    yield _child(directory, "projector", "projector", {})
    if args.planner_mode != "off":
        yield _child(directory, "planner", "planner", {"HOLDFAST_PLANNER__MODE": args.planner_mode})


def _child(directory: FleetDir, role: str, name: str, environment: dict[str, str], workers: int = 1) -> Child:
    command = [sys.executable, "-m", "controller.cli", role, "--data", str(directory.path), "--name", name]
    return Child(name, role, command, directory.logs / f"{name}.log", environment, workers)


def _controller(args: argparse.Namespace) -> dict[str, str]:
    given = {
        "REQUEST_PLANE": args.request_plane,
        "CANARY__INTERVAL_S": args.canary_interval,
        "POLICY__BREAKER__WAIT_MIN": args.breaker_wait,
        "POLICY__BREAKER__BACKOFF": args.breaker_backoff,
        "POLICY__SPARES__ON_RETURN": args.spares_on_return,
    }
    own = {f"HOLDFAST_CONTROLLER__{name}": str(value) for name, value in given.items() if value is not None}
    own |= controller_variables(args)
    return {"HOLDFAST_CONTROLLER__CHAOS": "true" if args.chaos else "false", **own}


def _worker(args: argparse.Namespace, n: int) -> dict[str, str]:
    own = {"HOLDFAST_WORKER_ENGINE": args.engine, **_shared(args)}
    if args.engine == "openai":
        own["HOLDFAST_WORKER_UPSTREAM"] = args.upstream[n]
        if keys := args.upstream_key_file:
            own["HOLDFAST_WORKER_UPSTREAM_KEY_FILE"] = str(keys[n % len(keys)].resolve())
        if revisions := args.revision:
            own["HOLDFAST_WORKER_REVISION"] = revisions[n % len(revisions)]
        for name in ("upstream_kv_events", "upstream_kv_replay"):
            if given := getattr(args, name):
                own[f"HOLDFAST_WORKER_{name.upper()}"] = given[n]
    if args.itl_ms is not None:
        own["HOLDFAST_WORKER_ITL_MS"] = str(args.itl_ms)
    return own


def _shared(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment that all worker processes have."""
    own = {"HOLDFAST_WORKER_REQUEST_PLANE": args.request_plane}
    own["HOLDFAST_WORKER_NAME_CHECK_S"] = "0"  # not needed, because `up` starts only one process per name
    if args.ready_timeout is not None:
        own["HOLDFAST_WORKER_READY_TIMEOUT"] = str(args.ready_timeout)
    if args.model is not None:
        own["HOLDFAST_WORKER_MODEL"] = str(args.model.resolve())
    if getattr(args, "router.kv_events", None) is False:
        own["HOLDFAST_WORKER_KV_EVENTS"] = "false"  # because no router uses KV events
    return own
