"""What a worker can be told: by flags, or by `HOLDFAST_WORKER_*` in the environment. Flags win."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from events.errors import HoldfastError

PREFIX = "HOLDFAST_WORKER_"
WILDCARDS = ("0.0.0.0", "::", "")


class BadSetting(HoldfastError):
    """A setting of the worker has a value that makes no sense, or there is no such setting."""


class WorkerSettings(BaseSettings):
    """One worker process. What is None takes the engine's own default."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, protected_namespaces=(), env_ignore_empty=True
    )

    engine: Literal["simulated", "transformers", "openai"] = Field(
        "simulated", description="what runs the model"
    )
    name: str = Field("w0", min_length=1, max_length=64, description="the worker's stable name")
    instance: str = Field("", max_length=64, description="this life of it; empty: a fresh one")
    model: str = Field(
        "",
        description="simulated: a model name; transformers: the model's folder; openai: the tokenizer's folder",
    )
    upstream: str = Field("", description="openai: the server's URL, for example http://127.0.0.1:8000")
    upstream_key: str = Field(
        "", repr=False, description="openai: the API key of the upstream, if it wants one"
    )
    count: int = Field(
        1, ge=1, le=1000, description="simulated: so many workers in this process (w0, w1 ...)"
    )
    host: str = Field("127.0.0.1", description="the address to listen on")
    advertise: str = Field("", description="the address that frontends are told; empty: the one listened on")
    port: int = Field(0, ge=0, le=65535, description="the request plane's port; 0: any free one")
    admin_port: int = Field(
        0, ge=-1, le=65535, description="/health, /live, /metrics; 0: any free one, -1: none"
    )
    data: Path = Field(Path(".holdfast"), description="the fleet's data directory")
    nats_url: str = Field("", description="the broker; empty: serve without a fleet")
    grace_s: float = Field(
        60.0, ge=0, le=86_400, description="seconds that streams may finish in after SIGTERM"
    )
    migration_limit: int | None = Field(None, ge=0, description="how often a request of this model may move")
    chaos: bool = Field(True, description="obey the rehearsed faults that the controller passes on")
    die_with_parent: bool = Field(False, description="end when the process that started this one ends")
    itl_ms: float = Field(0.0, ge=0, le=60_000, description="simulated: milliseconds per step; 0: flat out")
    prefill_tokens_per_s: float | None = Field(None, gt=0, description="simulated: prompt tokens per second")
    context_tokens: int | None = Field(None, ge=16, description="the longest sequence")
    kv_blocks: int | None = Field(None, ge=1, description="simulated: blocks of the KV cache")
    block_tokens: int | None = Field(None, ge=1, description="tokens per KV block")
    batch_max: int | None = Field(None, ge=1, description="sequences that run at once")
    waiting_max: int | None = Field(None, ge=0, description="sequences that wait at most")
    prefill_tokens_max: int | None = Field(None, ge=1, description="prompt tokens per step")
    device: str | None = Field(None, description="transformers: cpu, cuda or cuda:N")
    dtype: str | None = Field(None, description="transformers: float32, bfloat16 or float16")
    threads: int | None = Field(None, ge=1, description="transformers: CPU threads of one step")
    revision: str = Field("", description="openai: the revision of the weights, where you know it")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the workers in this process: w3 and a count of 2 are w3 and w4."""
        if self.count == 1:
            return (self.name,)
        stem = self.name.rstrip("0123456789")
        first = int(self.name[len(stem) :] or 0)
        return tuple(f"{stem}{first + n}" for n in range(self.count))


def load_settings(flags: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> WorkerSettings:
    """Return the settings of this process. Raise BadSetting, naming the setting, its value and what is expected."""
    known = os.environ if environment is None else environment
    for variable in known:
        if variable.startswith(PREFIX) and variable[len(PREFIX) :].lower() not in WorkerSettings.model_fields:
            raise BadSetting(f"{variable} is not a setting of a worker; `holdfast worker --help` lists them")
    given = {name: value for name, value in flags.items() if value is not None}
    if "nats_url" not in given and f"{PREFIX}NATS_URL" not in known and known.get("HOLDFAST_NATS_URL"):
        given["nats_url"] = known["HOLDFAST_NATS_URL"]
    try:
        settings = WorkerSettings(**given)
    except ValidationError as error:
        raise BadSetting(describe(error)) from None
    _check(settings)
    return settings


def _check(settings: WorkerSettings) -> None:
    if settings.host in WILDCARDS and not settings.advertise:
        raise BadSetting(
            f"host = {settings.host!r}: with it, advertise must say which address frontends shall use"
        )
    if settings.count > 1 and settings.engine != "simulated":
        raise BadSetting(f"count = {settings.count}: only simulated engines share a process")
    if settings.engine == "openai" and not settings.upstream.startswith(("http://", "https://")):
        raise BadSetting(
            f"upstream = {settings.upstream!r}: the openai engine needs the URL of a server (http://...)"
        )
    if settings.engine == "transformers" and not Path(settings.model).joinpath("config.json").is_file():
        raise BadSetting(
            f"model = {settings.model!r}: the transformers engine needs a model's folder (config.json)"
        )


def describe(error: ValidationError) -> str:
    """Say in one sentence which settings are wrong, with their values, and what they should be."""
    return "; ".join(
        f"{'.'.join(str(part) for part in e['loc'])} = {e['input']!r}: {e['msg'][0].lower()}{e['msg'][1:]}"
        for e in error.errors()
    )
