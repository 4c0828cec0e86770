"""Checks the flags of `holdfast up`: contradictions, and values that its processes would reject."""

import argparse
import errno
import os
import socket
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

from controller.config.flags import gather
from controller.config.variables import PREFIX
from controller.frontend.http.credentials import ApiKeys, Tls, check_open_port
from controller.frontend.settings import FrontendSettings
from controller.processes.ladder_flags import ladder_variables, tier_names
from controller.processes.notifying.webhook_flags import check_webhooks
from controller.processes.up_flags import (
    AUTO,
    PER_PROCESS_MAX,
    check_frontend_flags,
    frontend_variables,
    journal_bounds,
    listed_upstreams,
)
from events.errors import HoldfastError, UsageError
from events.process.key_file import read_key


def check(args: argparse.Namespace) -> None:
    """Raise UsageError or BadSetting if the flags contradict one another or have invalid values."""
    listed_upstreams(args.upstreams)
    check_frontend_flags(args)
    check_deadline_tiers(args, check_front_port(args))
    journal_bounds(args)
    ladder_variables(args, os.environ)
    check_webhooks(args, os.environ)
    for why in (*_engine_conflicts(args), *_upstream_conflicts(args), *_key_conflicts(args)):
        raise UsageError(why)
    for file in args.upstream_key_file:
        try:
            read_key(file)
        except ValueError as error:
            raise UsageError(f"--upstream-key-file {error}") from error


def _engine_conflicts(args: argparse.Namespace) -> Iterator[str]:
    engine, model, most = args.engine, args.model, PER_PROCESS_MAX
    if args.workers_per_process > 1 and engine != "simulated":
        yield f"--workers-per-process requires --engine simulated, not --engine {engine}"
    if args.workers_per_process > most:
        yield f"--workers-per-process {args.workers_per_process}: the maximum is {most}"
    if engine == "transformers" and model is None:
        yield "--engine transformers needs --model DIR; `holdfast model tiny DIR` creates a small one"
    if engine == "openai":
        if not args.upstream and args.upstreams is None:
            yield "--engine openai needs --upstreams FILE, or --upstream URL once for each server"
        if model is None and not all(entry.model for entry in listed_upstreams(args.upstreams)):
            yield "--engine openai needs --model DIR, the folder with the model's tokenizer.json"
    if model is not None:
        if not model.is_dir():
            yield f"the model folder {model} does not exist"
        if engine == "simulated":
            yield "--model requires --engine transformers or openai; the simulated engine has no model"
    if args.spare_threshold is not None and args.spares != AUTO:
        yield "--spare-threshold requires --spares auto"


def _upstream_conflicts(args: argparse.Namespace) -> Iterator[str]:
    if args.upstreams is not None:
        yield from file_conflicts(args)
        return
    servers = len(args.upstream)
    if args.engine == "openai" and (args.spares == AUTO or args.spares >= servers):
        yield f"--spares {args.spares}: with --engine openai the spares are among the {servers} servers, and one must serve"
    if args.upstream and args.engine != "openai":
        yield f"--upstream requires --engine openai, not --engine {args.engine}"
    for url in args.upstream:
        if not _is_http(url):
            yield f"--upstream {url!r} is not a server's URL, such as http://127.0.0.1:8001"


def file_conflicts(args: argparse.Namespace) -> Iterator[str]:
    """Yield why flags contradict --upstreams."""
    if args.engine != "openai":
        yield f"--upstreams requires --engine openai, not --engine {args.engine}"
    if args.spares:
        yield f"--spares {args.spares}: upstreams of a file cannot be spares"
    for name in ("upstream", "upstream_key_file", "revision", "upstream_kv_events", "upstream_kv_replay"):
        if getattr(args, name):
            yield f"--{name.replace('_', '-')} cannot be used with --upstreams; set it in {args.upstreams}"


def _key_conflicts(args: argparse.Namespace) -> Iterator[str]:
    servers = len(args.upstream)
    for flag, given in (("--upstream-key-file", args.upstream_key_file), ("--revision", args.revision)):
        if given and args.engine != "openai":
            yield f"{flag} requires --engine openai, not --engine {args.engine}"
        if len(given) not in (0, 1, servers):
            yield (
                f"{flag} is given {len(given)} times, --upstream {servers} times: give it once for all, or once for each"
            )
    for flag in ("upstream_kv_events", "upstream_kv_replay"):
        given = getattr(args, flag)
        if given and len(given) != servers:
            yield (
                f"--{flag.replace('_', '-')} is given {len(given)} times, --upstream {servers} times: give it once for each"
            )


def check_front_port(args: argparse.Namespace) -> FrontendSettings:
    """Check the frontends' settings from flags and environment, and return them.

    Raise BadSetting if the port is open to other hosts without API keys, or if a key file or certificate cannot be used.
    """
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
    """Raise UsageError if a deadline is set for an unknown tier, because the deadline would apply to no request."""
    tiers = tier_names(args, os.environ)
    if odd := [tier for tier in settings.ttft_deadlines if tiers is not None and tier not in tiers]:
        raise UsageError(f"--ttft-deadlines: unknown tier {odd[0]!r}; the tiers are {', '.join(tiers or ())}")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        return False


class PortTaken(HoldfastError):
    """The port is in use by another process. Stop that process, or choose another port with --port."""


def hold(host: str, port: int) -> socket.socket:
    """Return a socket that reserves the port: while it is open, no other `holdfast up` can use the port.

    Without the reservation, the kernel would let two fleets share the port of their frontends. Raise PortTaken if another
    process uses the port, or HoldfastError if the port cannot be used for another reason.
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
    """Return a socket that is bound to a name for the port in Linux's abstract namespace.

    Only one process can bind a name, and the kernel frees the name when that process ends.
    """
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
