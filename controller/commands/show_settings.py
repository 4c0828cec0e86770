"""`holdfast settings`: prints every setting with its effective value and its environment variable."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping

from controller.config.sections import effective, masked
from controller.config.variables import PREFIX, WORKER_PREFIX
from events.errors import HoldfastError
from workers.config.settings import WorkerSettings
from workers.config.settings_check import load_settings

SECRETS = ("upstream_key",)


def rows(environment: Mapping[str, str]) -> Iterator[tuple[str, object, str]]:
    """Yield each setting as (name, effective value, environment variable), with secrets masked.

    Raise BadSetting if the environment sets an unknown name or an invalid value."""
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


def run(args: argparse.Namespace) -> int:
    """Print all settings. With --schema, print the JSON Schema of the configuration file instead.

    With --write, write a commented configuration file instead. Raise BadSetting if the environment sets an invalid setting, or
    HoldfastError if the file cannot be written."""
    if args.schema:
        from controller.commands.configuration.schema import schema

        print(json.dumps(schema(), indent=1, ensure_ascii=False))
        return 0
    if args.write:
        return _write(args.write)
    found = list(rows(os.environ))
    if args.output == "json":
        print(json.dumps({name: value for name, value, _ in found}, indent=1, default=str))
        return 0
    widest = max(len(name) for name, _, _ in found)
    for name, value, variable in found:
        print(f"{name:<{widest}}  {value!s:<28} {variable}")
    return 0


def _write(place: str) -> int:
    from controller.commands.configuration.template import template

    if place == "-":
        print(template(), end="")
        return 0
    try:
        with open(place, "x") as file:
            file.write(template())
    except OSError as error:
        raise HoldfastError(f"cannot write {place}: {error.strerror}") from error
    return 0
