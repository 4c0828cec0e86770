"""The live requests that wait: parked ones, those without a first token, and those that are placed together."""

from collections.abc import Collection, Iterator

from controller.frontend.dispatch.live_request import LiveRequest


class WaitingRequests:
    """One frontend's. Whatever yields requests expects that each is dealt with before the next is asked for."""

    def __init__(self) -> None:
        self._parked: dict[LiveRequest, None] = {}
        self._unbegun: dict[LiveRequest, None] = {}
        self._rerouting: dict[LiveRequest, None] = {}

    @property
    def parked(self) -> int:
        """Number of requests that wait for a worker to continue with, or until they may be sent."""
        return len(self._parked)

    @property
    def unbegun(self) -> int:
        """Number of requests that were sent and have no first token."""
        return len(self._unbegun)

    def park(self, live: LiveRequest, *, keep_room: bool) -> None:
        """Keep a request until a worker may take it; `keep_room`: with the room that it was admitted with."""
        self._rerouting.pop(live, None)
        self._parked[live] = None
        if keep_room:
            live.keep_room()

    def unpark(self, live: LiveRequest) -> None:
        """Take a request out of the parked ones."""
        self._parked.pop(live, None)

    def sent(self, live: LiveRequest) -> None:
        """Wait for the first token of a request."""
        self._unbegun[live] = None

    def started(self, live: LiveRequest) -> None:
        """The first token of a request has come, or none will."""
        self._unbegun.pop(live, None)

    def reroute(self, live: LiveRequest) -> bool:
        """Place a request with all that lost their workers in this turn of the loop. Return whether it is the first of these."""
        first = not self._rerouting
        self._rerouting[live] = None
        return first

    def take_rerouting(self) -> Collection[LiveRequest]:
        """Return those that are to be placed now."""
        waiting, self._rerouting = self._rerouting, {}
        return waiting

    def forget(self, live: LiveRequest) -> None:
        """A request is over."""
        self._parked.pop(live, None)
        self._rerouting.pop(live, None)

    def due(self, now: float) -> Iterator[LiveRequest]:
        """Yield the parked requests that may be sent again."""
        for live in list(self._parked):
            if live in self._parked and now >= live.state.not_before:
                yield live

    def longest(self, model: str, now: float) -> LiveRequest | None:
        """Return the parked request of a model that has waited longest to continue, if it may be sent again."""
        found = [
            one
            for one in self._parked
            if one.request.model == model and one.state.move is not None and now >= one.state.not_before
        ]
        return min(found, key=lambda one: one.state.waits_until) if found else None

    def late(self, now: float, first_token_s: float) -> Iterator[LiveRequest]:
        """Yield the parked requests that have waited too long, and those that may have waited too long for their first token.
        No limit for that is shorter than `first_token_s`."""
        for live in list(self._parked):
            if live in self._parked and now > live.state.waits_until:
                yield live
        young = now - first_token_s
        for live in list(self._unbegun):
            if live in self._unbegun and live.state.began_at < young:
                yield live
