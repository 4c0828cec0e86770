"""Which requests of this frontend are with which worker, in the order of their arrival?"""

from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

from controller.router.endpoints import Endpoint

R = TypeVar("R")


class RunningRequests(Generic[R]):
    """The requests that were sent to a worker and have not left it. What the router reckons with, the worker's counters,
    changes with them."""

    def __init__(self) -> None:
        self._at: dict[Endpoint, dict[R, int]] = {}  # with the tokens that each began with

    def at(self, endpoint: Endpoint) -> Collection[R]:
        """Return the requests that are with a worker, the oldest first: a view, while there are any."""
        found = self._at.get(endpoint)
        return found.keys() if found is not None else ()

    def items(self) -> Iterator[tuple[Endpoint, Collection[R]]]:
        """Yield each worker with its requests: copies, since requests may leave meanwhile."""
        for endpoint, there in list(self._at.items()):
            yield endpoint, tuple(there)

    def begin(self, request: R, endpoint: Endpoint, tokens: int) -> None:
        """Take in that a request was sent to a worker. `tokens`: its prompt's, and those that it may generate."""
        endpoint.begin(tokens)
        there = self._at.get(endpoint)
        if there is None:
            there = self._at[endpoint] = {}
        there[request] = tokens

    def end(self, request: R, endpoint: Endpoint) -> None:
        """Take in that a request has left a worker. Raise KeyError if it was not there."""
        there = self._at[endpoint]
        endpoint.end(there.pop(request))
        if not there:
            del self._at[endpoint]
