"""Makes the parts of a worker from its process's settings: configuration and KV event publisher."""

from msgspec.structs import asdict, replace

from events.fleet_key import FleetKey
from events.nats import urls
from events.nats.bus import NatsBus
from workers.config.settings import WorkerConfig, WorkerSettings
from workers.kv_events.publisher import KvPublisher
from workers.shutdown import budget_s


def kv_publisher(settings: WorkerSettings, config: WorkerConfig, bus: NatsBus | None) -> KvPublisher | None:
    """Return the publisher of a worker's KV events; None without a broker or if KV events are disabled."""
    if bus is None or not settings.kv_events:
        return None
    return KvPublisher(config.name, config.instance, bus.connection)


def worker_configs(settings: WorkerSettings, instance: str, key: FleetKey | None) -> list[WorkerConfig]:
    """Return the configuration of each worker that these settings describe. `key` is the fleet key, if there is one."""
    shared = WorkerConfig(
        **asdict(settings),
        account=urls.user(settings.nats_url),
        shares_process=settings.count > 1,
        computes_on_gpus=settings.engine != "openai",
        key=key,
    )
    grace_s = budget_s(settings.grace_s, settings.orchestrator_grace_s, settings.pre_stop)
    return [
        replace(
            shared,
            name=name,
            instance=instance if settings.count == 1 else f"{instance}-{number}",
            port=settings.port + number if settings.port else 0,
            grace_s=grace_s,
        )
        for number, name in enumerate(settings.names)
    ]
