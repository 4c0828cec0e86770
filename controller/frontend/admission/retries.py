"""Limits retries of refused requests. Pure.

In an overload, each retry of a refused request adds load: two retries turn an overload of factor 2 into one of factor 6.

    repeat      marked by the client (`X-Stainless-Retry-Count` of OpenAI's client), or a request with its id was refused lately
    too many    repeats > 20 % of the other requests, over the last 10 s (after Envoy's retry budget)
"""

from collections import OrderedDict

from controller.frontend.admission.pool import WINDOW_S, Inflow

SHARE = 0.2
REPEATS_LEAST = 3.0  # repeats always allowed per window
IDS_MAX = 8192
IDS_S = 120.0


class RetryBudget:
    """The retry budget of one model's requests."""

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._fresh, self._again = Inflow(), Inflow()

    def used_up(self, now: float) -> bool:
        """Return whether one more repeat would exceed the budget."""
        fresh, again = self._fresh.rate(now) * WINDOW_S, self._again.rate(now) * WINDOW_S
        return again + 1.0 > max(REPEATS_LEAST, self._share * fresh)

    def note(self, now: float, *, repeat: bool) -> None:
        """Count a request that the budget has not refused. `repeat`: it is a retry of a refused request."""
        (self._again if repeat else self._fresh).add(1.0, now)


class RefusedIds:
    """The ids of recently refused requests, for clients that send ids. Bounded."""

    def __init__(self) -> None:
        self._at: OrderedDict[str, float] = OrderedDict()

    def add(self, id: str, now: float) -> None:
        """Record the id of a refused request."""
        if id:
            self._at.pop(id, None)
            self._at[id] = now
            if len(self._at) > IDS_MAX:
                self._at.popitem(last=False)

    def knows(self, id: str, now: float) -> bool:
        """Return whether a request with this id was refused recently."""
        at = self._at.get(id)
        return at is not None and now - at <= IDS_S
