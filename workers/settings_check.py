"""Do the settings of a worker go together? Each of them is of its type already."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from events.errors import UsageError
from workers.simulated_settings import SimulatedSettings

if TYPE_CHECKING:
    from workers.settings import WorkerSettings

_ENDPOINT = re.compile(r"tcp://([\w.-]+|\[[0-9a-fA-F:]+\]):(?P<port>[0-9]{1,5})|ipc:///.+")
WILDCARDS = ("0.0.0.0", "::", "")
PORT_MAX = 65_535


class BadSetting(UsageError):
    """A setting of the worker has a value that makes no sense, or there is no such setting."""


def check(settings: "WorkerSettings") -> None:
    """Raise BadSetting, naming the setting, its value and what it lacks."""
    if settings.gpus:
        _check_gpus(settings)
    if settings.watch_only:
        return _check_watch(settings)
    if settings.engine_pid is not None:
        raise BadSetting(f"engine_pid = {settings.engine_pid}: only with watch_only")
    if settings.host in WILDCARDS and not settings.advertise:
        raise BadSetting(
            f"host = {settings.host!r}: with it, advertise must say which address frontends shall use"
        )
    if settings.kv_transport == "nixl" and find_spec("nixl") is None:
        raise BadSetting("kv_transport = 'nixl': it needs the extra: pip install -e '.[nixl]'")
    if settings.request_plane == "nats" and not settings.nats_url:
        raise BadSetting(
            "request_plane = 'nats': it needs nats_url, or the data directory of a fleet that runs"
        )
    if settings.count > 1 and settings.engine != "simulated":
        raise BadSetting(f"count = {settings.count}: only simulated engines share a process")
    if settings.port and settings.port + settings.count - 1 > PORT_MAX:
        raise BadSetting(
            f"port = {settings.port}: {settings.count} workers need as many ports from it on, up to {PORT_MAX}"
        )
    if (settings.tp or 1) > 1 and settings.engine != "simulated":
        raise BadSetting(f"tp = {settings.tp}: only simulated engines are made of ranks")
    _check_simulated(settings)
    if settings.engine == "openai" and not settings.upstream.startswith(("http://", "https://")):
        raise BadSetting(
            f"upstream = {settings.upstream!r}: the openai engine needs the URL of a server (http://...)"
        )
    if settings.engine == "openai" and not Path(settings.model).joinpath("tokenizer.json").is_file():
        raise BadSetting(
            f"model = {settings.model!r}: the openai engine needs the folder of its model's tokenizer (tokenizer.json)"
        )
    _check_kv_events(settings)
    if settings.engine == "transformers" and not Path(settings.model).joinpath("config.json").is_file():
        raise BadSetting(
            f"model = {settings.model!r}: the transformers engine needs a model's folder (config.json)"
        )


_PLAIN = SimulatedSettings()


def _check_simulated(settings: "WorkerSettings") -> None:
    if settings.engine != "simulated":
        for name in SimulatedSettings.__struct_fields__:
            value, usual = getattr(settings, name), getattr(_PLAIN, name)
            if value != usual and name != "prefix_caching":
                raise BadSetting(f"{name} = {value!s}: only for simulated engines")
    if settings.perf_model and settings.planner_profile_data:
        raise BadSetting(f"perf_model = {settings.perf_model!r}: planner_profile_data says what steps take")
    if settings.itl_ms and (settings.planner_profile_data or settings.perf_model not in (None, "constant")):
        raise BadSetting(f"itl_ms = {settings.itl_ms:g}: only where steps take a constant time")


def endpoints(text: str) -> list[str]:
    """Return the ZeroMQ endpoints of a setting."""
    return [one.strip() for one in text.split(",") if one.strip()]


def _check_kv_events(settings: "WorkerSettings") -> None:
    events, replays = endpoints(settings.upstream_kv_events), endpoints(settings.upstream_kv_replay)
    if events and settings.engine != "openai":
        raise BadSetting(
            f"upstream_kv_events = {settings.upstream_kv_events!r}: only the openai engine has an upstream"
        )
    for one in (*events, *replays):
        found = _ENDPOINT.fullmatch(one)
        if found is None or int(found["port"] or 1) not in range(1, 65_536):
            raise BadSetting(
                f"upstream_kv_events, upstream_kv_replay: {one!r} is no endpoint (tcp://host:5557)"
            )
    if replays and len(replays) != len(events):
        raise BadSetting(
            f"upstream_kv_replay names {len(replays)} endpoints, upstream_kv_events {len(events)}: one for each"
        )


def _check_gpus(settings: "WorkerSettings") -> None:
    from workers.devices.mapping import parse

    try:
        parse(settings.gpus)
    except ValueError as error:
        raise BadSetting(f"gpus = {settings.gpus!r}: {error}") from error
    if settings.count > 1:
        raise BadSetting(
            f"gpus = {settings.gpus!r}: {settings.count} workers of one process have no GPUs of their own"
        )


def _check_watch(settings: "WorkerSettings") -> None:
    if (settings.engine_pid is None) is not bool(settings.gpus):
        raise BadSetting("watch_only: either gpus or engine_pid must say which GPUs to watch")
    if settings.count > 1:
        raise BadSetting(f"count = {settings.count}: watch_only watches for one worker")
    if not settings.nats_url:
        raise BadSetting("watch_only: it needs nats_url, or the data directory of a fleet that runs")
