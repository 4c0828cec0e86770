"""Registrations of workers for histories that are only written and read, never served."""

from events import observations as o

WORKERS = 16
PROFILE = o.Profile(
    kv_blocks=1000,
    block_tokens=16,
    max_batch=16,
    prefill_tokens_per_s=5000.0,
    tpot_ms=((1, 10.0), (16, 20.0)),
)


def joined(worker: str) -> o.WorkerJoined:
    """Return a worker's registration."""
    return o.WorkerJoined(
        worker=worker, instance=f"{worker}-a", url="tcp://127.0.0.1:1", model="llama", revision="r1",
        tokenizer="builtin:sim", engine="simulated", engine_version="1", dtype="f32", tp=1, device="cpu",
        profile=PROFILE, canary_key="key", pid=1,
    )  # fmt: skip
