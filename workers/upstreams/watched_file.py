"""The watched file of upstreams: notices edits, and keeps the last good version for a restart.

    read every second ── unchanged, or still being written ──▶ nothing
          ├── valid ──▶ applied, and kept in DATA/upstreams/
          └── invalid or missing ──▶ nothing changes; the error is logged and shown until the file is valid again

A process that starts with an invalid file uses the version that it has kept, so that one mistake does not end all upstreams.
"""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import structlog

from events.process.key_file import write_private
from workers.config.upstreams import BadUpstreams, UpstreamEntry, load_upstreams, read_upstreams

LOOK_S = 1.0
SETTLED_S = 0.1  # a file that has not changed for this time is complete
READ_S_MAX = 5.0  # a file system that hangs must not delay the upstreams

log = structlog.get_logger(__name__)
Apply = Callable[[tuple[UpstreamEntry, ...]], object]


class UpstreamsFile:
    """Reads one file of upstreams, and calls back when its contents have changed."""

    def __init__(self, path: Path, kept: Path) -> None:
        """Read `path`. `kept` is the file in which the last good version is kept."""
        self.path = path
        self.error = ""  # why the present contents are not applied; empty: they are
        self.digest = ""  # of the applied contents
        self.entries: tuple[UpstreamEntry, ...] = ()  # those of `first`
        self._kept = kept
        self._seen = b""
        self._reading = asyncio.Lock()

    async def first(self) -> None:
        """Read the entries with which the process starts. Raise BadUpstreams if neither the file nor the kept one is valid."""
        try:
            self.entries = await self._read()
        except BadUpstreams as error:
            try:
                kept = await asyncio.to_thread(read_upstreams, self._kept)
                self.entries = load_upstreams(self.path, kept)
            except BadUpstreams:
                raise error from None
            self._refuse(error)
            self.digest = digest(kept)
            log.warning("upstreams_file_kept", kept=str(self._kept), upstreams=len(self.entries))

    async def look(self, apply: Apply) -> str:
        """Read the file now, and call `apply` with its entries if they have changed. Return `error`."""
        async with self._reading:
            try:
                async with asyncio.timeout(READ_S_MAX):
                    before = self.digest
                    entries = await self._read()
            except TimeoutError:
                self._refuse(BadUpstreams(f"{self.path} cannot be read within {READ_S_MAX:g} s"))
            except BadUpstreams as error:
                self._refuse(error)
            else:
                if self.digest != before:
                    apply(entries)
            return self.error

    async def _read(self) -> tuple[UpstreamEntry, ...]:
        text = await asyncio.to_thread(read_upstreams, self.path)
        while text != self._seen:  # wait until an editor has written the whole file
            await asyncio.sleep(SETTLED_S)
            before, text = text, await asyncio.to_thread(read_upstreams, self.path)
            if text == before:
                break
        if text == self._seen and self.digest == digest(text):
            self.error = ""
            return ()
        entries = load_upstreams(self.path, text)
        try:
            await asyncio.to_thread(write_private, self._kept, text.decode())
        except OSError as error:
            log.warning("upstreams_file_not_kept", kept=str(self._kept), error=error.strerror)
        self._seen, self.digest, self.error = text, digest(text), ""
        return entries

    def _refuse(self, error: BadUpstreams) -> None:
        if str(error) != self.error:
            log.error(
                "upstreams_file_invalid", reason=str(error), advice="nothing has changed; correct the file"
            )
        self.error = str(error)


def digest(text: bytes) -> str:
    """Return a short digest of a file's contents, by which a command recognises that a process has applied them."""
    return hashlib.sha256(text).hexdigest()[:16]
