"""Tracks the prefix cache of one rank of an upstream, from the upstream's KV-event batches.

An upstream publishes its KV events in numbered batches. Lost batches are requested again from the upstream's replay endpoint.

    connect, reconnect ──▶ restore: request the batches after the last one
                              │ the replay continues from the last one ──▶ up to date
                              └ it does not ──▶ announce an empty cache; request all batches that the upstream still has
    batch ── follows ──▶ take ──▶ up to date
          ├─ lost or restarted ──▶ restore
          └─ cannot be read ──▶ announce an empty cache
    no batch for a while ──▶ check: request the batches after the last one

If a restore is not possible (no replay endpoint, or no answer from it), the cache counts as empty until new batches fill it.
This module uses no sockets and no clock. The caller passes a function, `ask`, which requests replays.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import structlog

from events.kv import KvEvent
from workers.engines.openai.kv_names import MalformedKvBatch, Names, UpstreamBatch, read_batch

Verdict = Literal["follows", "heard", "restarted", "lost"]


@dataclass(frozen=True, slots=True)
class Cursor:
    """The number and time of the last processed KV-event batch of one rank.

    An engine numbers its batches from 0 and adds a timestamp of its own clock to each. `judge` compares a new batch with the last
    processed one, and classifies the new batch as follows:

        the next number                        follows    process it
        not a higher number, not a later time  heard      a duplicate, because a replay and the live stream overlap
        not a higher number, but a later time  restarted  the engine has restarted, with an empty cache
        any other number                       lost       the batches in between are lost

    A replay is requested from the last processed batch on, so that the replayed copy of this batch can be compared with the
    original. If the replay lacks the batch, or contains it with another time, the events after the last processed batch are
    unknown.
    """

    number: int | None = None  # None before the first batch: any batch may follow
    at: float = 0.0  # seconds, by the engine's clock

    def judge(self, number: int, at: float) -> Verdict:
        """Classify a batch by its number and time, as the table in the docstring of `Cursor` shows."""
        if self.number is None or number == self.number + 1:
            return "follows"
        if number > self.number:
            return "lost"
        return "heard" if at <= self.at else "restarted"


Frame = tuple[int, bytes]
"""A batch's number and payload."""

ASKS_MAX = 20  # replay requests per restore; each of them must advance the position
COUNTED = ("batches", "malformed", "unknown", "lost", "restarted", "cleared", "replayed", "replay_failed")

log = structlog.get_logger(__name__)


class NoReplay(Exception):
    """The upstream has no replay endpoint, or does not answer a replay request."""


Ask = Callable[[int], Iterable[Frame]]
"""Requests a replay of the batches from a given number on, as far as the upstream still has them.

NoReplay may also be raised during the iteration.
"""


def no_replay(first: int) -> Iterable[Frame]:
    """Raise NoReplay. `UpstreamRank` calls this function if its upstream has no replay endpoint."""
    raise NoReplay("it has no replay endpoint")


class UpstreamRank:
    """Tracks the prefix cache of one rank of an upstream, and announces the changes."""

    def __init__(
        self, rank: int, announce: Callable[[int, list[KvEvent]], None], ask: Ask = no_replay
    ) -> None:
        self.names = Names()
        self.counters = dict.fromkeys(COUNTED, 0)
        self._rank = rank
        self._announce = announce
        self._ask = ask
        self._cursor = Cursor()
        self._log = log.bind(rank=rank)

    def check(self) -> None:
        """Request the batches after the last processed one, in order to detect whether the newest batches were lost.

        Such a loss is not visible as a gap in the numbers. If no replay is possible, the known blocks stay valid. If a replay
        does not begin with the last processed batch, announce an empty cache and request all batches.
        """
        if self._cursor.number is None:
            return
        try:
            if not self._continued():
                self.clear()
                self._replay(0)
        except NoReplay as reason:  # the known blocks stay valid
            self._log.info("upstream_kv_events_not_checked", reason=str(reason))

    def counts(self) -> dict[str, int]:
        """Return, by name, the numbers of batches, of errors in batches, and of skipped blocks."""
        passed_over = self.names.passed_over
        return self.counters | {f"blocks_{reason}": count for reason, count in passed_over.items()}

    def receive(self, number: int, payload: bytes) -> None:
        """Process a batch of the live stream. If batches before it are lost, restore them first."""
        batch = self._read(number, payload)
        if batch is None:
            return
        verdict = self._cursor.judge(number, batch.at)
        if verdict in ("lost", "restarted"):
            self.counters[verdict] += 1
            expected = None if self._cursor.number is None else self._cursor.number + 1
            self._log.warning("upstream_kv_events_" + verdict, expected=expected, found=number)
            self.restore(another_life=verdict == "restarted")
            verdict = self._cursor.judge(number, batch.at)
        if verdict == "heard":
            return
        if verdict != "follows":
            self.clear(another_life=verdict == "restarted")
        self._take(number, batch)

    # --- batches

    def _read(self, number: int, payload: bytes) -> UpstreamBatch | None:
        try:
            return read_batch(payload)
        except MalformedKvBatch as error:
            last, at = self._cursor.number, self._cursor.at
            if last is not None and number <= last:
                return None
            if not self.counters["malformed"]:
                self._log.error("upstream_kv_events_malformed", number=number, reason=str(error))
            self.counters["malformed"] += 1
            self.clear()
            self._cursor = Cursor(number, at)
            return None

    def _take(self, number: int, batch: UpstreamBatch) -> None:
        self.counters["batches"] += 1
        self.counters["unknown"] += batch.unknown
        self._cursor = Cursor(number, batch.at)
        if events := self.names.take(batch.events):
            self._announce(self._rank, events)

    def clear(self, *, another_life: bool = False) -> None:
        """Announce an empty cache, and accept any batch as the next one.

        `another_life` means that the engine has restarted, so that a block name may now stand for another block.
        """
        if len(self.names) or self._cursor.number is not None:
            self.counters["cleared"] += 1
            self._announce(self._rank, self.names.forget() if another_life else self.names.lose())
        self._cursor = Cursor()

    # --- replays

    def restore(self, *, another_life: bool = False) -> None:
        """Process the missed batches from a replay. If no replay is possible, announce an empty cache.

        `another_life` means that the engine has restarted. Then all batches of the restarted engine are requested, from number 0
        on.
        """
        try:
            if another_life or self._cursor.number is None or not self._continued():
                self.clear(another_life=another_life)
                self._replay(0)
        except NoReplay as reason:
            self.counters["replay_failed"] += self._ask is not no_replay
            self._log.info("upstream_kv_events_not_replayed", reason=str(reason))
            self.clear(another_life=another_life)

    def _continued(self) -> bool:
        """Process a replay of all batches after the last processed one, and return True.

        Return False if the replay does not begin with the last processed batch. Raise NoReplay if the upstream does not complete
        a replay, or if gaps remain after repeated replays.
        """
        assert self._cursor.number is not None
        frames = iter(self._ask(self._cursor.number))
        number, payload = next(frames, (-1, b""))
        batch = self._read(number, payload) if number >= 0 else None
        if batch is None or Cursor(number, batch.at) != self._cursor:
            return False
        return self._take_all(frames) or self._replay(self._cursor.number + 1)

    def _replay(self, first: int) -> bool:
        """Process a replay of all batches from number `first` on that the upstream still has, and return True.

        If the replay has a gap, request another replay from the gap on. Raise NoReplay if the gaps remain.
        """
        for _ in range(ASKS_MAX):
            before = self._cursor.number
            if self._take_all(self._ask(first)):
                return True
            if self._cursor.number is None or self._cursor.number == before:
                break
            first = self._cursor.number + 1
        raise NoReplay("its replays have gaps")

    def _take_all(self, frames: Iterable[Frame]) -> bool:
        """Process consecutive batches, and return True.

        If batches are missing in between, or the engine has restarted, stop and return False.
        """
        for number, payload in frames:
            batch = self._read(number, payload)
            if batch is None:
                continue
            verdict = self._cursor.judge(number, batch.at)
            if verdict == "follows":
                self.counters["replayed"] += 1
                self._take(number, batch)
            elif verdict != "heard":
                return False
        return True
