"""Waits at a worker's start for its upstream, which may still be loading."""

import asyncio

import structlog

from events.process.key_file import read_key
from workers.engines.engine import Awaits, EngineDead
from workers.engines.openai.capabilities import Abilities
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.upstream import Upstream, hidden
from workers.engines.openai.upstream_errors import UpstreamUnavailable

RETRY_S = 0.5

log = structlog.get_logger(__name__)


class UpstreamWait:
    """Waits for an upstream during one start of a worker."""

    def __init__(self, upstream: Upstream, settings: UpstreamSettings) -> None:
        self._upstream = upstream
        self._settings = settings
        self._why = ""

    @property
    def awaits(self) -> Awaits | None:
        """The reason for the wait; None before the first attempt has failed, and after one has succeeded."""
        return Awaits(self._why, self._upstream.model) if self._why else None

    async def abilities(self) -> Abilities:
        """Poll until the upstream answers; return its abilities. Raise EngineDead if it takes too long."""
        loop, patience_s = asyncio.get_running_loop(), self._settings.start_s
        until = loop.time() + patience_s
        while True:
            try:
                self._reload_key()
                found = await self._upstream.abilities()
                self._why = ""
                return found
            except UpstreamUnavailable as error:
                if loop.time() > until:
                    why = hidden(str(error), self._upstream.key)
                    raise EngineDead(f"after {patience_s:g} s: {why}") from None
                if error.why != self._why:
                    self._why = error.why
                    log.info("upstream_away", reason=self._why, patience_s=patience_s)
            await asyncio.sleep(RETRY_S)

    def _reload_key(self) -> None:
        """Re-read the key file, so that a corrected file needs no restart. Raise UpstreamUnavailable."""
        if self._settings.key_file is None:
            return
        try:
            self._upstream.use_key(read_key(self._settings.key_file))
        except ValueError as error:
            raise UpstreamUnavailable(f"upstream_key_file: {error}") from None
