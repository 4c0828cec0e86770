"""To whom does one answer owe its tokens? The worker that said them, and those whose KV cache that worker took over.

What a reader would get wrong: after a transfer the answer still hangs on its source. What was computed there wrongly goes
on being wrong at the target, so a conviction of the source names all that came since, whoever has said it.
"""

import msgspec

from controller.frontend.health.exposure import Exposed, Exposures, ServedSpan
from controller.frontend.request.generation_request import GenerationRequest
from controller.router.endpoints import Key


class Provenance(msgspec.Struct, eq=False):
    """The served spans of one answer."""

    _exposures: Exposures
    _request: GenerationRequest
    _generation: Exposed | None
    own: ServedSpan | None = None  # the present worker's, from its first token on
    sources: tuple[ServedSpan, ...] = ()  # of those whose KV cache it has taken over
    _left: tuple[ServedSpan, ...] = ()  # a conviction may come when the request has moved on

    def begin(self, key: Key, rank: int | None, first: int) -> ServedSpan:
        """The first tokens come from this worker (of several DP ranks from this one), and the first of them has this index."""
        request = self._request
        served_span = ServedSpan(
            request.id, request.model, first, self._generation, request.traceparent, rank, key
        )
        self.own = served_span
        self._exposures.note(served_span)
        return served_span

    def carried(self) -> None:
        """Another worker goes on, with the KV cache of this one."""
        self.sources, self.own = self._open, None

    def hangs_on(self, key: Key) -> bool:
        """Say whether what comes now is computed from what this worker computed."""
        return any(served_span.key == key for served_span in self._open)

    def leave(self) -> None:
        """What comes from now on is computed anew."""
        over = self._open
        for served_span in over:
            self._exposures.close(served_span)
        self._left += over
        self.sources, self.own = (), None

    def end(self) -> None:
        """The answer is over."""
        self._generation = None
        for served_span in self._left + self._open:
            served_span.generation = None

    @property
    def _open(self) -> tuple[ServedSpan, ...]:
        """Those that the present attempt hangs on, its own last."""
        return (*self.sources, self.own) if self.own is not None else self.sources
