"""Reads again what an upstream is: its model, weights, version, context and extensions.

every 10 s, or at once after 401, 403, 404 or a broken connection
    read ── the same ──▶ nothing
      ├── it does not answer ──▶ read again after a second
      └── differs, and a second read says the same ──▶ changed: the worker's life ends
"""

import asyncio
import contextlib
from dataclasses import replace

import structlog

from workers.engines.openai.abilities import Abilities, Identity
from workers.engines.openai.away import UpstreamAway
from workers.engines.openai.told import lineage
from workers.engines.openai.upstream import PROBE_TOKENS, Upstream

EVERY_S = 10.0
AWAY_S = 1.0  # between two reads while the upstream does not answer
CONFIRM_S = 0.2  # until a difference is read a second time
PROBE_S_MAX = 10.0  # for the completion of one token; a server that is busy says nothing by taking longer
HANDLES_S_MIN = 30.0  # until a failed probe for KV handles is repeated; doubles each time
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
        self._began_at = float("-inf")  # the last read
        self._away = False
        self._handles_wait_s = HANDLES_S_MIN
        self._handles_at = asyncio.get_running_loop().time() + HANDLES_S_MIN
        self.changed = ""  # the fields that differ; empty: none

    def note(self, field: str) -> None:
        """Note that something else than what is read here has changed."""
        self.changed = self.changed or field

    def doubt(self) -> None:
        """Read at once: the upstream has answered as if it were another one, or its connection broke."""
        self._doubted.set()

    async def follow(self) -> None:
        """Read again and again, until a change is found."""
        while not self.changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AWAY_S if self._away else self._every_s):
                    await self._doubted.wait()
            if self._doubted.is_set() and self._away:
                await asyncio.sleep(AWAY_S)  # each request that fails doubts again
            await self.look()

    async def look(self) -> str:
        """Read now; return what has changed, empty if nothing has, or if the upstream does not answer."""
        asked_at = asyncio.get_running_loop().time()
        async with self._reading:
            if self.changed or self._began_at > asked_at:  # another caller's read answers this one, too
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
                        self.changed = known.difference(now)
                        log.warning("upstream_changed", model=self._known.model, difference=self.changed)
                self._away = False
            except UpstreamAway:
                self._away = True
            return self.changed

    async def _read(self) -> Identity:
        known, upstream = self._known, self._upstream
        listed = await upstream.listed(known.model)
        version = await upstream.version()
        told = lineage.merged(
            dict(known.told), await lineage.read(upstream, [path for path, _ in known.told])
        )
        listed = replace(
            listed, version=known.version if version is None else version, told=tuple(told.items())
        )
        said = (listed.model, listed.root, listed.context_tokens, listed.also_served, listed.lineage)
        before = (known.model, known.root, known.context_tokens, known.also_served, known.lineage)
        if said != before or version not in (
            None,
            "",
            known.version,
        ):
            model, root, context, names, _ = said
            changed = replace(known, model=model, root=root, context_tokens=context, also_served=names)
            changed = replace(changed, size=listed.size, told=listed.told)
            return replace(changed, version=listed.version or known.version).identity
        tokens = (
            1 if known.ids_from == "token_ids" else PROBE_TOKENS
        )  # ids in logprobs: some tokens lack them
        found = await upstream.probed(listed, tokens, PROBE_S_MAX)
        return replace(found, handles=known.handles or await self._hands_over(found)).identity

    async def _hands_over(self, found: Abilities) -> bool:
        """Repeat a failed probe for KV handles, each time after twice as long."""
        now = asyncio.get_running_loop().time()
        if now < self._handles_at:
            return False
        if await self._upstream.hands_over(found, PROBE_S_MAX):
            return True  # a second read must find it, too
        self._handles_wait_s = min(2 * self._handles_wait_s, HANDLES_S_MAX)
        self._handles_at = now + self._handles_wait_s
        return False
