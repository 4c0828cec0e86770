"""Defines the flags of the commands that show a fleet or operate it."""

import argparse
from pathlib import Path

from controller.common_flags import output_flag, subcommands
from controller.processes.flag_types import positive
from events.chaos import FAULTS

# default seconds for the restart of one worker: its shutdown grace and the start of its successor
RESTART_S = 180.0
WATCH_S = 2.0  # default seconds between outputs of `status --watch`
TOP_EVERY_S = 1.0  # default seconds between redraws of `top`
SCALE_MAX = 10_000


def status(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast status`."""
    output_flag(parser)
    text = f"repeat every S seconds until Ctrl-C (default: {WATCH_S:g}); with -o json, one line each time"
    parser.add_argument("-w", "--watch", type=positive, nargs="?", const=WATCH_S, metavar="S", help=text)


def top(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast top`."""
    text = f"seconds between redraws (default: {TOP_EVERY_S:g})"
    parser.add_argument("--every", type=positive, default=TOP_EVERY_S, metavar="S", help=text)
    text = "print one picture and exit (default without a terminal)"
    parser.add_argument("--once", action="store_true", help=text)


def events(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast events`."""
    output_flag(parser)
    parser.add_argument("--follow", action="store_true", help="keep printing events as they arrive")
    parser.add_argument("--worker", metavar="W", help="show only events about this worker")
    parser.add_argument("--kind", metavar="K", help="show only events of this kind, e.g. canary_failed")


def resume(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `holdfast resume`."""
    parser.add_argument("worker", metavar="WORKER", help="name of the worker")


def drain(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast drain`."""
    resume(parser)
    text = "seconds until running requests move (default: the policy's)"
    parser.add_argument("--deadline", type=positive, metavar="S", help=text)


def move(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast move`."""
    resume(parser)
    text = "target worker (default: the best one for each request)"
    parser.add_argument("--to", default="", metavar="W", help=text)


def restart(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast restart`."""
    parser.add_argument("worker", metavar="WORKER", nargs="?", help="name of the worker")
    parser.add_argument("--rolling", action="store_true", help="restart all workers, one after another")
    text = f"seconds for each worker to stop and start again (default: {RESTART_S:g})"
    parser.add_argument("--within", type=positive, default=RESTART_S, metavar="S", help=text)


def chaos(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast chaos`."""
    add = parser.add_argument
    add("fault", choices=FAULTS, help="fault to inject; heal ends all faults of the worker")
    add("worker", metavar="WORKER", help="name of the worker")
    text = "corrupt: one token in X; slow: factor X; error: X requests; drift: by X; xid, nvlink: Xid X"
    add("argument", nargs="?", type=positive, metavar="X", help=text)
    text = "seconds until the fault ends by itself (default: until healed)"
    add("--for", dest="duration_s", type=positive, metavar="S", help=text)
    text = "rank that gets the fault (error, corrupt, drift, slow), or its simulated device (xid, nvlink) (default: 0)"
    add("--rank", type=_rank, metavar="R", help=text)


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank (0, 1 …)")
    return int(text)


def scale(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast scale`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="model to scale")
    add("workers", metavar="N", nargs="?", type=_workers, help="number of workers that it shall have")
    add("--release", action="store_true", help="return control to the planner")
    add("--reason", metavar="TEXT", default="", help="reason to record on the journal")


def _workers(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= SCALE_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers from 1 to {SCALE_MAX}")
    return int(text)


def route(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast route`."""
    from controller.frontend.request.routing_overrides import OVERRIDABLE
    from controller.processes.up_flags import add_router_flags

    add = parser.add_argument
    add("--explain", action="store_true", help="show the cost of each worker, term by term")
    add("--model", default="", metavar="M", help="model of the request (default: the only served model)")
    add("--prompt", metavar="TEXT", help="prompt as text")
    add("--tokens", metavar="FILE", help="file with the prompt's token ids (-: standard input)")
    add("--cache-salt", default="", metavar="SALT", help="cache_salt of the request")
    add("--frontend", default="", metavar="NAME", help="frontend to query (default: any)")
    output_flag(parser)
    add_router_flags(parser, only=OVERRIDABLE)


WITHIN_S = 60.0  # default seconds to wait until the effect of `upstream` is visible
RELOAD_S = 10.0


def upstream(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `holdfast upstream`."""
    add = subcommands(parser, "upstream")
    added = add("add", "add an upstream to the file, and wait until its worker serves")
    added.add_argument("name", metavar="NAME", help="name of the upstream's worker")
    added.add_argument("url", metavar="URL", help="URL of the server, for example https://gpu1:8000")
    for flag, text, metavar in (
        ("--model", "directory of the tokenizer (default: that of the process)", "DIR"),
        ("--key-file", "file with the server's API key", "FILE"),
        ("--revision", "revision of the weights", "NAME"),
        ("--zone", "where the server is, for operators", "NAME"),
        ("--proxy", "URL of an HTTP proxy to connect through", "URL"),
        ("--ca-file", "PEM file with the certificates to trust", "FILE"),
        ("--cert-file", "PEM file with the client certificate", "FILE"),
        ("--cert-key-file", "PEM file with the client certificate's private key", "FILE"),
        ("--server-name", "name for SNI and for the check of the server's certificate", "NAME"),
    ):
        added.add_argument(flag, metavar=metavar, help=text)
    text = (
        "make each address (dns) or each ready pod (kubernetes) behind the URL's host an upstream of its own"
    )
    added.add_argument("--discover", choices=("dns", "kubernetes"), help=text)
    added.add_argument("--no-verify", action="store_true", help="accept any certificate of the server")
    text = "share of requests, compared with an upstream of weight 1 (default: 1)"
    added.add_argument("--weight", type=positive, metavar="X", help=text)
    parsers = [added]
    for verb, text in (
        ("remove", "remove an upstream from the file, and wait until its worker has drained and left"),
        ("pause", "let an upstream's worker drain and leave, and keep the entry"),
        ("resume", "start the worker of a paused upstream again, and wait until it serves"),
    ):
        parsers.append(add(verb, text))
        parsers[-1].add_argument("name", metavar="NAME", help="name of the upstream")
    text = f"seconds to wait until the effect is visible (default: {WITHIN_S:g})"
    for one in parsers:
        one.add_argument("--within", type=positive, default=WITHIN_S, metavar="S", help=text)
    listed = add("list", "show all upstreams with their workers and states")
    output_flag(listed)
    for one in (*parsers, listed):
        text = "file of upstreams (default: that of the running process)"
        one.add_argument("--file", type=Path, metavar="FILE", help=text)


def reload(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `holdfast reload`."""
    text = f"seconds to wait for each process (default: {RELOAD_S:g})"
    parser.add_argument("--within", type=positive, default=RELOAD_S, metavar="S", help=text)
