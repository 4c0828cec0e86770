"""Broker subscriptions of a frontend's router: workers' KV events, and the load of other frontends.

Each has its own connection, so that a burst on one does not delay other messages. If the broker is unreachable when the frontend
starts, they connect later; until then the router uses only what this frontend has observed.
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from controller.adapters.feeds.kv_events import KvEvents
from controller.adapters.feeds.slot_sync import SlotSync
from controller.frontend.director import Director
from controller.frontend.settings import RouterSettings
from events.observations import WorkerJoined

Service = Callable[[], Coroutine[Any, Any, None]]
"""Starts a service that runs as long as the frontend does."""

WAIT_S = 2.0  # how long to wait for the broker


class RouterFeeds:
    """The broker connections of one frontend's router, as its settings require."""

    def __init__(self, kv: KvEvents | None, sync: SlotSync | None) -> None:
        self._kv = kv
        self._sync = sync

    @classmethod
    async def open(
        cls, url: str, name: str, settings: RouterSettings, director: Director, wait_s: float = WAIT_S
    ) -> "RouterFeeds":
        """Connect within `wait_s` seconds, or keep trying in the background."""
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
        """Return the services to run as long as the frontend does."""
        return [one.run for one in (self._kv, self._sync) if one is not None]

    def absorb(self, joined: Iterable[WorkerJoined]) -> None:
        """Update the set of live workers."""
        if self._kv is not None:
            self._kv.absorb(joined)

    async def close(self) -> None:
        """Close the connections to the broker."""
        for one in (self._kv, self._sync):
            if one is not None:
                await one.close()
