"""Loads and validates a worker's settings.

They come from flags, and from `HOLDFAST_WORKER_*` in the environment. Flags win.
"""

import json
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec.structs import replace

from events.broker_users import worker_user
from events.errors import BadSetting
from events.nats import keys, urls
from events.process.key_file import read_key
from events.process.presence import present
from workers.config.settings import WorkerSettings, annotations
from workers.config.simulated_settings import SimulatedSettings, read_extra, their_name

PREFIX = "HOLDFAST_WORKER_"
_ENDPOINT = re.compile(r"tcp://([\w.-]+|\[[0-9a-fA-F:]+\]):(?P<port>[0-9]{1,5})|ipc:///.+")
DYNAMO = {
    "DYN_ENGINE_REQUEST_LIMIT": "engine_request_limit",
    "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "request_queue_limit",
}  # Dynamo's names; Holdfast's names take precedence
WILDCARDS = ("0.0.0.0", "::", "")
PORT_MAX = 65_535


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, *, to_show: bool = False
) -> WorkerSettings:
    """Return the settings of this process. Raise BadSetting, naming the setting, its value and what is expected.

    `to_show`: the settings are only displayed, so another worker may have the same name.
    """
    known = os.environ if environment is None else environment
    given: dict[str, Any] = {}
    for name in ("nats_url", "data", "fleet_key_file"):  # settings of the whole fleet
        if known.get(f"HOLDFAST_{name.upper()}") and f"{PREFIX}{name.upper()}" not in known:
            given[name] = known[f"HOLDFAST_{name.upper()}"]
    given |= {name: known[variable] for variable, name in DYNAMO.items() if known.get(variable)}
    for variable, text in known.items():
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and name not in annotations():
            raise BadSetting(f"{variable} is not a setting of a worker; `holdfast worker --help` lists them")
        if variable.startswith(PREFIX) and text:
            given[name] = text
    given |= {name: value for name, value in flags.items() if value is not None}
    extra = _extra(Path(given["extra_engine_args"])) if given.get("extra_engine_args") else {}
    given |= extra
    joins = "data" in given and not given.get("nats_url")
    if joins:
        given["nats_url"] = _of_fleet(Path(given["data"]), "nats_url")
        given.setdefault("fleet_key_file", _of_fleet(Path(given["data"]), "fleet_key_file"))
    called = {name: f"extra_engine_args: {their_name(name)}" for name in extra}
    settings = WorkerSettings(**convert_settings(given, called))
    check(settings)
    if joins and not settings.watch_only and not to_show:
        _check_name(settings)
    return settings


def with_broker_user(settings: WorkerSettings) -> WorkerSettings:
    """Return the settings with the broker URL under which this process connects.

    A process that joins a fleet of this host creates its missing key seed, which the fleet then adds to its broker. Raise
    BadBrokerUrl or OSError.
    """
    name = worker_user(settings.name, settings.count)
    folder = urls.keys(settings.nats_url)
    if folder is not None and folder.is_relative_to(settings.data.resolve()):
        keys.join(folder, name)
    return replace(settings, nats_url=urls.as_user(settings.nats_url, name))


def _extra(path: Path) -> dict[str, Any]:
    """Return the settings from a file of Dynamo's arguments. Raise BadSetting."""
    try:
        return read_extra(path)
    except ValueError as error:
        raise BadSetting(f"extra_engine_args = {str(path)!r}: {error}") from error


def _of_fleet(data: Path, what: str) -> str:
    """Return a value from the file of the fleet in this data directory; empty if there is none."""
    try:
        return str(json.loads((data / "fleet.json").read_text()).get(what, ""))
    except (OSError, ValueError):
        return ""


def _check_name(settings: WorkerSettings) -> None:
    """Raise BadSetting if a worker of the joined fleet has this name.

    The fleet accepts only the newest worker of a name. The older one would stay out of service even after the newer one ends.
    """
    for other in present(settings.data):
        if other.role == "worker" and other.name.partition("..")[0] == settings.name:
            raise BadSetting(
                f"name = {settings.name!r}: a worker of {settings.data} uses it (pid {other.pid}); choose another with --name"
            )


def convert_settings(given: Mapping[str, Any], called: Mapping[str, str]) -> dict[str, Any]:
    """Return the values converted to their settings' types. Raise BadSetting with all errors.

    `called`: the names under which the user gave some of the settings.
    """
    values, errors = {}, []
    for name, text in given.items():
        kind = annotations()[name]
        try:
            values[name] = msgspec.convert(text, kind, strict=False, dec_hook=_convert_other)
        except msgspec.ValidationError as error:
            errors.append(f"{called.get(name, name)} = {text!r}: {_expected(kind, str(error))}")
    if errors:
        raise BadSetting("; ".join(errors))
    return values


def _convert_other(kind: type, text: Any) -> Any:
    """Build a value that msgspec cannot: a path."""
    return kind(text)


def _expected(kind: Any, message: str) -> str:
    plain = get_args(kind)[0]
    for choice in (plain, *get_args(plain)):
        if get_origin(choice) is Literal:
            return f"expected one of {', '.join(get_args(choice))}"
    return f"{message[0].lower()}{message[1:]}"


def check(settings: WorkerSettings) -> None:
    """Raise BadSetting, naming the setting, its value and what is wrong."""
    if settings.gpus:
        _check_gpus(settings)
    if settings.watch_only:
        return _check_watch(settings)
    if settings.engine_pid is not None:
        raise BadSetting(f"engine_pid = {settings.engine_pid}: only valid with watch_only")
    if settings.host in WILDCARDS and not settings.advertise:
        raise BadSetting(f"host = {settings.host!r}: set advertise to the address that frontends connect to")
    if settings.kv_transport == "nixl" and find_spec("nixl") is None:
        raise BadSetting("kv_transport = 'nixl': requires the extra [nixl]: pip install -e '.[nixl]'")
    if settings.request_plane == "nats" and not settings.nats_url:
        raise BadSetting(
            "request_plane = 'nats': requires nats_url, or the data directory of a running fleet"
        )
    if settings.count > 1 and settings.engine != "simulated":
        raise BadSetting(f"count = {settings.count}: only simulated engines can share a process")
    if settings.port and settings.port + settings.count - 1 > PORT_MAX:
        raise BadSetting(
            f"port = {settings.port}: {settings.count} workers need consecutive ports up to {PORT_MAX}"
        )
    if (settings.tp or 1) > 1 and settings.engine != "simulated":
        raise BadSetting(f"tp = {settings.tp}: only simulated engines have ranks")
    _check_simulated(settings)
    if settings.engine == "openai" and not settings.upstream.startswith(("http://", "https://")):
        raise BadSetting(
            f"upstream = {settings.upstream!r}: the openai engine requires the URL of a server (http://...)"
        )
    if settings.engine == "openai" and not Path(settings.model).joinpath("tokenizer.json").is_file():
        raise BadSetting(
            f"model = {settings.model!r}: the openai engine requires the directory of its model's tokenizer (tokenizer.json)"
        )
    _check_key_file(settings)
    _check_kv_events(settings)
    if settings.engine == "transformers" and not Path(settings.model).joinpath("config.json").is_file():
        raise BadSetting(
            f"model = {settings.model!r}: the transformers engine requires a model directory (config.json)"
        )


_PLAIN = SimulatedSettings()


def _check_simulated(settings: WorkerSettings) -> None:
    if settings.engine != "simulated":
        for name in SimulatedSettings.__struct_fields__:
            value, default = getattr(settings, name), getattr(_PLAIN, name)
            if value != default and name != "prefix_caching":
                raise BadSetting(f"{name} = {value!s}: only valid for simulated engines")
    if settings.perf_model and settings.planner_profile_data:
        raise BadSetting(
            f"perf_model = {settings.perf_model!r}: planner_profile_data already defines the step times"
        )
    if settings.itl_ms and (settings.planner_profile_data or settings.perf_model not in (None, "constant")):
        raise BadSetting(f"itl_ms = {settings.itl_ms:g}: only valid if steps take a constant time")


def _check_key_file(settings: WorkerSettings) -> None:
    given = settings.upstream_key_file
    if given and settings.engine != "openai":
        raise BadSetting(f"upstream_key_file = {given!r}: only the openai engine has an upstream")
    if given and settings.upstream_key:
        raise BadSetting(f"upstream_key_file = {given!r}: upstream_key is set too; set only one of them")
    if given:
        try:
            read_key(Path(given))
        except ValueError as error:
            raise BadSetting(f"upstream_key_file: {error}") from error


def endpoints(text: str) -> list[str]:
    """Return the ZeroMQ endpoints of a setting."""
    return [one.strip() for one in text.split(",") if one.strip()]


def _check_kv_events(settings: WorkerSettings) -> None:
    events, replays = endpoints(settings.upstream_kv_events), endpoints(settings.upstream_kv_replay)
    if events and settings.engine != "openai":
        raise BadSetting(
            f"upstream_kv_events = {settings.upstream_kv_events!r}: only the openai engine has an upstream"
        )
    for one in (*events, *replays):
        found = _ENDPOINT.fullmatch(one)
        if found is None or int(found["port"] or 1) not in range(1, 65_536):
            raise BadSetting(
                f"upstream_kv_events, upstream_kv_replay: {one!r} is not an endpoint (tcp://host:5557)"
            )
    if replays and len(replays) != len(events):
        raise BadSetting(
            f"upstream_kv_replay has {len(replays)} endpoints, upstream_kv_events {len(events)}: set one for each"
        )


def _check_gpus(settings: WorkerSettings) -> None:
    from workers.devices.mapping import parse

    try:
        parse(settings.gpus)
    except ValueError as error:
        raise BadSetting(f"gpus = {settings.gpus!r}: {error}") from error
    if settings.count > 1:
        raise BadSetting(
            f"gpus = {settings.gpus!r}: the {settings.count} workers of one process cannot have separate GPUs"
        )


def _check_watch(settings: WorkerSettings) -> None:
    if (settings.engine_pid is None) is not bool(settings.gpus):
        raise BadSetting("watch_only: set either gpus or engine_pid to select the GPUs to watch")
    if settings.count > 1:
        raise BadSetting(f"count = {settings.count}: watch_only watches the GPUs of one worker")
    if not settings.nats_url:
        raise BadSetting("watch_only: requires nats_url, or the data directory of a running fleet")
