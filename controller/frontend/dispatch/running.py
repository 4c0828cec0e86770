"""The requests of this frontend at each worker, oldest first."""

from collections.abc import Collection, Iterator

from controller.frontend.dispatch.live_request import LiveRequest
from controller.router.endpoints import Endpoint


class RunningRequests:
    """The requests that were sent to a worker and have not left it. The worker's counters, which the router reads, change with
    them."""

    def __init__(self) -> None:
        self._at: dict[Endpoint, dict[LiveRequest, int]] = {}  # with the tokens that each began with

    def at(self, endpoint: Endpoint) -> Collection[LiveRequest]:
        """Return the requests at a worker, oldest first: a view, while there are any."""
        found = self._at.get(endpoint)
        return found.keys() if found is not None else ()

    def items(self) -> Iterator[tuple[Endpoint, Collection[LiveRequest]]]:
        """Yield each worker with its requests: copies, since requests may leave meanwhile."""
        for endpoint, there in list(self._at.items()):
            yield endpoint, tuple(there)

    def begin(self, live: LiveRequest, endpoint: Endpoint, tokens: int) -> None:
        """Count a request that was sent to a worker. `tokens`: its prompt's, and those that it may generate."""
        endpoint.begin(tokens)
        there = self._at.get(endpoint)
        if there is None:
            there = self._at[endpoint] = {}
        there[live] = tokens

    def end(self, live: LiveRequest, endpoint: Endpoint) -> None:
        """Count that a request has left a worker. Raise KeyError if it was not there."""
        there = self._at[endpoint]
        endpoint.end(there.pop(live))
        if not there:
            del self._at[endpoint]
