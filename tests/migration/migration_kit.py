"""Test kit of migration tests: the seed's model, groups and requests."""

from controller.migration.cost import KvShape, MigrationTarget
from controller.migration.links import Lane, LinkName
from controller.migration.placement import Leaving
from events.observations import Profile

LLAMA_70B = KvShape(layers=80, kv_heads=8, head_size=128, bytes_per_element=2, tp=8)


def profile(*, rate: float = 5000.0, block_tokens: int = 16) -> Profile:
    """Return the profile of a worker that prefills `rate` tokens per second."""
    return Profile(
        kv_blocks=100_000,
        block_tokens=block_tokens,
        max_batch=256,
        prefill_tokens_per_s=rate,
        tpot_ms=((1, 10.0),),
    )


def target(
    name: str = "g1",
    link: LinkName | None = "infiniband",
    *,
    free: int = 100_000,
    places: int = 256,
    sharers: int = 1,
    tp: int = 8,
    rate: float = 5000.0,
    block_tokens: int = 16,
    queued: int = 0,
    queue_s: float = 0.0,
    transfers: int = 0,
) -> MigrationTarget:
    """Return a group that is reached over `link`, or without a link."""
    return MigrationTarget(
        name=name,
        profile=profile(rate=rate, block_tokens=block_tokens),
        free_blocks=free,
        free_places=places,
        lanes=(Lane(link, sharers),) * tp if link else (),
        queued_tokens=queued,
        queue_s=queue_s,
        transfers=transfers,
    )


def leaving(
    name: str, tokens: int = 2048, *, priority: int = 1, after_s: float = 0.0, **cached: int
) -> Leaving:
    """Return a request that arrived `after_s` seconds after the start; `cached`: cached tokens by group."""
    return Leaving(
        request_id=name,
        priority=priority,
        arrived=after_s,
        tokens=tokens,
        cached=cached,
    )
