"""The source of a replay's requests: a recorded trace, or a profile, which never ends."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

from controller.trace import profile
from controller.trace.replay.plan import PlannedRequest, ReplayShape, plan
from controller.trace.rows import BLOCK_TOKENS, TraceReader, TraceRow
from controller.trace.synthesis import synthesize
from events.errors import UsageError

ENDLESS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ExpectedDuration:
    """The expected number of requests and duration of a replay, as far as known."""

    requests: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Options: which requests of a file to use, and how to read it."""

    path: Path
    block_tokens: int | None = None
    skip_bad: bool = False
    seed: int = 0
    shape: ReplayShape
    requests: int | None = None
    seconds: float | None = None


class TraceSource:
    """The planned requests of a file. A trace is read completely first, to find invalid lines before anything is sent."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._profile = profile.load(wanted.path) if profile.is_profile(wanted.path) else None
        self._reading: TraceReader | None = None
        given = wanted.block_tokens
        if self._profile is None:
            self._block_tokens = given or BLOCK_TOKENS
            return
        self._block_tokens = self._profile.block_tokens
        if given not in (None, self._block_tokens):
            raise UsageError(
                f"--block-size {given}: {wanted.path} was learned in blocks of {self._block_tokens} tokens"
            )
        if wanted.requests is None and wanted.seconds is None:
            raise UsageError(f"{wanted.path} is a profile, which has no end: set --max-requests or --seconds")

    @property
    def skipped(self) -> TraceReader | None:
        """The trace reader, if it skipped lines."""
        return self._reading if self._reading is not None and self._reading.skipped else None

    def expected(self) -> ExpectedDuration:
        """Return how much will be sent. Raise BadTrace, naming the line, if a trace is invalid."""
        wanted = self._wanted
        if self._profile is not None:
            return ExpectedDuration(wanted.requests, wanted.seconds)
        until_s = wanted.seconds or math.inf
        return ExpectedDuration(
            sum(1 for _ in takewhile(lambda one: one.at_s < until_s, self.planned())), None
        )

    def planned(self) -> Iterator[PlannedRequest]:
        """Yield the requests to send, from the beginning."""
        wanted = self._wanted
        return plan(islice(self._rows(), wanted.requests), self._block_tokens, wanted.shape)

    def _rows(self) -> Iterator[TraceRow]:
        if self._profile is not None:
            return synthesize(self._profile, ENDLESS, seed=self._wanted.seed)
        self._reading = TraceReader(self._wanted.path, self._block_tokens, skip_bad=self._wanted.skip_bad)
        return iter(self._reading)
