"""Decides whether an upstream is dead, from its health checks and the tokens of its streams.

| health check | effect |
|---|---|
| a good answer, however late | resets both counters below |
| a refusal: an error status, a connection that cannot be made | REFUSALS_MAX in a row: dead |
| no answer in time | dead once neither an answer nor a token has come for `silent_s` |

A token of any stream since the last check has the same effect: a saturated server answers /health late or not at all, and must
not be restarted for that. Errors do not count as tokens.
"""

from workers.engines.openai.upstream_errors import HealthAnswer

ANSWER_S_MAX = 8.0  # for one check over all paths: below the worker's own deadline of 10 s
REFUSALS_MAX = 3  # in a row
SILENT_S = (
    30.0  # default of `silent_s`: longer than a compilation or a garbage collection, equal to `dead_after`
)


class UpstreamHealth:
    """The health of one upstream. Times are monotonic seconds."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._refusals = 0  # in a row
        self._silent_since: float | None = None  # start of the first of the consecutive unanswered checks

    def judge(self, answer: HealthAnswer, began_at: float, token_at: float, now: float) -> str:
        """Return why the upstream is dead; empty if it is not.

        Args:
            answer: the result of the check.
            began_at: when the check began.
            token_at: when a token of any stream last arrived.
            now: when the check ended.
        """
        if self._silent_since is not None and token_at >= self._silent_since:
            self._silent_since = None
        if not answer.trouble or token_at >= began_at:
            self._refusals, self._silent_since = 0, None
            return ""
        if not answer.timed_out:
            self._refusals += 1
            return answer.trouble if self._refusals >= REFUSALS_MAX else ""
        self._silent_since = began_at if self._silent_since is None else self._silent_since
        silent_s = now - max(self._silent_since, token_at)
        return (
            f"{answer.trouble}, and no token came for {silent_s:.0f} s" if silent_s >= self._silent_s else ""
        )

    @property
    def troubled(self) -> bool:
        """Whether the last check failed."""
        return self._refusals > 0 or self._silent_since is not None

    @property
    def refusals(self) -> int:
        """Refused checks in a row."""
        return self._refusals
