"""Registrations of simulated workers for benchmarks."""

from events.observations import Profile, WorkerJoined


def played_worker(
    name: str,
    profile: Profile,
    *,
    instance: str = "1",
    model: str = "sim",
    canary_key: str = "",
    kv_events: bool = False,
) -> WorkerJoined:
    """Return the registration of a simulated worker. No frontend connects to it, and it has no process."""
    return WorkerJoined(
        worker=name,
        instance=instance,
        url="",
        model=model,
        revision="1",
        tokenizer="builtin:sim",
        engine="simulated",
        engine_version="1",
        dtype="",
        tp=1,
        device="",
        profile=profile,
        canary_key=canary_key,
        pid=0,
        kv_events=kv_events,
    )
