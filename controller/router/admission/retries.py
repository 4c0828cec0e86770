"""Is this a repeat of what was refused, and are there too many of them? In an overload each refusal that is asked again is a
request more: with two retries an overload of 2 becomes one of 6.

    a repeat     the client says so (`X-Stainless-Retry-Count` of OpenAI's own), or a request with this id was refused lately
    too many     repeats > 20 % of what is no repeat, over the last 10 s (after Envoy's retry budget)
"""

from collections import OrderedDict

from controller.router.admission.drain import WINDOW_S, Inflow

SHARE = 0.2
REPEATS_LEAST = 3.0  # in a window, however little else there is
IDS_MAX = 8192
IDS_S = 120.0


class RetryBudget:
    """The repeats of one model's requests."""

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._fresh, self._again = Inflow(), Inflow()

    def used_up(self, now: float) -> bool:
        """Say whether one repeat more would be too many."""
        fresh, again = self._fresh.rate(now) * WINDOW_S, self._again.rate(now) * WINDOW_S
        return again + 1.0 > max(REPEATS_LEAST, self._share * fresh)

    def note(self, now: float, *, repeat: bool) -> None:
        """A request has come, and was not refused for being a repeat."""
        (self._again if repeat else self._fresh).add(1.0, now)


class RefusedIds:
    """The ids of requests that were refused lately, as far as their clients gave them one."""

    def __init__(self) -> None:
        self._at: OrderedDict[str, float] = OrderedDict()

    def add(self, id: str, now: float) -> None:
        """A request was refused."""
        if id:
            self._at.pop(id, None)
            self._at[id] = now
            if len(self._at) > IDS_MAX:
                self._at.popitem(last=False)

    def __contains__(self, asked: tuple[str, float]) -> bool:
        """Say whether a request with this id was refused lately, at this time."""
        id, now = asked
        at = self._at.get(id)
        return at is not None and now - at <= IDS_S
