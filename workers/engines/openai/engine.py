"""The openai engine, which forwards requests to an OpenAI-compatible server, the upstream.

Each request is one streamed completion. All output that arrives in one event loop iteration is delivered together. If the
upstream accepts and returns token ids, an answer can be continued exactly on another worker. If the upstream only handles text,
chunks carry text, and the worker registers with `exact=False`.

A request can move with its KV cache from one vLLM server to another by a handle. The handle tells the target server where the
source server keeps the request's KV blocks:

1. The source's worker requests one more token from its server, with `do_remote_decode`. This costs the server only one step,
   because the server's prefix cache has all earlier tokens.
2. The server answers with a handle, and keeps the blocks for a lease of 30 s.
3. The workers transfer the handle as if it were one KV block that holds the whole sequence (`Handed`, `Arriving`).
4. The target's server receives the handle with the same tokens, and pulls the blocks by vLLM's own connector (NIXL).

Pitfalls of such moves (vLLM 0.32): Streamed answers carry no handle, so the handle is requested without streaming. vLLM does not
keep the blocks of a cancelled request for other servers, but the request's prefix stays in the cache. The target must continue
exactly the tokens that the handle covers. If a request has one token more than the handle covers, and this token begins a new
block, the target's engine crashes.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
import structlog

from events.kv import Cleared
from events.process.key_file import read_key
from events.wire import Chunk, Generate, Load
from workers.config.upstream_route import LiveSettings
from workers.engines.engine import (
    CANARIES_MAX,
    Announce,
    Awaits,
    Deliver,
    EngineChanged,
    EngineDead,
    Export,
    Import,
    MoveEnded,
    MoveRefused,
    Phase,
    Stopped,
    discard_events,
    discard_output,
    lacks_adapter,
)
from workers.engines.openai.capabilities import Abilities
from workers.engines.openai.exchange import Exchange, UpstreamKey
from workers.engines.openai.identity import UpstreamSettings, identify
from workers.engines.openai.identity_watch import IdentityWatch
from workers.engines.openai.kv_names import CacheEpochs, read_salt
from workers.engines.openai.read_pace import ReadPace
from workers.engines.openai.requests import Places, UpstreamRequests
from workers.engines.openai.upstream import (
    Handle,
    NoHandle,
    Upstream,
    UpstreamUnavailable,
    hidden,
    prompt_text,
)
from workers.engines.openai.upstream_health import ANSWER_S_MAX, RetryGate, UpstreamHealth
from workers.engines.openai.upstream_reports import UpstreamAccount
from workers.kv_transfer.messages import Buffer, Description

STOP_S_MAX = 2.0
RETRY_S = 0.5  # between two attempts to reach the upstream at the start
# size of the KV block that carries a handle; one block number needs about six bytes
HANDLE_BYTES = 2 * 1024 * 1024
# of a sequence that can move: a KV block must have at least two bytes per token
TOKENS_MAX = HANDLE_BYTES // 2

log = structlog.get_logger(__name__)


class OpenAIEngine:
    """An `Engine` that forwards requests to one upstream. It cannot inject faults."""

    def __init__(self, settings: UpstreamSettings) -> None:
        self._settings = settings
        self._account: UpstreamAccount | None = None
        self._abilities = Abilities("unknown")
        self.identity = identify(settings, self._abilities)
        self._upstream: Upstream | None = None
        self._patience: UpstreamWait | None = None
        self._watch: IdentityWatch | None = None
        self._gate = RetryGate(time.monotonic, settings.retry_after_max_s)
        self._exchange: Exchange | None = None
        self._following: list[asyncio.Future[None]] = []
        self._deliver: Deliver = discard_output
        self._announce: Announce = discard_events
        self._epochs = CacheEpochs()
        self._requests = UpstreamRequests(settings.batch_max + settings.waiting_max)
        self._places = Places()
        # maximum number of requests that are at the upstream at once; the others wait
        self._runs = settings.batch_max
        self._share = 1.0  # of the batch, by `limit_batch`
        self._limit: int | None = (
            None  # maximum of requests at the upstream, by `adjust`; None: that of the settings
        )
        # for each request stopped for a move, the request that would continue it
        self._stopped: dict[int, Generate] = {}
        self._out: list[tuple[int, Chunk]] = []
        self._health = UpstreamHealth(settings.silent_s)

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        self._deliver, self._announce = deliver, announce
        settings = self._settings
        limit = settings.batch_max + settings.waiting_max + CANARIES_MAX
        self._upstream = upstream = Upstream(settings.url, settings.key, limit, settings.route)
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
        pace = ReadPace(time.monotonic)
        self._exchange = Exchange(upstream, self._abilities, api_key, self._watch, self._gate, pace)
        self._following = [
            asyncio.ensure_future(api_key.follow(settings.times.key_s)),
            asyncio.ensure_future(self._watch.follow()),
            asyncio.ensure_future(self._account.resubscribe(self._abilities, self._watch.note)),
        ]
        self.identity = identify(settings, self._abilities, self._account)
        if not self._abilities.exact:
            log.warning("text_only_upstream", url=settings.url, advice="continuations will not be exact")

    def adjust(self, change: LiveSettings) -> None:
        """Apply settings that can change while the engine runs. Requests that are at the upstream already are not affected."""
        self._settings = replace(
            self._settings, route=change.route, key_file=change.key_file, weight=change.weight
        )
        self._limit = change.requests_max
        self._set_runs()
        if self._upstream is not None:
            route = self._upstream.route
            route.use(change.route)
        if self._exchange is not None:
            self._exchange.use_key_file(change.key_file)

    @property
    def announces(self) -> bool:
        return self._account is not None and self._account.announces

    @property
    def kv_event_counts(self) -> dict[str, int]:
        """Counts of the upstream's KV-event batches and of errors in them, by name; empty without a subscription."""
        return {} if self._account is None else self._account.counters

    def awaits(self) -> Awaits | None:
        return None if self._patience is None else self._patience.awaits

    # --- requests

    def submit(self, key: int, request: Generate) -> None:
        if error := self._refusal(request):
            self._deliver([(key, Chunk(request.stream, [], error=error))])
        else:
            self._begin(key, request)

    def _refusal(self, request: Generate) -> str | None:
        """Return the error for a request that must not be sent to the upstream, or None if the request may be sent."""
        if self._watch is not None and self._watch.changed:
            return f"not_serving: the server behind the worker has changed ({self._watch.changed})"
        if closed_s := self._gate.closed_s(canary=request.canary):
            return f"overloaded: the upstream takes no new requests for {closed_s:.1f} s"
        if overload := self._requests.overload(canary=request.canary):
            return overload
        if error := lacks_adapter(request, self.identity.adapters):
            return error
        if request.proxied is not None:
            return None
        if not request.tokens and not request.prompt_text:
            return "invalid_request: the prompt is empty"
        if not self._abilities.token_prompts and not prompt_text(request):
            return "invalid_request: this model's server takes text only, no token ids"
        count, most = len(request.tokens), self.identity.context_tokens
        if count >= most:
            return f"invalid_request: {count} tokens leave no room in a context of {most}"
        return None

    def _begin(self, key: int, request: Generate, handle: Handle | None = None) -> None:
        """Start a task that serves a request.

        `handle` locates the KV cache of a request that arrives from another server. It is None for all other requests.
        """
        if request.proxied is not None:
            self._requests.begin(
                key, request, asyncio.ensure_future(self._serve(key, request, None)), movable=False
            )
            return
        # real servers reject a request with a larger `max_tokens`, instead of stopping at the end of the context
        most = min(request.sampling.max_tokens, self.identity.context_tokens - len(request.tokens))
        if most <= 0:
            self._deliver([(key, Chunk(request.stream, [], finish="length"))])
            return
        sampling = msgspec.structs.replace(request.sampling, max_tokens=most)
        request = msgspec.structs.replace(self._epochs.salted(request), sampling=sampling)
        salted = request.cache_salt or request.canary
        if self._account is not None and self._abilities.extensions and salted:
            self._account.salted(request)
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

        While the worker is distrusted, its requests read no cached blocks and store no reusable ones. Canaries do neither, even
        while the worker is trusted. The worker cannot empty the upstream's cache. Instead, all later requests get new cache
        salts. Under a new salt, the upstream finds no block that it stored before the worker became distrusted.
        """
        self._epochs.trust(trusted)
        if self.announces:
            for rank in range(self.identity.dp):
                self._announce(rank, [Cleared()])

    async def _serve(self, key: int, request: Generate, handle: Handle | None) -> None:
        """Wait for a free slot, send a request to the upstream, and relay the answer.

        Canaries need no slot. A request that arrives with its KV cache needs none either, because the source server keeps that
        cache only for a short lease.
        """
        assert self._exchange is not None
        try:
            unlimited = request.canary or handle
            async with contextlib.nullcontext() if unlimited else self._places.one(request.priority):
                self._requests.sent(key)
                await self._exchange.answer(request, handle, partial(self._enqueue, key))
        finally:
            one = self._requests.get(key)
            if one is not None and one.task is asyncio.current_task():
                self._requests.end(key)

    def _enqueue(self, key: int, chunks: list[Chunk]) -> None:
        """Queue a request's chunks for delivery in the next event loop iteration, together with those of other requests."""
        if not self._requests.record(key, chunks):
            return
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out += [(key, chunk) for chunk in chunks]

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out:  # empty if an earlier call has delivered the chunks
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

    async def hand_over(self, key: int) -> tuple[list[int], Handle]:
        """End a request's stream. Return all tokens of the request, and a handle to their KV cache.

        Raise MoveEnded if the request has ended or the upstream gives no handle. Without a handle, the request continues on the
        same upstream.
        """
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
        """Continue a request as a new request to the same server, after `hand_over` has ended its stream.

        The call has no effect if the request was not stopped.
        """
        if (rest := self._stopped.pop(key, None)) is not None:
            rest.cache_salt = read_salt(rest.cache_salt)[1]
            self._begin(key, rest)

    def accept(self, key: int, request: Generate, handle: Handle) -> None:
        """Continue a request that arrived from another server. `handle` locates the request's KV cache on that server."""
        self._begin(key, request, handle)

    def limit_batch(self, share: float) -> None:
        """Limit the requests at the upstream to `share` (0 to 1) of the configured batch size, but not below one.

        The worker applies the limit by holding back requests, because an upstream's batch size cannot be changed while it runs.
        """
        self._share = share
        self._set_runs()

    def _set_runs(self) -> None:
        """Limit the requests at the upstream by the share of `limit_batch` and by the limit of `adjust`."""
        whole = self._settings.batch_max
        most = whole if self._limit is None else min(whole, self._limit)
        self._runs = max(1, int(most * self._share))
        self._places.limit(None if self._runs == whole else self._runs)

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
        closed_s, weight = self._gate.closed_s(), self._settings.weight
        limit = 0 if self._limit is None else self._runs
        if not (closed_s or limit) and weight == 1.0:
            return whole
        return msgspec.structs.replace(whole, closed_s=closed_s, weight=weight, batch=limit or whole.batch)

    def ranks(self) -> list[Load]:
        return [] if self._account is None else self._account.ranks(self.identity.profile.kv_blocks)

    async def check(self) -> None:
        """Raise EngineDead if the upstream is unhealthy, and EngineChanged if the upstream's identity has changed.

        Also update the adapters of the engine's identity.

        An upstream is unhealthy if it refuses several health checks in a row. It is also unhealthy if for `silent_s` seconds (a
        setting) it neither answers health checks nor sends tokens.
        """
        assert self._upstream is not None
        if self._watch is not None and self._watch.changed:
            raise EngineChanged(f"the server {self._settings.url} has changed: {self._watch.changed}")
        if self._watch is not None and self._watch.adapters != self.identity.adapters:
            self.identity = replace(self.identity, adapters=self._watch.adapters)
        began, health = time.monotonic(), self._health
        answer = await self._upstream.healthy(ANSWER_S_MAX)
        if self._watch is not None and (answer.trouble or health.troubled):
            self._watch.doubt(slow=answer.timed_out)
        dead = health.judge(answer, began, self._requests.token_at, time.monotonic())
        if answer.trouble:
            log.warning("upstream_unhealthy", reason=answer.trouble, refused_in_a_row=health.refusals)
        if dead:
            raise EngineDead(f"the upstream {self._settings.url} is unhealthy: {dead}")

    def chaos(self, fault: str, argument: float, rank: int = 0) -> bool:
        return False

    def heal(self, fault: str, rank: int = 0) -> None:
        """Do nothing, because this engine has no injected faults."""

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


class UpstreamWait:
    """Waits at a worker's start until the upstream answers. The upstream may still be loading its model."""

    def __init__(self, upstream: Upstream, settings: UpstreamSettings) -> None:
        self._upstream = upstream
        self._settings = settings
        self._why = ""

    @property
    def awaits(self) -> Awaits | None:
        """The reason why the last attempt to read the upstream's identity failed.

        None if no attempt has been made yet, or if the last one succeeded.
        """
        return Awaits(self._why, self._upstream.model) if self._why else None

    async def abilities(self) -> Abilities:
        """Poll the upstream until it answers, and return its identity and the API extensions that it supports.

        Raise EngineDead if the upstream does not answer within the configured time, `start_s`.
        """
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
        """Re-read the API key file, if one is configured, so that a corrected file needs no restart.

        Raise UpstreamUnavailable if the file cannot be read.
        """
        if self._settings.key_file is None:
            return
        try:
            self._upstream.use_key(read_key(self._settings.key_file))
        except ValueError as error:
            raise UpstreamUnavailable(f"upstream_key_file: {error}") from None


def description(model: str, revision: str, engine_version: str) -> Description:
    """Return the KV block layout for the transfer of a handle, a reference to a KV cache at its server.

    The layout contains the model, revision and engine version. KV caches move only between equal layouts, so a handle only
    reaches a server for which all three are equal.
    """
    return Description(
        model=model, revision=revision, dtype=f"handle/{engine_version}", layers=1, heads=1, head_size=1,
        block_size=TOKENS_MAX, block_bytes=HANDLE_BYTES,
    )  # fmt: skip


def continued(request: Generate, tokens: Sequence[int]) -> Generate:
    """Return a request that continues `request` after `tokens`, which are its prompt and the tokens generated so far.

    The new request's `max_tokens` and `min_tokens` are reduced by the number of the generated tokens.
    """
    generated = len(tokens) - len(request.tokens)
    sampling = request.sampling
    less = msgspec.structs.replace(
        sampling,
        max_tokens=sampling.max_tokens - generated,
        min_tokens=max(0, sampling.min_tokens - generated),
        prompt_logprobs=None,  # they have already been delivered
    )
    return msgspec.structs.replace(request, tokens=list(tokens), sampling=less)


class Handed:
    """The `Export` of a request that moves to another worker by a handle.

    A handle is a reference by which another server can fetch the request's KV cache. The upstream gives a handle only after the
    request has stopped. Before `stop`, there is therefore nothing to send.
    """

    def __init__(self, engine: OpenAIEngine, key: int) -> None:
        self._engine = engine
        self._key = key
        self._handle: Handle | None = None

    def full_blocks(self) -> int:
        return 0

    async def stop(self) -> Stopped:
        tokens, self._handle = await self._engine.hand_over(self._key)
        return Stopped(tokens, len(tokens))

    async def blocks(self, shard: int, first: int, count: int) -> Buffer:
        """Return the handle as JSON, padded to the size of a block.

        Raise MoveEnded if `stop` has not been called, or if the handle is too long.
        """
        if self._handle is None:
            raise MoveEnded("the request has not stopped")
        words = json.dumps(self._handle).encode()
        if len(words) > HANDLE_BYTES:
            raise MoveEnded(f"the handle has {len(words)} bytes, more than {HANDLE_BYTES}")
        return words.ljust(HANDLE_BYTES)

    def resume(self) -> None:
        self._engine.resume(self._key)

    def close(self) -> None:
        self._handle = None


class Arriving:
    """The `Import` of a request that arrives with a handle, a reference to its KV cache at another server."""

    cached_tokens = 0

    def __init__(self, engine: OpenAIEngine, key: int, request: Generate) -> None:
        self._engine = engine
        self._key = key
        self._request = request
        self._words = b""

    async def take(self, shard: int, first: int, data: Buffer) -> None:
        self._words = bytes(data)

    async def commit(self, tokens: Sequence[int], computed: int) -> None:
        """Continue the request at the upstream, with the handle that arrived. Raise MoveRefused if the handle is invalid."""
        try:
            handle = json.loads(self._words)
        except ValueError:
            raise MoveRefused("the data that arrived is not a handle") from None
        if not isinstance(handle, dict):
            raise MoveRefused("the data that arrived is not a handle")
        self._engine.accept(self._key, continued(self._request, tokens), handle)
