"""Reports on the console that the journal's stream is gone or was replaced; the fleet keeps serving."""

import asyncio

from controller.processes.console import say, warn
from events.journal.nats import NatsJournal
from events.journal.port import JournalGone, JournalUnavailable

LOOK_EVERY_S = 2.0
ASK_S = 5.0


class JournalWatch:
    """Background task that checks the stream as long as the fleet runs."""

    def __init__(self, journal: NatsJournal, look_every_s: float = LOOK_EVERY_S) -> None:
        self._journal = journal
        self._look_every_s = look_every_s
        self._reported = ""
        self._task = asyncio.create_task(self._run(), name="journal-watch")

    async def _run(self) -> None:
        created = self._journal.state.created if self._journal.state is not None else ""
        while True:
            await asyncio.sleep(self._look_every_s)
            try:
                async with asyncio.timeout(ASK_S):
                    found = (await self._journal.stream_state()).created
            except JournalGone as error:
                self._report(
                    f"the journal is gone; requests are still served, and each process spools its facts. {error}"
                )
                continue
            except (JournalUnavailable, TimeoutError):
                continue  # the broker is unreachable, which its supervisor reports
            created = created or found
            self._report(
                "" if found == created else f"the journal was replaced: its stream was recreated at {found}"
            )

    def _report(self, words: str) -> None:
        if words == self._reported:
            return
        self._reported = words
        if words:
            warn(words)
        else:
            say("the journal is available again")

    async def stop(self) -> None:
        """Stop checking."""
        self._task.cancel()
        await asyncio.wait({self._task})
