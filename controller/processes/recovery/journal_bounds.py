"""Sets the journal stream's retention bounds as soon as the events to be retained include a snapshot."""

import asyncio

from controller.processes.console import say, warn
from controller.runtime.snapshot_publisher import newest_kept
from events.errors import HoldfastError
from events.journal import bounds
from events.journal.broker import BrokerRefused
from events.journal.nats import NatsJournal
from events.journal.retention import JournalBounds

LOOK_EVERY_S = 5.0
FORBIDDEN_S = 600.0  # retry delay if an external broker forbids it
ASK_S = 60.0


class JournalBounding:
    """Background task that sets the bounds, retrying as long as the fleet runs."""

    def __init__(
        self, journal: NatsJournal, wanted: JournalBounds, look_every_s: float = LOOK_EVERY_S
    ) -> None:
        self._journal = journal
        self._wanted = wanted
        self._look_every_s = look_every_s
        self._warned = False
        self._task = asyncio.create_task(self._run(), name="journal-bounding")

    async def _run(self) -> None:
        wait_s = self._look_every_s
        while wait_s:
            try:
                async with asyncio.timeout(ASK_S):
                    wait_s = await self._try()
            except (HoldfastError, TimeoutError):
                wait_s = self._look_every_s  # the broker is unreachable, which its supervisor reports
            await asyncio.sleep(wait_s)

    async def _try(self) -> float:
        """Set the bounds if no event without a snapshot is lost. Return the seconds until the next try, 0 if they are set."""
        usage = await self._journal.usage(growth=False)
        if self._wanted == JournalBounds(usage.bytes_max, usage.age_max):
            return 0.0
        kept = await newest_kept(self._journal) if self._wanted else None
        if not bounds.safe(self._wanted, usage, kept):
            return self._look_every_s
        try:
            changed = await bounds.bound(self._journal.connection, self._wanted)
        except (HoldfastError, BrokerRefused) as error:
            if not self._warned and self._journal.connected:
                warn(f"cannot set the journal's bounds, retrying every {FORBIDDEN_S / 60:g} min: {error}")
            self._warned = self._journal.connected
            return FORBIDDEN_S if self._warned else self._look_every_s
        if changed:
            say(f"the journal now keeps {words(self._wanted)}")
        return 0.0

    async def stop(self) -> None:
        """Stop retrying."""
        self._task.cancel()
        await asyncio.wait({self._task})


def words(wanted: JournalBounds) -> str:
    """Return a text about the events that a journal with these bounds keeps."""
    limits = [] if wanted.bytes is None else [f"at most {wanted.bytes / (1 << 20):,.0f} MiB"]
    limits += (
        [] if wanted.age is None else [f"events of the last {wanted.age.total_seconds() / 86400:g} days"]
    )
    return " and ".join(limits) or "everything"
