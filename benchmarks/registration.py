"""Workers that are only played, as they register."""

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
    """Return the registration of a simulated worker. Nobody connects to it, and nobody starts its process."""
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
