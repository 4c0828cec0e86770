"""Endpoints of workers that need not be reachable."""

from json_types import Json

from controller.router.endpoints import Endpoint
from events.decisions import HealthStatus
from events.observations import Profile, WorkerJoined

BLOCK = 16
PROFILE = Profile(
    kv_blocks=100, block_tokens=BLOCK, max_batch=8, prefill_tokens_per_s=1e5, tpot_ms=((1, 1.0),)
)


def endpoint(name: str, weight: float = 1.0, **changes: object) -> Endpoint:
    """Return the endpoint of a worker in service."""
    given: Json = {
        "url": f"tcp://{name}:1",
        "model": "m",
        "revision": "r1",
        "tokenizer": "t",
        "engine": "simulated",
        "engine_version": "1",
        "dtype": "fp32",
        "tp": 1,
        "device": "cpu",
        "profile": PROFILE,
        "canary_key": "k",
        "pid": 1,
    }
    joined = WorkerJoined(worker=name, instance="i1", **(given | changes))
    return Endpoint(joined, weight=weight, status=HealthStatus.HEALTHY)
