"""Says on the console of `holdfast up` that the journal's stream is gone or another one, while the fleet serves on without it."""

import asyncio

from controller.processes.console import say, warn
from events.journal.nats import NatsJournal
from events.journal.port import JournalGone, JournalUnavailable

LOOK_EVERY_S = 2.0
ASK_S = 5.0


class JournalWatch:
    """Looks at the stream for as long as the fleet runs."""

    def __init__(self, journal: NatsJournal, look_every_s: float = LOOK_EVERY_S) -> None:
        self._journal = journal
        self._look_every_s = look_every_s
        self._said = ""
        self._task = asyncio.create_task(self._run(), name="journal-watch")

    async def _run(self) -> None:
        created = self._journal.state.created if self._journal.state is not None else ""
        while True:
            await asyncio.sleep(self._look_every_s)
            try:
                async with asyncio.timeout(ASK_S):
                    found = (await self._journal.stream_state()).created
            except JournalGone as error:
                self._say(
                    f"the journal is gone; requests are served, and facts are kept by those who say them. {error}"
                )
                continue
            except (JournalUnavailable, TimeoutError):
                continue  # the broker is away: whoever keeps it says so
            created = created or found
            self._say(
                "" if found == created else f"the journal is another one: its stream was made anew at {found}"
            )

    def _say(self, words: str) -> None:
        if words == self._said:
            return
        self._said = words
        if words:
            warn(words)
        else:
            say("the journal is back")

    async def stop(self) -> None:
        """Stop looking."""
        self._task.cancel()
        await asyncio.wait({self._task})
