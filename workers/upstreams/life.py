"""Builds one life of an upstream's worker: its account, its connections, its engine and the worker."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from events.errors import BadSetting
from events.fleet_key import FleetKey
from workers.assembly import kv_publisher, worker_configs
from workers.config.settings import WorkerSettings
from workers.config.settings_check import check, with_broker_user
from workers.config.upstream_route import LiveSettings, UpstreamRoute
from workers.config.upstreams import UpstreamEntry
from workers.engines.build import UpstreamEngine, build_upstream_engine
from workers.fleet_links import FleetLinks, connect_worker
from workers.worker import InferenceWorker, WorkerDeadlines

STARTS_MAX = 8
START_SPARE_S = 60.0  # beyond the engine's own deadline, because the engine's error carries the reason


@dataclass(frozen=True, slots=True)
class UpstreamLife:
    """One life of an upstream's worker, which has not started yet."""

    entry: UpstreamEntry  # the entry with which it was built
    worker: InferenceWorker
    engine: UpstreamEngine
    links: FleetLinks

    def adjust(self, wanted: UpstreamEntry) -> None:
        """Apply the fields of `wanted` that can change while the worker runs."""
        lower = wanted.limits.requests_max < self.entry.limits.requests_max
        self.engine.adjust(
            LiveSettings(
                route=route_of(wanted),
                key_file=Path(wanted.key_file) if wanted.key_file else None,
                weight=wanted.weight,
                requests_max=wanted.limits.requests_max if lower else None,
            )
        )


@dataclass(frozen=True, slots=True)
class LifeFactory:
    """Builds the lives of all upstreams of a process, from the process's settings."""

    settings: WorkerSettings
    key: FleetKey | None
    # limits the connections that are made at once, so that each is made within the time that a start waits for the broker
    starting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(STARTS_MAX))

    async def build(self, entry: UpstreamEntry, instance: str, *, name_check_s: float) -> UpstreamLife:
        """Connect to the fleet with the worker's account, and build the worker.

        The worker listens for `name_check_s` seconds whether its name is free. Raise HoldfastError if a setting is invalid, and
        OSError if the account's key cannot be written.
        """
        settings = worker_settings(self.settings, entry)
        check(settings)
        engine = build_upstream_engine(settings, route_of(entry), entry.weight)
        # in a thread, because it waits until the broker accepts a new account
        async with self.starting:
            settings = await asyncio.to_thread(with_broker_user, settings)
            links = await connect_worker(settings)
        try:
            (config,) = worker_configs(settings, instance, self.key)
            config = replace(config, shares_process=True, name_check_s=name_check_s)
            worker = InferenceWorker(
                config,
                engine.engine,
                links.journal,
                links.bus,
                None,
                links.channels,
                kv_publisher(settings, config, links.bus),
                WorkerDeadlines(start_s=settings.ready_timeout + START_SPARE_S),
            )
        except BaseException:
            await links.close()
            raise
        return UpstreamLife(entry, worker, engine, links)


def route_of(entry: UpstreamEntry) -> UpstreamRoute:
    """Return how the upstream of this entry is reached."""
    return UpstreamRoute(tls=entry.tls, headers=entry.headers, proxy=entry.proxy)


def worker_settings(process: WorkerSettings, entry: UpstreamEntry) -> WorkerSettings:
    """Return the settings of the worker for one entry, as if it ran alone in its process.

    Raise BadSetting if no tokenizer is configured.
    """
    model = entry.model or process.model
    if not model:
        raise BadSetting(f"{entry.name}: model: missing; set it in the file of upstreams, or --model for all")
    return replace(
        process,
        name=entry.name,
        upstreams=None,
        upstream=entry.url,
        upstream_key_file=entry.key_file,
        upstream_kv_events=",".join(entry.kv_events),
        upstream_kv_replay=",".join(entry.kv_replay),
        model=model,
        revision=entry.revision,
        batch_max=entry.limits.requests_max,
        waiting_max=entry.limits.waiting_max,
    )
