"""Detects that an upstream has changed: its model, weights, version, context length or API extensions.

The upstream's identity is read every 10 s, and at once after a 401, 403, 404 or a broken connection:

    read ── the same ──▶ nothing
      ├── the upstream does not answer ──▶ read again after a second
      └── differs, and a second read gives the same difference ──▶ changed: the worker's instance ends

Servers load and unload LoRA adapters while they serve, so the watch only notes which adapters the last read listed.

With a KV handle, another server can fetch a request's KV blocks. A probe for handles makes the upstream keep blocks for a lease
of 30 s. Because of this cost, the probe is repeated only if the upstream was unreachable, or if another server may have
replaced it.
"""

import asyncio
import contextlib
from dataclasses import replace

import structlog

from workers.engines.openai.capabilities import Abilities, merged
from workers.engines.openai.upstream import PROBE_TOKENS, Upstream, UpstreamUnavailable

EVERY_S = 10.0
AWAY_S = 1.0  # between two reads while the upstream does not answer
CONFIRM_S = 0.2  # between a read that differs and the read that confirms it
PROBE_S_MAX = 10.0  # for the completion of a probe; a busy server may take longer, which is no change
HANDLES_S_MIN = 30.0  # between two probes for KV handles; the wait doubles after each failure
HANDLES_S_MAX = 900.0  # longest wait between two probes for KV handles

log = structlog.get_logger(__name__)


class IdentityWatch:
    """Compares an upstream's current identity with the one that the worker has registered."""

    def __init__(self, upstream: Upstream, known: Abilities, every_s: float = EVERY_S) -> None:
        self._upstream = upstream
        self._known = known
        self._every_s = every_s
        self._doubted = asyncio.Event()
        self._reading = asyncio.Lock()
        self._began_at = float("-inf")  # start of the last read; loop seconds
        self._away = False  # the upstream did not answer the last read
        self.doubts = 0  # number of times that the upstream behaved like another server, or was unreachable
        self._handles_doubted = not known.handles
        self._handles_wait_s = HANDLES_S_MIN
        now = asyncio.get_running_loop().time()
        # earliest time of the next probe for handles
        self._handles_at = now if known.handles else now + HANDLES_S_MIN
        self.changed = ""  # the fields that have changed; empty: none
        self.adapters = known.adapters  # at the last read; a change does not change the upstream's identity

    def note(self, field: str) -> None:
        """Record a change of `field` that another component has detected, unless a change is already recorded."""
        self.changed = self.changed or field

    def doubt(self, *, slow: bool = False) -> None:
        """Trigger a read of the upstream's identity at once: another server may have replaced the upstream.

        `slow` means that the upstream was merely late to answer, as a busy server may be. In that case, the upstream's support
        for KV handles and constrained answers is not probed again.
        """
        if not slow:
            self.distrust()
        self._doubted.set()

    def distrust(self) -> None:
        """Request new probes of the upstream's support for KV handles and for constrained answers.

        KV handles are probed when the identity is next read, and constraints when a request next needs one.
        """
        self.doubts += 1
        self._handles_doubted = True

    async def follow(self) -> None:
        """Read the upstream's identity repeatedly, until a change is found."""
        while not self.changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AWAY_S if self._away else self._every_s):
                    await self._doubted.wait()
            if self._doubted.is_set() and self._away:
                # while the upstream is away, each failing request triggers a read
                await asyncio.sleep(AWAY_S)
            await self.look()

    async def look(self) -> str:
        """Read the upstream's identity now, and return a text with the changed fields and their old and new values.

        The text is empty if no field has changed, or if the upstream does not answer.
        """
        asked_at = asyncio.get_running_loop().time()
        async with self._reading:
            if self.changed or self._began_at > asked_at:  # another caller's read began after this call
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
                # after a timeout, the upstream may just be busy
                if not isinstance(error.__cause__, TimeoutError):
                    self.distrust()
                self._away = True
            return self.changed

    async def _read(self) -> dict[str, object]:
        known, upstream = self._known, self._upstream
        listed = await upstream.listed(known.model)
        self._note_adapters(listed)
        version = await upstream.version()
        told = merged(known.told, await upstream.read_reported(known.told))
        seen = replace(
            known, model=listed.model, root=listed.root, context_tokens=listed.context_tokens,
            also_served=listed.also_served, size=listed.size, told=told, version=version or known.version,
        )  # fmt: skip
        if seen.identity != known.identity:
            return seen.identity
        listed = replace(listed, version=known.version if version is None else version, told=told)
        # if token ids are read from logprobs, some tokens have none, so a longer completion is needed
        tokens = 1 if known.ids_from == "token_ids" else PROBE_TOKENS
        found = await upstream.probed(listed, tokens, PROBE_S_MAX)
        return replace(found, handles=await self._hands_over(found)).identity

    async def lists(self, adapter: str) -> bool:
        """Read now whether the upstream still lists an adapter. Return True if its list cannot be read."""
        try:
            self._note_adapters(await self._upstream.listed(self._known.model))
        except UpstreamUnavailable:
            return True
        return adapter in self.adapters

    def _note_adapters(self, listed: Abilities) -> None:
        if listed.model == self._known.model:
            self.adapters = listed.adapters

    async def _hands_over(self, found: Abilities) -> bool:
        """Return whether the upstream gives KV handles, by which another server can fetch a request's KV blocks.

        If that is in doubt, the upstream is probed. Probes are at least 30 s apart. The interval doubles, up to 15 min, after
        each probe that is inconclusive or confirms that there are no handles.
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
