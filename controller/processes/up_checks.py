"""Checks of the flags of `holdfast up`: combinations, and values that its processes would reject."""

import argparse
import errno
import os
import socket
import sys
from urllib.parse import urlsplit

from controller.config.flags import gather
from controller.config.variables import PREFIX
from controller.frontend.http.credentials import ApiKeys, Tls
from controller.frontend.open_port_check import check_open_port
from controller.frontend.settings import FrontendSettings
from controller.processes.ladder_flags import ladder_variables, tier_names
from controller.processes.notifying.webhook_flags import check_webhooks
from controller.processes.up_flags import (
    AUTO,
    PER_PROCESS_MAX,
    check_frontend_flags,
    frontend_variables,
    journal_bounds,
)
from events.errors import HoldfastError, UsageError
from events.process.key_file import read_key


def check(args: argparse.Namespace) -> None:
    """Raise UsageError if the flags contradict one another."""
    check_frontend_flags(args)
    check_deadline_tiers(args, check_front_port(args))
    journal_bounds(args)
    ladder_variables(args, os.environ)
    check_webhooks(args, os.environ)
    if args.workers_per_process > 1 and args.engine != "simulated":
        raise UsageError(f"--workers-per-process requires --engine simulated, not --engine {args.engine}")
    if args.workers_per_process > PER_PROCESS_MAX:
        raise UsageError(
            f"--workers-per-process {args.workers_per_process}: the maximum is {PER_PROCESS_MAX}"
        )
    if args.engine == "transformers" and args.model is None:
        raise UsageError(
            "--engine transformers needs --model DIR; `holdfast model tiny DIR` creates a small one"
        )
    if args.engine == "openai" and not args.upstream:
        raise UsageError("--engine openai needs --upstream URL, once for each server")
    if args.engine == "openai" and args.model is None:
        raise UsageError("--engine openai needs --model DIR, the folder with the model's tokenizer.json")
    if args.model is not None and not args.model.is_dir():
        raise UsageError(f"the model folder {args.model} does not exist")
    if args.model is not None and args.engine == "simulated":
        raise UsageError(
            "--model requires --engine transformers or openai; the simulated engine has no model"
        )
    if args.spare_threshold is not None and args.spares != AUTO:
        raise UsageError("--spare-threshold requires --spares auto")
    if args.engine == "openai" and (args.spares == AUTO or args.spares >= len(args.upstream)):
        servers = len(args.upstream)
        raise UsageError(
            f"--spares {args.spares}: with --engine openai the spares are among the {servers} servers, and one must serve"
        )
    if args.upstream and args.engine != "openai":
        raise UsageError(f"--upstream requires --engine openai, not --engine {args.engine}")
    if wrong := [url for url in args.upstream if not _is_http(url)]:
        raise UsageError(f"--upstream {wrong[0]!r} is not a server's URL, such as http://127.0.0.1:8001")
    _check_key_files(args)
    for flag, given in (
        ("--upstream-kv-events", args.upstream_kv_events),
        ("--upstream-kv-replay", args.upstream_kv_replay),
    ):
        if given and len(given) != len(args.upstream):
            raise UsageError(
                f"{flag} is given {len(given)} times, --upstream {len(args.upstream)} times: give it once for each"
            )


def check_front_port(args: argparse.Namespace) -> FrontendSettings:
    """Return the frontends' settings from flags and environment. Raise BadSetting if the port is open to other hosts without API
    keys, or if a key file or certificate cannot be used."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(f"{PREFIX}FRONTEND__")}
    variables |= frontend_variables(args) | {f"{PREFIX}FRONTEND__HOST": args.host}
    settings = gather(FrontendSettings, "frontend", {}, variables)
    check_open_port(settings)
    for file in filter(None, (settings.api_key_file, settings.admin_key_file)):
        ApiKeys(file)
    if settings.tls_cert:
        Tls(settings.tls_cert, settings.tls_key)
    return settings


def check_deadline_tiers(args: argparse.Namespace, settings: FrontendSettings) -> None:
    """Raise UsageError for a deadline of an unknown tier, which no request would ever get."""
    tiers = tier_names(args, os.environ)
    if odd := [tier for tier in settings.ttft_deadlines if tiers is not None and tier not in tiers]:
        raise UsageError(f"--ttft-deadlines: unknown tier {odd[0]!r}; the tiers are {', '.join(tiers or ())}")


def _check_key_files(args: argparse.Namespace) -> None:
    files, servers = args.upstream_key_file, len(args.upstream)
    if files and args.engine != "openai":
        raise UsageError(f"--upstream-key-file requires --engine openai, not --engine {args.engine}")
    if len(files) not in (0, 1, servers):
        raise UsageError(
            f"--upstream-key-file is given {len(files)} times, --upstream {servers} times: give it once for all, or once for each"
        )
    if args.revision and args.engine != "openai":
        raise UsageError(f"--revision requires --engine openai, not --engine {args.engine}")
    if len(args.revision) not in (0, 1, servers):
        raise UsageError(
            f"--revision is given {len(args.revision)} times, --upstream {servers} times: give it once for all, or once for each"
        )
    for file in files:
        try:
            read_key(file)
        except ValueError as error:
            raise UsageError(f"--upstream-key-file {error}") from error


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        return False


class PortTaken(HoldfastError):
    """The port is in use by another process. Stop that process, or choose another port with --port."""


def hold(host: str, port: int) -> socket.socket:
    """Return a socket that, while open, keeps any other `holdfast up` off this port. Raise PortTaken or HoldfastError.

    The kernel would let two fleets share the port of their frontends.
    """
    held = _name(host, port)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        held.close()
        raise _refusal(host, port, error) from error
    return held


def _name(host: str, port: int) -> socket.socket:
    """Bind a name for the port in Linux's abstract namespace: a name has one owner, and is freed when the owner dies."""
    held = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            held.bind(f"\0holdfast:{host}:{port}")
        except OSError as error:
            held.close()
            raise _refusal(host, port, error) from error
    return held


def _refusal(host: str, port: int, error: OSError) -> HoldfastError:
    if error.errno == errno.EADDRINUSE:
        return PortTaken(f"{host}:{port} cannot be used: {PortTaken.__doc__}")
    return HoldfastError(f"{host}:{port} cannot be used: {error.strerror}")
