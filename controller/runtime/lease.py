"""The lease: elects the controller that makes decisions.

The lease only avoids duplicate work. Correctness is ensured by the journal's fence, which rejects the decisions of a controller
that has not read the journal's last decision. On the broker, the lease is a cell with one value. The leading controller (the
holder) rewrites the value every quarter of the time to live (TTL). No clocks are compared. A standby watches the value's
revision. If the revision does not change for PATIENCE times the TTL by the standby's own clock, the standby takes over by
compare-and-set. The holder counts the TTL from *before* its renewal request, and a standby from when it sees the new revision. So
the holder stops before any standby can start.

A worker can make the broker write an acknowledgement into the cell. Such foreign bytes do not affect the lease. The holder
overwrites them at once, and a standby does not treat them as a vacant lease. Only a controller's value ends or transfers a lease.

After the holder was killed, with a TTL of 1 s:

    killed ─▶ 1.2 s without a new revision ─▶ the next check (every 0.25 s) ─▶ another controller holds the lease
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
PATIENCE = 1.2  # a standby waits this many TTLs, because a renewal can be slightly late
LOOKS = 4  # renewals or checks per TTL

log = structlog.get_logger(__name__)


class Claim(msgspec.Struct):
    """The value stored for the lease: the controller that holds it. An empty `holder` means that the lease was released."""

    holder: str


FOREIGN_MAX = 8  # foreign values in a row that one look overwrites


class Lease:
    """Contends for the lease on behalf of one controller. While `held` is true, no other controller holds the lease."""

    def __init__(self, cell: Cell, holder: str, clock: Clock, *, ttl_s: float = TTL_S) -> None:
        self.holder = holder
        self.leader = ""  # the holder at the last look
        self.takeovers = 0
        # called with each value in the cell that no controller has written
        self.report: Callable[[bytes], None] = lambda value: None
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
        """Whether this controller holds the lease at this moment."""
        return self._clock.monotonic() < self._held_until

    @property
    def vacant(self) -> bool:
        """Whether no controller seems to hold the lease: it was released, or not renewed for PATIENCE times the TTL."""
        return not self.held and (not self.leader or self._expired())

    def listen(self, callback: Callable[[bool], None]) -> None:
        """Call `callback(held)` whenever `held` changes. An expiry is noticed at the next call of `look`."""
        self._listeners.append(callback)

    async def run(self) -> None:
        """Contend for the lease until cancelled, then release it."""
        try:
            while True:
                await self.look()
                await self._clock.sleep(self._ttl_s / LOOKS * random.uniform(0.9, 1.1))
        finally:
            await self.release()

    async def look(self) -> None:
        """Renew the lease if this controller holds it. Take the lease over if it was released or is no longer renewed."""
        try:
            await (self._renew_over_foreign() if self.held else self._contend())
        except Fenced:
            self._held_until = 0.0
            self._seen_at = self._clock.monotonic()
        except JournalUnavailable as error:
            log.debug("lease_unreachable", why=str(error))
        self._notify()

    async def release(self) -> None:
        """Release the lease, so that a standby can take over without waiting for its expiry."""
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
        """Renew the lease, even if a worker has made the broker store other bytes in its place.

        Raise Fenced if a controller has written a value since the last known renewal.
        """
        for _ in range(FOREIGN_MAX):
            try:
                await self._renew()
            except Fenced:
                value, revision = await self._cell.read()
                if _holder(value) is not None:
                    raise
                self.report(value)
                self._revision = revision
            else:
                return

    async def _contend(self) -> None:
        value, revision = await self._cell.read()
        holder = _holder(value)
        # such a value changes nothing: the last leader still counts until its lease expires
        if holder is None:
            self.report(value)
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
    """Return the holder named by this value; None if a controller cannot have written the value.

    "" if the lease was released or never held.
    """
    if not value:
        return ""
    try:
        return msgspec.json.decode(value, type=Claim).holder
    except msgspec.MsgspecError:
        return None
