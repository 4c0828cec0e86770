"""The journal of a process without a broker."""

from events import codec
from events.fact import Observation
from events.journal.port import JournalUnavailable, StreamEnd


class DiscardingJournal:
    """Discards every observation, because no broker is configured that could store it."""

    def observe(
        self, fact: Observation, *, correlation: str = "", causation: str = "", traceparent: str = ""
    ) -> str:
        return codec.new_id()

    async def flush(self, deadline_s: float) -> bool:
        return True

    async def end(self) -> StreamEnd:
        raise JournalUnavailable("no broker is configured")

    async def close(self) -> None:
        """Do nothing, because there is no connection to close."""
