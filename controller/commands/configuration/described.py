"""Lists all keys of the configuration file, with their defaults and descriptions."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache

from pydantic import BaseModel

from controller.catalogue import notes_of
from controller.config.flags import fields_of, is_section
from controller.processes import up_flags
from workers.config.settings import WorkerSettings, groups

TOP: Mapping[str, tuple[str, str]] = {
    "nats_url": ("URL of the broker; without it `up` starts one", ""),
    "database_url": ("URL of the database; without it `up` starts one", ""),
    "data": ("data directory of the fleet", ".holdfast"),
    "fleet_key_file": ("file with the fleet key; without it `up` creates one", ""),
    "admin_hosts": (
        "names under which the admin ports may be requested, besides IP addresses and localhost",
        "",
    ),
}
"""The description and the default of each top-level key of the configuration file."""


def below(value: object, path: str = "") -> Iterator[tuple[str, object, str]]:
    """Yield (dotted path, default, description) of every setting of `value`, a settings model or policy.

    The settings of inner sections are included. `path` is the prefix of the dotted paths."""
    notes = notes_of(type(value))
    for name in fields_of(type(value)):
        inner, place = getattr(value, name), f"{path}{name}"
        if is_section(type(inner)) and (is_dataclass(inner) or isinstance(inner, BaseModel)):
            yield from below(inner, f"{place}.")
            continue
        described = type(value).model_fields[name].description if isinstance(value, BaseModel) else None
        yield place, inner, described or notes.get(name, "")


def of_worker() -> Iterator[tuple[str, object, str]]:
    """Yield (name, default, description) of every setting of a worker."""
    defaults = WorkerSettings()
    for settings in groups().values():
        for name, text in settings.items():
            yield name, getattr(defaults, name), text


@cache
def of_up() -> Mapping[str, argparse.Action]:
    """Return the flags of `holdfast up` that have no equivalent setting, by key in the configuration file."""
    parser = argparse.ArgumentParser()
    up_flags.add_arguments(parser)
    found = up_flags.flags_by_key(parser)
    return {key: one for key, one in found.items() if key != "help" and up_flags.setting_of(one) is None}
