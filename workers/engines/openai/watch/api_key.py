"""The API key of an upstream. A rotated key file is read again without a restart."""

import asyncio
from pathlib import Path

import structlog

from events.process.key_file import read_key
from workers.engines.openai.upstream import Upstream

EVERY_S = 1.0  # between two reads of the file
READ_S_MAX = 2.0  # a file system that hangs must not delay requests

log = structlog.get_logger(__name__)


class UpstreamKey:
    """Keeps an upstream's key equal to the content of a key file. Without a file the key never changes."""

    def __init__(self, upstream: Upstream, file: Path | None) -> None:
        self._upstream = upstream
        self._file = file
        self._trouble = ""

    async def follow(self, every_s: float = EVERY_S) -> None:
        """Read the file repeatedly, until cancelled."""
        while self._file is not None:
            await asyncio.sleep(every_s)
            await self.read()

    async def replaced(self, used: str) -> bool:
        """Re-read the file. Return whether the key now differs from `used`, which the upstream refused."""
        await self.read()
        return self._upstream.key != used

    async def read(self) -> None:
        """Read the file and use its key. An unreadable or partly written file leaves the key unchanged."""
        if self._file is None:
            return
        try:
            async with asyncio.timeout(READ_S_MAX):
                key = await asyncio.to_thread(read_key, self._file)
        except TimeoutError:
            self._note(f"{self._file} cannot be read within {READ_S_MAX:g} s")
            return
        except ValueError as error:
            self._note(str(error))
            return
        self._note("")
        if key != self._upstream.key:
            self._upstream.use_key(key)
            log.info("upstream_key_replaced", file=str(self._file))

    def _note(self, trouble: str) -> None:
        """Log each new reason once."""
        if trouble and trouble != self._trouble:
            log.warning("upstream_key_unreadable", reason=trouble, advice="the last good key stays in use")
        self._trouble = trouble
