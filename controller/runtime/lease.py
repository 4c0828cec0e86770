"""The lease: elects the controller that decides.

The lease only avoids duplicate work; correctness rests on the journal's fence.
The holder renews a value every quarter of its time to live. No clocks are compared: a standby watches the value's revision. If
the revision has not changed for a whole time to live by the standby's own clock, it takes over by compare-and-set. The holder
counts its time from *before* the renewal request, so it stops before any standby can start.

Bytes that no controller writes (an acknowledgement that the broker was made to send here) say nothing about the lease: a holder
that finds them overwrites them at once, and a standby does not treat them as a vacancy. Only a controller's value ends or
transfers a lease.

    ttl 1 s: killed ─▶ 1.2 s without a new revision ─▶ the next look (0.25 s) ─▶ another contender holds it
"""

import asyncio
import random
from collections.abc import Callable

import msgspec
import structlog

from controller.ports import Clock
from events.journal.cell import Cell
from events.journal.port import Fenced, JournalUnavailable

TTL_S = 1.0
PATIENCE = 1.2  # times to live that a standby waits: a late renewal does not mean a dead holder
LOOKS = 4  # per time to live

log = structlog.get_logger(__name__)


class Claim(msgspec.Struct):
    """The value of the lease's cell. An empty holder has released it."""

    holder: str


FOREIGN_MAX = 8  # foreign values in a row that one look overwrites


class Lease:
    """One contender. `held` is true only while no other contender can hold the lease."""

    def __init__(self, cell: Cell, holder: str, clock: Clock, *, ttl_s: float = TTL_S) -> None:
        self.holder = holder
        self.leader = ""  # the holder at the last look
        self.takeovers = 0
        self.foreign = 0  # values seen that no controller has written
        self.report: Callable[[bytes], None] = lambda value: None  # called with each of these
        self._cell = cell
        self._clock = clock
        self._ttl_s = ttl_s
        self._revision = 0
        self._seen_at = clock.monotonic()
        self._held_until = 0.0
        self._was_held = False
        self._listeners: list[Callable[[bool], None]] = []

    @property
    def held(self) -> bool:
        """Whether we hold the lease at this moment."""
        return self._clock.monotonic() < self._held_until

    @property
    def vacant(self) -> bool:
        """Whether no contender holds the lease, as far as we can see: no renewal for longer than one may be late."""
        return not self.held and (not self.leader or self._expired())

    def listen(self, callback: Callable[[bool], None]) -> None:
        """Call `callback(held)` on a change (a loss by expiry is reported at the next look)."""
        self._listeners.append(callback)

    async def run(self) -> None:
        """Contend until cancelled, then release."""
        try:
            while True:
                await self.look()
                await self._clock.sleep(self._ttl_s / LOOKS * random.uniform(0.9, 1.1))
        finally:
            await self.release()

    async def look(self) -> None:
        """Renew the lease, or take over if the holder has stopped renewing."""
        try:
            await (self._renew_over_foreign() if self.held else self._contend())
        except Fenced:
            self._held_until = 0.0
            self._seen_at = self._clock.monotonic()
        except JournalUnavailable as error:
            log.debug("lease_unreachable", why=str(error))
        self._notify()

    async def release(self) -> None:
        """Release at once, so that a standby need not wait."""
        if not self.held:
            return
        self._held_until = 0.0
        self._notify()
        try:
            await self._cell.write(msgspec.json.encode(Claim("")), self._revision)
        except (Fenced, JournalUnavailable, asyncio.CancelledError) as error:
            log.debug("lease_not_released", why=str(error))

    async def _renew(self) -> None:
        asked_at = self._clock.monotonic()
        claim = msgspec.json.encode(Claim(self.holder))
        self._revision = await self._cell.write(claim, self._revision)
        self._held_until = asked_at + self._ttl_s
        self.leader = self.holder

    async def _renew_over_foreign(self) -> None:
        """Renew, overwriting bytes that no controller has written. Raise Fenced if a controller has written."""
        for _ in range(FOREIGN_MAX):
            try:
                await self._renew()
            except Fenced:
                value, revision = await self._cell.read()
                if _holder(value) is not None:
                    raise
                self._report_foreign(value)
                self._revision = revision
            else:
                return

    def _report_foreign(self, value: bytes) -> None:
        self.foreign += 1
        self.report(value)

    async def _contend(self) -> None:
        value, revision = await self._cell.read()
        holder = _holder(value)
        if holder is None:  # ignored: the last leader continues, or its lease expires
            self._report_foreign(value)
            self._revision = revision
            if not self.leader and not self._expired():
                return
        else:
            self.leader = holder
            if revision != self._revision:
                self._revision, self._seen_at = revision, self._clock.monotonic()
        if not self.leader or self.leader == self.holder or self._expired():
            await self._renew()
            self.takeovers += 1

    def _expired(self) -> bool:
        return self._clock.monotonic() - self._seen_at > self._ttl_s * PATIENCE

    def _notify(self) -> None:
        held = self.held
        if held != self._was_held:
            self._was_held = held
            log.info("lease_taken" if held else "lease_lost", holder=self.holder)
            for listener in self._listeners:
                listener(held)


def _holder(value: bytes) -> str | None:
    """Return the holder in this value, empty if there is none; None if no controller has written it."""
    if not value:
        return ""
    try:
        return msgspec.json.decode(value, type=Claim).holder
    except msgspec.MsgspecError:
        return None
