"""`holdfast settings`: prints every setting of every role, with effective value and variable."""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from controller.config.sections import effective, masked
from controller.config.variables import PREFIX, WORKER_PREFIX
from workers.config.settings import WorkerSettings
from workers.config.settings_check import load_settings

SECRETS = ("upstream_key",)


def prepare(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the command's flags. Return the function that runs it."""
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="output format (default: text)"
    )
    return _run


def rows(environment: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """Yield (setting, effective value, variable). Raise BadSetting for an unknown name or an invalid value."""
    for name, value in effective(environment).items():
        yield name, value, PREFIX + name.upper().replace(".", "__")
    worker = load_settings({}, environment, to_show=True)
    for field in WorkerSettings.__struct_fields__:
        value = getattr(worker, field)
        if field in SECRETS:
            value = "***" if value else ""
        yield (
            f"worker.{field}",
            masked(value) if isinstance(value, str) else value,
            WORKER_PREFIX + field.upper(),
        )


def _run(args: argparse.Namespace) -> int:
    found = list(rows(os.environ))
    if args.output == "json":
        print(json.dumps({name: value for name, value, _ in found}, indent=1, default=str))
        return 0
    widest = max(len(name) for name, _, _ in found)
    for name, value, variable in found:
        print(f"{name:<{widest}}  {value!s:<28} {variable}")
    return 0
