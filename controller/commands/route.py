"""`holdfast route`: shows which worker a frontend would choose for a prompt, and why.

The command queries a running frontend, which chooses a worker as for a real request but sends the worker nothing.
"""

import argparse
import asyncio
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

from controller.processes.operator_client import opened
from controller.processes.up_flags import ROUTER, check_frontend_flags
from events.errors import HoldfastError, UsageError
from events.process.presence import Presence, present

ANSWER_S = 10.0  # timeout in seconds for the frontend's answer
# maximum width of the table, large enough that no cell is truncated; a terminal may wrap the lines
LINE_CHARS_MAX = 1_000
Answer = Mapping[str, Any]  # a frontend's answer or a part of it, as plain JSON types
# Terms of a worker's cost, named as in the frontend's answer, in the order of the table's columns.
TERMS = (
    *("active_prefill_tokens", "prefill", "device", "host", "disk", "credit", "sharers", "copy", "waiting"),
    *("active", "shared", "others", "decode", "requests", "lately", "weight", "cost"),
)
HEADINGS = {"active_prefill_tokens": "to read"}  # headings of the columns that are not named like their term


async def run(args: argparse.Namespace) -> int:
    """Print which worker a frontend would choose for a prompt. With --explain, also print why.

    Raise UsageError for invalid arguments, or HoldfastError if no frontend answers."""
    if (args.prompt is None) == (args.tokens is None):
        raise UsageError("give either --prompt TEXT or --tokens FILE")
    check_frontend_flags(args)
    prompt = {"prompt": args.prompt} if args.tokens is None else {"tokens": _tokens(args.tokens)}
    question = {"model": args.model, "cache_salt": args.cache_salt, ROUTER: _overrides(args), **prompt}
    frontend = _frontend(present(args.data), args.frontend)
    answer = await asyncio.to_thread(_ask, frontend, question)
    if args.output == "json":
        print(json.dumps(answer, indent=1))
    else:
        _print(answer, explain=args.explain)
    return 0


def _overrides(args: argparse.Namespace) -> dict[str, str]:
    start = f"{ROUTER}."
    given = {name.removeprefix(start): value for name, value in vars(args).items() if name.startswith(start)}
    return {name: str(value) for name, value in given.items() if value is not None}


def _frontend(processes: list[Presence], name: str) -> Presence:
    """Return the frontend with this name, or any frontend if the name is "". Raise HoldfastError if none runs on this host."""
    found = [one for one in processes if one.role == "frontend" and name in ("", one.name)]
    if not found:
        which = f"frontend {name}" if name else "frontend"
        raise HoldfastError(f"no {which} is running on this host; --data DIR selects another fleet")
    return found[0]


def _tokens(file: str) -> list[int]:
    """Read token ids from a file, or from stdin if `file` is "-".

    The ids are a JSON list, or numbers separated by white space. Raise UsageError if there are none or the format is invalid."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    try:
        tokens = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except ValueError as error:
        raise UsageError(f"{file} is not a list of token ids: {error}") from error
    if not tokens or not all(type(token) is int for token in tokens):
        raise UsageError(f"{file} is not a list of token ids")
    return list(tokens)


def _ask(frontend: Presence, question: Answer) -> Answer:
    """Query which worker a frontend would choose. Raise HoldfastError if the frontend refuses or does not answer."""
    body = json.dumps(question).encode()
    request = urllib.request.Request(f"{frontend.url}/route", body, {"Content-Type": "application/json"})
    try:
        with opened(request, ANSWER_S) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        raise HoldfastError(f"{frontend.name}: {_reason(error)}") from error
    except (OSError, ValueError, HTTPException) as error:
        raise HoldfastError(f"{frontend.name} at {frontend.url} does not answer: {error}") from error


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError, HTTPException):
        return f"status {error.code}"


def _print(answer: Answer, *, explain: bool) -> None:
    chosen = answer["chosen"]
    print(f"{_name(chosen)} would get the request ({answer['mode']}, {answer['why']})")
    if not explain:
        return
    blocks, size = answer["required_blocks"], answer["block_tokens"]
    print(f"prompt tokens: {answer['prompt_tokens']}, blocks of {size}: {blocks}; {answer['known']}")
    _table(answer["candidates"], chosen)
    for one in answer["left_out"]:
        print(f"{one['worker']} was filtered out: {one['why']}")


def _table(candidates: list[Answer], chosen: Answer) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = [term for term in TERMS if any(one[term] for one in candidates)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("worker")
    for term in shown:
        table.add_column(HEADINGS.get(term, term), justify="right")
    for one in sorted(candidates, key=lambda one: float(one["cost"])):
        mark = " ←" if _name(one) == _name(chosen) else ""
        table.add_row(_name(one) + mark, *(f"{one[term]:.4g}" for term in shown))
    console = Console(highlight=False, soft_wrap=True, width=LINE_CHARS_MAX)
    # printed below, because rich would exit by itself when the pipe is closed
    with console.capture() as written:
        console.print(table)
    print(written.get(), end="")


def _name(one: Answer) -> str:
    return f"{one['worker']}/{one['rank']}" if one["ranks"] > 1 else str(one["worker"])
