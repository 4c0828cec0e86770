"""The openai engine: forwards the worker's requests to an OpenAI-compatible server.

Each request is one streamed completion. All output that arrives in one turn of the event loop is delivered together.
If the upstream accepts and returns token ids, a continuation is exact. If it only handles text, chunks carry text, and the
registration has `exact=False`.
"""

import asyncio
import contextlib
import secrets
import time
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import structlog

from events.kv import Cleared
from events.wire import Chunk, Generate, Load
from workers.engines.engine import (
    CANARIES_MAX,
    Announce,
    Awaits,
    Deliver,
    EngineChanged,
    EngineDead,
    EngineIdentity,
    Export,
    Import,
    MoveEnded,
    Phase,
    Unbreakable,
    discard_events,
)
from workers.engines.openai.capabilities import Abilities
from workers.engines.openai.concurrency_limit import Places
from workers.engines.openai.exchange import Exchange
from workers.engines.openai.handover import TOKENS_MAX, Arriving, Handed, continued, description
from workers.engines.openai.identity import UpstreamSettings, block_size, identify
from workers.engines.openai.kv_names import CANARY_SALT, read_salt, salt_of
from workers.engines.openai.requests import UpstreamRequests
from workers.engines.openai.upstream import NoHandle, Upstream, prompt_text
from workers.engines.openai.upstream_reports import UpstreamAccount
from workers.engines.openai.upstream_wait import UpstreamWait
from workers.engines.openai.watch.api_key import UpstreamKey
from workers.engines.openai.watch.identity_watch import IdentityWatch
from workers.engines.openai.watch.retry_after import RetryGate
from workers.engines.openai.watch.upstream_health import ANSWER_S_MAX, UpstreamHealth
from workers.kv_transfer.messages import Description

STOP_S_MAX = 2.0

log = structlog.get_logger(__name__)


class OpenAIEngine(Unbreakable):
    """An `Engine` in front of one upstream. It injects no faults: to rehearse one, break the upstream itself."""

    def __init__(self, settings: UpstreamSettings) -> None:
        self._settings = settings
        self._account: UpstreamAccount | None = None
        self._abilities = Abilities("unknown")
        self.identity = identified(settings, self._abilities, self._account)
        self._upstream: Upstream | None = None
        self._patience: UpstreamWait | None = None
        self._watch: IdentityWatch | None = None
        self._gate = RetryGate(time.monotonic, settings.retry_after_max_s)
        self._exchange: Exchange | None = None
        self._following: list[asyncio.Future[None]] = []
        self._deliver: Deliver = _discard
        self._announce: Announce = discard_events
        self._epochs = CacheEpochs()
        self._requests = UpstreamRequests(settings.batch_max + settings.waiting_max)
        self._places = Places()
        self._runs = settings.batch_max  # maximum number of requests that run at once; the others wait
        self._stopped: dict[int, Generate] = {}  # requests stopped for a move, with what remains of each
        self._out: list[tuple[int, Chunk]] = []
        self._health = UpstreamHealth(settings.silent_s)

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        self._deliver, self._announce = deliver, announce
        limit = self._settings.batch_max + self._settings.waiting_max + CANARIES_MAX
        self._upstream = upstream = Upstream(self._settings.url, self._settings.key, limit)
        settings = self._settings
        self._patience = UpstreamWait(upstream, settings)
        self._account = UpstreamAccount(
            upstream, lambda: self._requests.sent_now, settings.kv_events, settings.kv_replays, settings.times
        )
        try:
            found = await self._patience.abilities()
            await self._account.start(found, announce)
        except BaseException:
            await self._account.stop()
            await upstream.close()
            raise
        self._abilities = replace(found, ranks=self._account.dp)
        api_key = UpstreamKey(upstream, settings.key_file)
        self._watch = IdentityWatch(upstream, self._abilities, settings.times.identity_s)
        self._exchange = Exchange(upstream, self._abilities, api_key, self._watch, self._gate)
        self._following = [
            asyncio.ensure_future(api_key.follow(settings.times.key_s)),
            asyncio.ensure_future(self._watch.follow()),
            asyncio.ensure_future(self._account.resubscribe(self._abilities, self._watch.note)),
        ]
        self.identity = identified(settings, self._abilities, self._account)
        if not self._abilities.exact:
            log.warning(
                "text_only_upstream", url=self._settings.url, advice="continuations will not be exact"
            )

    @property
    def announces(self) -> bool:
        return self._account is not None and self._account.announces

    @property
    def kv_event_counts(self) -> dict[str, int]:
        """Counts of the upstream's KV events, by outcome; empty without a subscription."""
        return {} if self._account is None else self._account.counters

    def awaits(self) -> Awaits | None:
        return None if self._patience is None else self._patience.awaits

    # --- requests

    def submit(self, key: int, request: Generate) -> None:
        error = self._refusal(request)
        if error:
            self._deliver([(key, Chunk(request.stream, [], error=error))])
            return
        room = self.identity.context_tokens - len(request.tokens)
        # real servers reject a longer request instead of truncating it
        most = min(request.sampling.max_tokens, room)
        if most <= 0:
            self._deliver([(key, Chunk(request.stream, [], finish="length"))])
            return
        self._begin(key, self._epochs.salted(request), most, None)

    def _refusal(self, request: Generate) -> str | None:
        """Return the error for a request that must not be sent to the upstream; None if it may be sent."""
        if self._watch is not None and self._watch.changed:
            return f"not_serving: the server behind the worker has changed ({self._watch.changed})"
        if closed_s := self._gate.closed_s(canary=request.canary):
            return f"overloaded: the upstream takes no new requests for {closed_s:.1f} s"
        overload = self._requests.overload(canary=request.canary)
        return overload or objection(request, self._abilities, self.identity.context_tokens)

    def _begin(self, key: int, request: Generate, most: int, handle: dict[str, Any] | None) -> None:
        request = msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, max_tokens=most)
        )
        if (
            self._account is not None
            and self._abilities.extensions
            and (request.cache_salt or request.canary)
        ):
            self._account.salted(request.tokens)
        task = asyncio.ensure_future(self._serve(key, request, handle))
        movable = self._abilities.handles and not request.canary
        self._requests.begin(key, request, task, movable=movable)

    def cancel(self, key: int) -> None:
        self._stopped.pop(key, None)
        if one := self._requests.get(key):
            self._requests.end(key)
            one.task.cancel()  # closes the connection, which cancels the request at the upstream

    def trust(self, trusted: bool) -> None:
        """Set whether requests may reuse blocks of the upstream's prefix cache.

        While the worker is distrusted, requests read and store no reusable blocks, like canaries. The worker cannot empty that
        cache, so blocks computed before are never reused.
        """
        self._epochs.trust(trusted)
        if self.announces:
            for rank in range(self.identity.dp):
                self._announce(rank, [Cleared()])

    async def _serve(self, key: int, request: Generate, handle: dict[str, Any] | None) -> None:
        """Send a request to the upstream once a slot there is free.

        Canaries use no slot. A request that arrives with a KV cache does not wait, because the lease on that cache is short.
        """
        assert self._exchange is not None
        try:
            async with (
                contextlib.nullcontext() if request.canary or handle else self._places.one(request.priority)
            ):
                self._requests.sent(key)
                await self._exchange.answer(request, handle, partial(self._enqueue, key))
        finally:
            one = self._requests.get(key)
            if one is not None and one.task is asyncio.current_task():
                self._requests.end(key)

    def _enqueue(self, key: int, chunks: list[Chunk]) -> None:
        """Queue a request's chunks for delivery at the end of this turn of the loop."""
        if not self._requests.record(key, chunks):
            return
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out += [(key, chunk) for chunk in chunks]

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out:  # empty if it was flushed earlier
            self._deliver(out)

    # --- moves to and from another server of the same kind

    @property
    def kv(self) -> tuple[Description, ...]:
        known = self._abilities
        if not known.handles or self.identity.context_tokens > TOKENS_MAX:
            return ()
        return (description(known.model, self._settings.revision, known.version),)

    def export(self, key: int) -> Export | None:
        one = self._requests.get(key)
        return Handed(self, key) if self.kv and one is not None and one.generated else None

    def reserve(self, key: int, request: Generate, room_tokens: int) -> Import | str:
        if not self.kv:
            return f"the server {self._settings.url} takes no KV cache from another: it has no KV connector"
        error = self._refusal(request)
        return error or Arriving(self, key, request)

    async def hand_over(self, key: int) -> tuple[list[int], dict[str, Any]]:
        """End a request's stream; return all its tokens and a handle to their KV cache. Raise MoveEnded."""
        one = self._requests.get(key)
        if one is None or one.movable is None or self._upstream is None:
            raise MoveEnded("the request is over")
        if self._out:
            self._flush()
        self._requests.end(key)
        self._stopped[key] = rest = continued(one.movable, [*one.movable.tokens, *one.generated])
        one.task.cancel()
        try:
            handle = await self._upstream.handle(self._abilities, rest, self._settings.handle_s)
            return rest.tokens, handle
        except NoHandle as error:
            self.resume(key)
            raise MoveEnded(str(error)) from error

    def resume(self, key: int) -> None:
        """Continue a request after `hand_over` has ended its stream, as a new request to the same server."""
        if (rest := self._stopped.pop(key, None)) is not None:
            rest.cache_salt = read_salt(rest.cache_salt)[1]
            self._begin(key, self._epochs.salted(rest), rest.sampling.max_tokens, None)

    def accept(self, key: int, request: Generate, handle: dict[str, Any]) -> None:
        """Continue a request from another server, with the KV cache that this handle locates."""
        room = self.identity.context_tokens - len(request.tokens)
        most = min(request.sampling.max_tokens, room)
        if most <= 0:
            self._deliver([(key, Chunk(request.stream, [], finish="length"))])
            return
        self._begin(key, self._epochs.salted(request), most, handle)

    def limit_batch(self, share: float) -> None:
        """Send the upstream at most this share of the batch at once, because its own scheduler cannot be limited."""
        whole = self._settings.batch_max
        self._runs = max(1, int(whole * share))
        self._places.limit(None if share == 1 else self._runs)

    # --- health and load

    def phase(self) -> Phase:
        return self._requests.phase()

    def load(self) -> Load:
        running, tokens = min(len(self._requests), self._runs), self._requests.tokens
        profile = self.identity.profile
        used = -(-tokens // profile.block_tokens)
        waiting = len(self._requests) - running
        own = Load(running, waiting, used, profile.kv_blocks, tokens, self._requests.canaries)
        whole = own if self._account is None else self._account.load(own, self._runs)
        closed_s = self._gate.closed_s()
        return msgspec.structs.replace(whole, closed_s=closed_s) if closed_s else whole

    def ranks(self) -> list[Load]:
        return [] if self._account is None else self._account.ranks(self.identity.profile.kv_blocks)

    async def check(self) -> None:
        """Raise EngineDead if the upstream is unhealthy, EngineChanged if it has changed.

        It is unhealthy if it refuses health checks, or if it neither answers them nor sends tokens.
        """
        assert self._upstream is not None
        if self._watch is not None and self._watch.changed:
            raise EngineChanged(f"the server {self._settings.url} has changed: {self._watch.changed}")
        began, health = time.monotonic(), self._health
        answer = await self._upstream.healthy(ANSWER_S_MAX)
        if self._watch is not None and (answer.trouble or health.troubled):
            self._watch.doubt(slow=answer.timed_out)
        dead = health.judge(answer, began, self._requests.token_at, time.monotonic())
        if answer.trouble:
            log.warning("upstream_unhealthy", reason=answer.trouble, refused_in_a_row=health.refusals)
        if dead:
            raise EngineDead(f"the upstream {self._settings.url} is unhealthy: {dead}")

    async def stop(self) -> None:
        tasks = [*self._following, *(one.task for one in self._requests)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S_MAX)
        if self._account is not None:
            await self._account.stop()
        if self._upstream is not None:
            await self._upstream.close()


def _discard(out: list[tuple[int, Chunk]]) -> None:
    """Discard output before `start`."""


def identified(
    settings: UpstreamSettings, known: Abilities, account: UpstreamAccount | None
) -> EngineIdentity:
    """Return the identity of a server from these abilities and, if it has sent any yet, its own reports."""
    given = settings.block_tokens
    if account is None:
        return identify(settings, known, block_size(given, None, announces=False))
    size = block_size(given, account.block_tokens, announces=account.announces)
    return identify(settings, known, size, account.kv_blocks)


def objection(request: Generate, known: Abilities, context_tokens: int) -> str | None:
    """Return why a server with these abilities cannot serve a request; None if it can."""
    if not request.tokens and not request.prompt_text:
        return "invalid_request: the prompt is empty"
    if not known.token_prompts and not prompt_text(request):
        return "invalid_request: this model's server takes text only, no token ids"
    if len(request.tokens) >= context_tokens:
        return f"invalid_request: {len(request.tokens)} tokens leave no room in a context of {context_tokens}"
    return None


class CacheEpochs:
    """Salts that prevent the reuse of possibly wrong blocks in an upstream's prefix cache, which the worker cannot empty.

    Each conviction of this worker, in any of its instances, begins an epoch with its own salt. So a request only reuses blocks
    computed after the last conviction. While the worker is distrusted and no later epoch has begun, requests neither reuse
    blocks nor leave reusable ones.
    """

    def __init__(self) -> None:
        self._trusted = True
        self._epoch = 0  # the last epoch seen
        self._spoilt = -1  # the last epoch that may contain wrong blocks

    def trust(self, trusted: bool) -> None:
        """Stop the reuse of all blocks computed so far. Until trusted again, requests leave no reusable blocks, like canaries."""
        self._trusted = trusted
        if not trusted:
            self._spoilt = self._epoch

    def salted(self, request: Generate) -> Generate:
        """Add the salt of its epoch to a request. Canaries already have a salt."""
        if request.canary:
            return request
        self._epoch = max(self._epoch, request.cache_epoch)
        apart = not self._trusted or self._epoch <= self._spoilt
        salt = CANARY_SALT + secrets.token_hex(16) if apart else salt_of(self._epoch, request.cache_salt)
        return msgspec.structs.replace(request, cache_salt=salt)
