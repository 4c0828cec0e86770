"""What a frontend's router hears from the broker: KV events of workers, and what other frontends have in flight.

Each has a connection of its own, so that a burst of it holds up nothing else. Where the broker is away when the frontend
starts, they come when it does: until then the router knows what it knows by itself.
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from controller.adapters.feeds.kv_events import KvEvents
from controller.adapters.feeds.slot_sync import SlotSync
from controller.frontend.director import Director
from controller.frontend.settings import RouterSettings
from events.observations import WorkerJoined

Service = Callable[[], Coroutine[Any, Any, None]]
"""What has to run for as long as a frontend does; it begins when it is called."""

WAIT_S = 2.0  # for a broker that should be there


class RouterFeeds:
    """The router's connections of one frontend: those that its settings want."""

    def __init__(self, kv: KvEvents | None, sync: SlotSync | None) -> None:
        self._kv = kv
        self._sync = sync

    @classmethod
    async def open(
        cls, url: str, name: str, settings: RouterSettings, director: Director, wait_s: float = WAIT_S
    ) -> "RouterFeeds":
        """Connect within `wait_s` seconds, or go on trying in the background."""
        scheduler, kv, sync = director.routing, None, None
        if settings.mode == "kv" and settings.kv_events:
            budget = director.settings.worker_budgets
            kv = await KvEvents.open(url, name, wait_s=wait_s, limit=budget.kv_events)
            scheduler.state.view = kv.view
            kv.view.claims.lost = director.intrusions.claims_lost
            kv.flooded = director.intrusions.claims_flooded_by
        if settings.replica_sync:
            sync = await SlotSync.open(url, name, scheduler.slots, director.peers.names, wait_s=wait_s)
        return cls(kv, sync)

    def services(self) -> list[Service]:
        """Return what has to run for as long as the frontend does."""
        return [one.run for one in (self._kv, self._sync) if one is not None]

    def absorb(self, joined: Iterable[WorkerJoined]) -> None:
        """Take in which workers live."""
        if self._kv is not None:
            self._kv.absorb(joined)

    async def close(self) -> None:
        """Let go of the broker."""
        for one in (self._kv, self._sync):
            if one is not None:
                await one.close()
