"""Loads and validates a worker's settings.

Settings come from flags and from the environment variables `HOLDFAST_WORKER_*`. A flag overrides the variable of the same
setting.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from itertools import chain
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
}  # Dynamo's variables for settings of Holdfast, which apply only if Holdfast's own variable is not set
UPSTREAMS_NAME = "upstreams"  # default name of a process with a file of upstreams
WILDCARDS = ("0.0.0.0", "::", "")
PORT_MAX = 65_535
_PLAIN = SimulatedSettings()


def load_settings(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None, *, to_show: bool = False
) -> WorkerSettings:
    """Return the settings of this process, from `flags` and the environment.

    Raise BadSetting for an invalid setting, with its value and what is expected. Raise BadSetting also if a running worker of
    the fleet in --data has this worker's name. `to_show` omits this check, for settings that are only displayed.
    """
    given: dict[str, object] = _from_environment(os.environ if environment is None else environment)
    given |= {name: value for name, value in flags.items() if value is not None}
    extra: Mapping[str, object] = {}
    if path := given.get("extra_engine_args"):
        with _named(f"extra_engine_args = {str(path)!r}"):
            extra = read_extra(Path(str(path)))
    given |= extra
    joins = "data" in given and not given.get("nats_url")
    if joins:
        fleet = _fleet(Path(str(given["data"])))
        given["nats_url"] = str(fleet.get("nats_url", ""))
        given.setdefault("fleet_key_file", str(fleet.get("fleet_key_file", "")))
    if given.get("upstreams"):
        given = {"name": UPSTREAMS_NAME, "engine": "openai", **given}
    called = {name: f"extra_engine_args: {their_name(name)}" for name in extra}
    settings = WorkerSettings(**convert_settings(given, called))
    check(settings)
    if joins and not settings.watch_only and not to_show:
        _check_name(settings)
    return settings


def _from_environment(known: Mapping[str, str]) -> dict[str, object]:
    """Return the settings that environment variables set, as texts.

    Variables of the worker (`HOLDFAST_WORKER_*`) override Dynamo's variables and those of the whole fleet (`HOLDFAST_NATS_URL`,
    `HOLDFAST_DATA`, `HOLDFAST_FLEET_KEY_FILE`). Raise BadSetting for a variable `HOLDFAST_WORKER_*` that names no setting.
    """
    given: dict[str, object] = {}
    for name in ("nats_url", "data", "fleet_key_file"):  # settings of the whole fleet
        if known.get(f"HOLDFAST_{name.upper()}") and f"{PREFIX}{name.upper()}" not in known:
            given[name] = known[f"HOLDFAST_{name.upper()}"]
    given |= {name: known[variable] for variable, name in DYNAMO.items() if known.get(variable)}
    own = {v.removeprefix(PREFIX).lower(): (v, text) for v, text in known.items() if v.startswith(PREFIX)}
    for name, (variable, _) in own.items():
        if name not in annotations():
            raise BadSetting(f"{variable} is not a setting of a worker; `holdfast worker --help` lists them")
    return given | {name: text for name, (_, text) in own.items() if text}


def with_broker_user(settings: WorkerSettings) -> WorkerSettings:
    """Return the settings with a broker URL that authenticates as this process's broker account.

    The broker URL can name a folder with the private keys (seeds) of broker accounts. If the folder is in the fleet's data
    directory and lacks this account's key, create the key. The fleet on this host then adds the account to its broker.

    Raise BadBrokerUrl for an invalid URL, and OSError if the key cannot be written.
    """
    if settings.upstreams is not None:
        return settings  # each of its workers has an account
    name = worker_user(settings.name, settings.count)
    folder = urls.keys(settings.nats_url)
    if folder is not None and folder.is_relative_to(settings.data.resolve()):
        keys.join(folder, name)
    return replace(settings, nats_url=urls.as_user(settings.nats_url, name))


@contextlib.contextmanager
def _named(setting: str) -> Iterator[None]:
    """Convert a ValueError from the `with` block into a BadSetting that names the setting."""
    try:
        yield
    except ValueError as error:
        raise BadSetting(f"{setting}: {error}") from error


def _fleet(data: Path) -> dict[str, object]:
    """Return the contents of `fleet.json` in the data directory `data`; empty if the file cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((data / "fleet.json").read_text()))
    return {}


def _check_name(settings: WorkerSettings) -> None:
    """Raise BadSetting if a running worker of the same data directory has the name of this worker.

    Of several workers with one name, the fleet accepts only the newest. If the newest worker ends, the older ones still stay
    out of service.
    """
    for other in present(settings.data):
        if other.role == "worker" and other.name.partition("..")[0] == settings.name:
            raise BadSetting(
                f"name = {settings.name!r}: a worker of {settings.data} uses it (pid {other.pid}); choose another with --name"
            )


def convert_settings(given: Mapping[str, object], called: Mapping[str, str]) -> dict[str, Any]:
    """Convert the values of `given` to the types of their settings. Raise one BadSetting that lists all errors.

    `called` has the settings that were set by `extra_engine_args`, each with the name to use in errors. Errors about other
    settings use the settings' own names.
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


def _convert_other(kind: Callable[[object], object], text: object) -> object:
    """Convert a value to `kind`, a type that msgspec does not support. Path is the only such type of a setting."""
    return kind(text)


def _expected(kind: object, message: str) -> str:
    for choices in (kind, *get_args(kind)):
        if get_origin(choices) is Literal:
            return f"expected one of {', '.join(get_args(choices))}"
    return f"{message[0].lower()}{message[1:]}"


def check(settings: WorkerSettings) -> None:
    """Check that the settings are consistent. Raise BadSetting with the setting, its value and the error."""
    kinds = (_gpus, _watch) if settings.watch_only else (_gpus, _network, _simulated, _openai, _transformers)
    for wrong, why in chain.from_iterable(rules(settings) for rules in kinds):
        if wrong:
            raise BadSetting(why)


Rules = Iterator[tuple[object, str]]
"""Pairs of whether a setting is wrong and the error text. A rule may assume that all rules before it hold."""


def _gpus(s: WorkerSettings) -> Rules:
    if not s.gpus:
        return
    from workers.devices.mapping import parse

    with _named(f"gpus = {s.gpus!r}"):
        parse(s.gpus)
    yield s.count > 1, f"gpus = {s.gpus!r}: the {s.count} workers of one process cannot have separate GPUs"


def _watch(s: WorkerSettings) -> Rules:
    selected = (s.engine_pid is None) is bool(s.gpus)
    yield not selected, "watch_only: set either gpus or engine_pid to select the GPUs to watch"
    yield s.count > 1, f"count = {s.count}: watch_only watches the GPUs of one worker"
    yield not s.nats_url, "watch_only: requires nats_url, or the data directory of a running fleet"


def _network(s: WorkerSettings) -> Rules:
    yield s.engine_pid is not None, f"engine_pid = {s.engine_pid}: only valid with watch_only"
    unreachable = s.host in WILDCARDS and not s.advertise
    yield unreachable, f"host = {s.host!r}: set advertise to the address that frontends connect to"
    no_nixl = s.kv_transport == "nixl" and find_spec("nixl") is None
    yield no_nixl, "kv_transport = 'nixl': requires the extra [nixl]: pip install -e '.[nixl]'"
    brokerless = s.request_plane == "nats" and not s.nats_url
    yield brokerless, "request_plane = 'nats': requires nats_url, or the data directory of a running fleet"
    not_shared = s.count > 1 and s.engine != "simulated"
    yield not_shared, f"count = {s.count}: only simulated engines can share a process"
    too_high = s.port and s.port + s.count - 1 > PORT_MAX
    yield too_high, f"port = {s.port}: {s.count} workers need consecutive ports up to {PORT_MAX}"


def _simulated(s: WorkerSettings) -> Rules:
    if s.engine != "simulated":
        yield (s.tp or 1) > 1, f"tp = {s.tp}: only simulated engines have ranks"
        for name in SimulatedSettings.__struct_fields__:
            value, default = getattr(s, name), getattr(_PLAIN, name)
            foreign = value != default and name != "prefix_caching"
            yield foreign, f"{name} = {value!s}: only valid for simulated engines"
    measured = s.planner_profile_data
    both = s.perf_model and measured
    yield both, f"perf_model = {s.perf_model!r}: planner_profile_data already defines the step times"
    varying = measured or s.perf_model not in (None, "constant")
    yield s.itl_ms and varying, f"itl_ms = {s.itl_ms:g}: only valid if steps take a constant time"


def _openai(s: WorkerSettings) -> Rules:
    only, key_file = "only the openai engine has an upstream", s.upstream_key_file
    if s.upstreams is not None:
        yield from _upstreams(s, s.upstreams)
    elif s.engine == "openai":
        no_url = not s.upstream.startswith(("http://", "https://"))
        needed = "the openai engine requires the URL of a server (http://...), or upstreams, a file that lists servers"
        yield no_url, f"upstream = {s.upstream!r}: {needed}"
        needed = "the openai engine requires the directory of its model's tokenizer (tokenizer.json)"
        yield not Path(s.model, "tokenizer.json").is_file(), f"model = {s.model!r}: {needed}"
    else:
        yield key_file, f"upstream_key_file = {key_file!r}: {only}"
    if key_file:
        two = "upstream_key is set too; set only one of them"
        yield s.upstream_key, f"upstream_key_file = {key_file!r}: {two}"
        with _named("upstream_key_file"):
            read_key(Path(key_file))
    events, replays = endpoints(s.upstream_kv_events), endpoints(s.upstream_kv_replay)
    yield events and s.engine != "openai", f"upstream_kv_events = {s.upstream_kv_events!r}: {only}"
    for one in (*events, *replays):
        why = endpoint_error(one)
        yield why, f"upstream_kv_events, upstream_kv_replay: {why}"
    counts = f"upstream_kv_replay has {len(replays)} endpoints, upstream_kv_events {len(events)}"
    yield replays and len(replays) != len(events), f"{counts}: set one for each"


LISTED = (
    "upstream", "upstream_key", "upstream_key_file", "upstream_kv_events", "upstream_kv_replay", "revision", "port", "spare",
    "batch_max", "waiting_max",
)  # fmt: skip
"""Settings of one worker, which a process with a file of upstreams cannot have."""


def _upstreams(s: WorkerSettings, file: Path) -> Rules:
    yield s.engine != "openai", f"upstreams = '{file}': only the openai engine has upstreams"
    for name in LISTED:
        given = getattr(s, name)
        yield (
            given,
            f"{name} = {given!r}: a process with a file of upstreams has many workers; set it in the file",
        )
    no_tokenizer = s.model and not Path(s.model, "tokenizer.json").is_file()
    yield (
        no_tokenizer,
        f"model = {s.model!r}: requires the directory of the upstreams' tokenizer (tokenizer.json)",
    )


def _transformers(s: WorkerSettings) -> Rules:
    if s.engine == "transformers":
        needed = "the transformers engine requires a model directory (config.json)"
        yield not Path(s.model, "config.json").is_file(), f"model = {s.model!r}: {needed}"


def endpoint_error(endpoint: str) -> str:
    """Return why a text is not a ZeroMQ endpoint; "" if it is one."""
    found = _ENDPOINT.fullmatch(endpoint)
    good = found is not None and int(found["port"] or 1) in range(1, PORT_MAX + 1)
    return "" if good else f"{endpoint!r} is not an endpoint (tcp://host:5557)"


def endpoints(text: str) -> list[str]:
    """Return the ZeroMQ endpoints in `text`, a comma-separated list."""
    return [one.strip() for one in text.split(",") if one.strip()]
