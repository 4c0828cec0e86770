"""How long, and for what, does a worker wait at its start? Until its upstream answers, which may still be loading."""

import asyncio

import structlog

from events.process.key_file import read_key
from workers.engines.engine import Awaits, EngineDead
from workers.engines.openai.abilities import Abilities
from workers.engines.openai.away import UpstreamAway
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.upstream import Upstream, hidden

RETRY_S = 0.5

log = structlog.get_logger(__name__)


class UpstreamWait:
    """One start's wait for an upstream."""

    def __init__(self, upstream: Upstream, settings: UpstreamSettings) -> None:
        self._upstream = upstream
        self._settings = settings
        self._why = ""

    @property
    def awaits(self) -> Awaits | None:
        """What is waited for; None before the first attempt has failed, and when one has succeeded."""
        return Awaits(self._why, self._upstream.model) if self._why else None

    async def abilities(self) -> Abilities:
        """Ask until the upstream answers; return what it can. Raise EngineDead if that takes too long."""
        loop, patience_s = asyncio.get_running_loop(), self._settings.start_s
        until = loop.time() + patience_s
        while True:
            try:
                self._look_for_key()
                found = await self._upstream.abilities()
                self._why = ""
                return found
            except UpstreamAway as error:
                if loop.time() > until:
                    why = hidden(str(error), self._upstream.key)
                    raise EngineDead(f"after {patience_s:g} s: {why}") from None
                if error.why != self._why:
                    self._why = error.why
                    log.info("upstream_away", reason=self._why, patience_s=patience_s)
            await asyncio.sleep(RETRY_S)

    def _look_for_key(self) -> None:
        """Take the key as its file has it now: who mends the file need not start the worker anew. Raise UpstreamAway."""
        if self._settings.key_file is None:
            return
        try:
            self._upstream.use_key(read_key(self._settings.key_file))
        except ValueError as error:
            raise UpstreamAway(f"upstream_key_file: {error}") from None
