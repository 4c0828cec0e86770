"""Re-reads the identity of an upstream: its model, weights, version, context and extensions.

every 10 s, or at once after 401, 403, 404 or a broken connection
    read ── the same ──▶ nothing
      ├── it does not answer ──▶ read again after a second
      └── differs, and a second read confirms it ──▶ changed: the worker's instance ends

A probe for KV handles costs the upstream a lease of blocks. So it is repeated only after the upstream was unreachable, or may
have been replaced by another server.
"""

import asyncio
import contextlib
from dataclasses import replace

import structlog

from workers.engines.openai.capabilities import Abilities, merged
from workers.engines.openai.upstream import PROBE_TOKENS, Upstream, UpstreamUnavailable

EVERY_S = 10.0
AWAY_S = 1.0  # between two reads while the upstream does not answer
CONFIRM_S = 0.2  # until a difference is read a second time
PROBE_S_MAX = 10.0  # for the completion of one token; a busy server may take longer, without having changed
HANDLES_S_MIN = 30.0  # until a probe for KV handles is repeated; doubles after each failure
HANDLES_S_MAX = 900.0

log = structlog.get_logger(__name__)


class IdentityWatch:
    """Compares an upstream with what its worker has registered."""

    def __init__(self, upstream: Upstream, known: Abilities, every_s: float = EVERY_S) -> None:
        self._upstream = upstream
        self._known = known
        self._every_s = every_s
        self._doubted = asyncio.Event()
        self._reading = asyncio.Lock()
        self._began_at = float("-inf")  # of the last read
        self._away = False
        self.doubts = 0  # number of times that the upstream behaved like another server, or was unreachable
        self._handles_doubted = not known.handles
        self._handles_wait_s = HANDLES_S_MIN
        now = asyncio.get_running_loop().time()
        self._handles_at = now if known.handles else now + HANDLES_S_MIN  # the next probe for handles
        self.changed = ""  # the fields that differ; empty: none

    def note(self, field: str) -> None:
        """Record a change that another component has detected."""
        self.changed = self.changed or field

    def doubt(self, *, slow: bool = False) -> None:
        """Trigger a read at once: the upstream has answered like another server, or its connection broke.

        `slow`: the upstream was only late, like a busy server, so its further abilities are not probed again.
        """
        if not slow:
            self.distrust()
        self._doubted.set()

    def distrust(self) -> None:
        """Probe the upstream's further abilities again: handles at the next read, constraints when needed."""
        self.doubts += 1
        self._handles_doubted = True

    async def follow(self) -> None:
        """Read repeatedly, until a change is found."""
        while not self.changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AWAY_S if self._away else self._every_s):
                    await self._doubted.wait()
            if self._doubted.is_set() and self._away:
                await asyncio.sleep(AWAY_S)  # each failing request sets the doubt again
            await self.look()

    async def look(self) -> str:
        """Read now. Return the fields that have changed; empty if none has, or if the upstream does not answer."""
        asked_at = asyncio.get_running_loop().time()
        async with self._reading:
            if self.changed or self._began_at > asked_at:  # the read of another caller is recent enough
                return self.changed
            self._began_at = asyncio.get_running_loop().time()
            self._doubted.clear()
            known = self._known.identity
            try:
                now = await self._read()
                if now != known:
                    await asyncio.sleep(CONFIRM_S)
                    again = await self._read()
                    if again == now:
                        differ = (
                            f"{name}: {old} -> {now[name]}" for name, old in known.items() if old != now[name]
                        )
                        self.changed = ", ".join(differ)
                        log.warning("upstream_changed", model=self._known.model, difference=self.changed)
                self._away = False
            except UpstreamUnavailable as error:
                if not isinstance(error.__cause__, TimeoutError):  # otherwise the upstream was just busy
                    self.distrust()
                self._away = True
            return self.changed

    async def _read(self) -> dict[str, object]:
        known, upstream = self._known, self._upstream
        listed = await upstream.listed(known.model)
        version = await upstream.version()
        told = merged(known.told, await upstream.told(known.told))
        seen = replace(
            known, model=listed.model, root=listed.root, context_tokens=listed.context_tokens,
            also_served=listed.also_served, size=listed.size, told=told, version=version or known.version,
        )  # fmt: skip
        if seen.identity != known.identity:
            return seen.identity
        listed = replace(listed, version=known.version if version is None else version, told=told)
        # where ids are in logprobs, some tokens lack them
        tokens = 1 if known.ids_from == "token_ids" else PROBE_TOKENS
        found = await upstream.probed(listed, tokens, PROBE_S_MAX)
        return replace(found, handles=await self._hands_over(found)).identity

    async def _hands_over(self, found: Abilities) -> bool:
        """Return whether the upstream gives KV handles. Probe it if in doubt, at most every 30 s.

        The wait doubles after each answer that is inconclusive or still has no handle.
        """
        known, now = self._known.handles, asyncio.get_running_loop().time()
        if not self._handles_doubted or now < self._handles_at:
            return known
        answer = await self._upstream.hands_over(found, PROBE_S_MAX)
        if answer is not None and answer != known:
            return answer  # a second read must confirm it
        if answer:
            self._handles_doubted, self._handles_wait_s = False, HANDLES_S_MIN
            self._handles_at = now + HANDLES_S_MIN
        else:
            self._handles_wait_s = min(2 * self._handles_wait_s, HANDLES_S_MAX)
            self._handles_at = now + self._handles_wait_s
        return known
