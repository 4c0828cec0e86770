"""Gives the stream its bounds, as `holdfast up` was told: as soon as a snapshot lies in what they leave, and not before."""

import asyncio

from controller.processes.console import say, warn
from controller.runtime.keeping import newest_kept
from events.errors import HoldfastError
from events.journal import bounds
from events.journal.bounds import JournalBounds
from events.journal.broker import BrokerRefused
from events.journal.nats import NatsJournal

LOOK_EVERY_S = 5.0
NOT_LET_S = 600.0  # a broker of one's own may not let us: that does not change soon
ASK_S = 60.0


class JournalBounding:
    """Tries until it is done, for as long as the fleet runs."""

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
                    wait_s = await self._look()
            except (HoldfastError, TimeoutError):
                wait_s = self._look_every_s  # the broker is away: whoever keeps it says so
            await asyncio.sleep(wait_s)

    async def _look(self) -> float:
        """Set the bounds if nothing is lost by it; return after how many seconds to look again, 0 if they are set."""
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
                warn(
                    f"the broker has not given the journal its bounds, and is asked again now and then: {error}"
                )
            self._warned = self._journal.connected
            return NOT_LET_S if self._warned else self._look_every_s
        if changed:
            say(f"the journal keeps {words(self._wanted)}")
        return 0.0

    async def stop(self) -> None:
        """Stop trying."""
        self._task.cancel()
        await asyncio.wait({self._task})


def words(wanted: JournalBounds) -> str:
    """Say what a journal with these bounds keeps."""
    said = [] if wanted.bytes is None else [f"at most {wanted.bytes / (1 << 20):,.0f} MiB"]
    said += (
        [] if wanted.age is None else [f"what is not older than {wanted.age.total_seconds() / 86400:g} days"]
    )
    return " and ".join(said) or "everything"
