"""The openai engine: an OpenAI-compatible server somewhere else does the work, and this worker vouches for it.

Each request is one streamed completion. What arrives on all streams in one turn of the loop is delivered together. Where
the upstream takes and gives token ids, a continuation is exact; where it only knows text, chunks carry text, and the
registration says `exact=False`.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec
import structlog

from events.kv import Cleared
from events.observations import Profile
from events.wire import Chunk, Generate, Load
from workers.engines.engine import (
    Announce,
    Deliver,
    EngineDead,
    EngineIdentity,
    Export,
    Import,
    MoveEnded,
    Phase,
    unheard,
)
from workers.engines.openai.account import UpstreamAccount
from workers.engines.openai.handover import TOKENS_MAX, Arriving, Handed, continued, description
from workers.engines.openai.kv_names import CANARY_SALT, read_salt, salt_of
from workers.engines.openai.reading import Reading
from workers.engines.openai.upstream import (
    Abilities,
    NoHandle,
    Upstream,
    UpstreamAway,
    prompt_text,
    refusal,
)
from workers.kv_transfer.messages import Description

START_S = 120.0  # a real server loads weights first
START_RETRY_S = 0.5
CHECK_S_MAX = 2.0
CHECKS_FAILED_MAX = 3  # in a row, and the upstream is dead
STOP_S_MAX = 2.0
HANDLE_S_MAX = 1.0  # for one step, most of it cached
CONTEXT_TOKENS = 4096  # where the upstream does not say
BLOCK_TOKENS = 16  # the same
PREFILL_TOKENS_PER_S = 5000.0  # a guess for the profile; requests correct it nowhere yet
JOINS_WITHIN_S = 0.25  # a request may still be part of the step that began so long before it came
BATCH_SLOWDOWN = 2.0  # a guess: a full batch takes so many times the single stream's time per token

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSettings:
    """Where the server is, what we know of it that it does not say, and the bounds."""

    url: str
    key: str = ""
    tokenizer: str = ""
    revision: str = "unknown"
    context_tokens: int | None = None
    block_tokens: int | None = None  # None, here and below: what the upstream says
    kv_blocks: int | None = None
    kv_events: Sequence[str] = ()  # where its DP ranks publish them, and where they replay them
    kv_replays: Sequence[str] = ()
    batch_max: int = 64
    waiting_max: int = 256
    start_s: float = START_S


class OpenAIEngine:
    """An `Engine` in front of one upstream."""

    def __init__(self, settings: UpstreamSettings) -> None:
        self._settings = settings
        self._account: UpstreamAccount | None = None
        self._abilities = Abilities("unknown")
        self.identity = self._identify()
        self._upstream: Upstream | None = None
        self._deliver: Deliver = _nowhere
        self._announce: Announce = unheard
        self._trusted = True
        self._epoch = 0  # of the upstream's prefix cache: the last that was named
        self._spoilt = -1  # the last in which wrong blocks may be
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._silent: dict[
            int, tuple[float, int]
        ] = {}  # no output yet: key -> when it came, its prompt tokens
        self._lengths: dict[int, int] = {}  # key -> tokens so far
        self._asked: dict[
            int, tuple[Generate, list[int]]
        ] = {}  # and what was said since, where it could move
        self._stopped: dict[int, Generate] = {}  # for a move: what is left of it
        self._out: list[tuple[int, Chunk]] = []
        self._moved_at = 0.0  # when the upstream last said anything, or was given its only work
        self._failures = 0  # checks in a row

    async def start(self, deliver: Deliver, announce: Announce = unheard) -> None:
        self._deliver, self._announce = deliver, announce
        limit = self._settings.batch_max + self._settings.waiting_max
        self._upstream = upstream = Upstream(self._settings.url, self._settings.key, limit)
        self._account = UpstreamAccount(
            upstream, lambda: len(self._tasks), self._settings.kv_events, self._settings.kv_replays
        )
        try:
            found = await self._found(upstream)
            await self._account.start(found, announce)
        except BaseException:
            await self._account.stop()
            await upstream.close()
            raise
        self._abilities = replace(found, ranks=self._account.dp)
        self.identity = self._identify()
        if not self._abilities.exact:
            log.warning(
                "text_only_upstream", url=self._settings.url, advice="continuations will not be exact"
            )

    async def _found(self, upstream: Upstream) -> Abilities:
        """Ask until the upstream answers; it may still be loading."""
        until = asyncio.get_running_loop().time() + self._settings.start_s
        said = ""
        while True:
            try:
                return await upstream.abilities()
            except UpstreamAway as error:
                if asyncio.get_running_loop().time() > until:
                    raise EngineDead(f"after {self._settings.start_s:g} s: {error}") from None
                if str(error) != said:
                    said = str(error)
                    log.info("upstream_away", reason=said, patience_s=self._settings.start_s)
            await asyncio.sleep(START_RETRY_S)

    def _identify(self) -> EngineIdentity:
        settings, known, account = self._settings, self._abilities, self._account
        block_tokens, said = self._block_tokens(), account.kv_blocks if account is not None else None
        context = settings.context_tokens or known.context_tokens or CONTEXT_TOKENS
        blocks = settings.kv_blocks or said or -(-context * settings.batch_max // block_tokens)
        return EngineIdentity(
            model=known.model,
            revision=settings.revision,
            tokenizer=settings.tokenizer,
            engine="openai",
            engine_version=known.version,
            dtype="unknown",
            tp=1,
            device="upstream",
            context_tokens=context,
            exact=known.exact,
            profile=Profile(
                kv_blocks=blocks,
                block_tokens=block_tokens,
                max_batch=settings.batch_max,
                prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
                tpot_ms=((1, known.token_ms), (max(2, settings.batch_max), known.token_ms * BATCH_SLOWDOWN)),
            ),
            dp=known.ranks,
        )

    def _block_tokens(self) -> int:
        """Return how many tokens a block has. Where KV events name blocks, theirs have the last word."""
        given, said = self._settings.block_tokens, self._account.block_tokens if self._account else None
        if given is not None and said is not None and said != given and self.announces:
            log.warning(
                "block_tokens_differ", configured=given, upstream=said, advice="leave block_tokens out"
            )
            return said
        return given or said or BLOCK_TOKENS

    @property
    def announces(self) -> bool:
        return self._account is not None and self._account.announces

    @property
    def kv_event_counts(self) -> dict[str, int]:
        """What was heard of the upstream's KV events, by what became of it; nothing where nobody listens."""
        return {} if self._account is None else self._account.counters

    # --- requests

    def submit(self, key: int, request: Generate) -> None:
        if error := self._objection(request):
            self._deliver([(key, Chunk(request.stream, [], error=error))])
            return
        room = self.identity.context_tokens - len(request.tokens)
        most = min(request.sampling.max_tokens, room)  # real servers refuse more, rather than end there
        if most <= 0:
            self._deliver([(key, Chunk(request.stream, [], finish="length"))])
            return
        self._begin(key, self._salted(request), most, None)

    def _salted(self, request: Generate) -> Generate:
        """Return a request that finds in the upstream's prefix cache only what was computed since the last conviction of
        this worker, whichever life of it that was. While we are distrusted, and where no later epoch has begun, it finds
        and leaves nothing."""
        if request.canary:
            return request
        self._epoch = max(self._epoch, request.cache_epoch)
        apart = not self._trusted or self._epoch <= self._spoilt
        salt = CANARY_SALT + secrets.token_hex(16) if apart else salt_of(self._epoch, request.cache_salt)
        return msgspec.structs.replace(request, cache_salt=salt)

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
        if not self._tasks:
            self._moved_at = time.monotonic()
        self._lengths[key] = len(request.tokens)
        self._silent[key] = time.monotonic(), len(request.tokens)
        if self._abilities.handles and not request.canary:
            self._asked[key] = request, []
        self._tasks[key] = asyncio.ensure_future(self._serve(key, request, handle))

    def _objection(self, request: Generate) -> str | None:
        limit = self.identity.context_tokens
        if len(self._tasks) >= self._settings.batch_max + self._settings.waiting_max:
            return f"overloaded: {len(self._tasks)} requests are with the upstream already"
        if not request.tokens and not request.prompt_text:
            return "invalid_request: the prompt is empty"
        if not self._abilities.token_prompts and not prompt_text(request):
            return "invalid_request: this model's server takes text only, no token ids"
        if len(request.tokens) >= limit:
            return f"invalid_request: {len(request.tokens)} tokens leave no room in a context of {limit}"
        return None

    def cancel(self, key: int) -> None:
        self._stopped.pop(key, None)
        if task := self._tasks.get(key):
            self._forget(key)
            task.cancel()  # closes the connection, which is how an upstream learns that nobody reads

    def trust(self, trusted: bool) -> None:
        """Have no request find anything in the upstream's prefix cache, nor leave anything, as canaries do. We cannot empty
        that cache: what was computed up to now is never asked for again."""
        self._trusted = trusted
        if not trusted:
            self._spoilt = self._epoch
        if self.announces:
            for rank in range(self.identity.dp):
                self._announce(rank, [Cleared()])

    async def _serve(self, key: int, request: Generate, handle: dict[str, Any] | None) -> None:
        assert self._upstream is not None
        reading = Reading(request, self._abilities.ids_for(request))
        try:
            async with self._upstream.complete(self._abilities, request, handle) as response:
                if response.status != 200:
                    self._say(key, [Chunk(0, [], error=await refusal(response, canary=request.canary))])
                    return
                async for data in response.content.iter_any():
                    self._say(key, reading.feed(data))
                    if reading.over:
                        return
                self._say(key, reading.end())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            words = str(error) or type(error).__name__
            self._say(key, [Chunk(0, [], error=f"engine_error: the upstream's connection broke: {words}")])
        except Exception as error:  # a mistake of ours: whoever asked must not wait for ever
            log.exception("request_failed", url=self._settings.url)
            self._say(key, [Chunk(0, [], error=f"engine_error: {error!r}")])
        finally:
            if self._tasks.get(key) is asyncio.current_task():
                self._forget(key)

    def _say(self, key: int, chunks: list[Chunk]) -> None:
        """Put a request's chunks to what is delivered at the end of this turn of the loop."""
        self._moved_at = time.monotonic()
        if not chunks or key not in self._tasks:
            return
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._silent.pop(key, None)
        for chunk in chunks:
            self._lengths[key] += len(chunk.tokens) or (1 if chunk.text else 0)
            if key in self._asked:
                self._asked[key][1].extend(chunk.tokens)
            self._out.append((key, chunk))

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out:  # it was not handed over sooner
            self._deliver(out)

    def _forget(self, key: int) -> None:
        self._tasks.pop(key, None)
        self._silent.pop(key, None)
        self._lengths.pop(key, None)
        self._asked.pop(key, None)

    # --- moving to another server of the same kind, and from one

    @property
    def kv(self) -> tuple[Description, ...]:
        known = self._abilities
        if not known.handles or self.identity.context_tokens > TOKENS_MAX:
            return ()
        return (description(known.model, self._settings.revision, known.version),)

    def export(self, key: int) -> Export | None:
        asked = self._asked.get(key)
        return Handed(self, key) if self.kv and asked is not None and asked[1] else None

    def reserve(self, key: int, request: Generate, room_tokens: int) -> Import | str:
        if not self.kv:
            return f"the server {self._settings.url} takes no KV cache from another: it has no KV connector"
        return self._objection(request) or Arriving(self, key, request)

    async def hand_over(self, key: int) -> tuple[list[int], dict[str, Any]]:
        """End a request's stream, and return all its tokens and a handle of their KV cache. Raise MoveEnded."""
        if key not in self._tasks or key not in self._asked or self._upstream is None:
            raise MoveEnded("the request is over")
        request, said = self._asked[key]
        if self._out:
            self._flush()
        task = self._tasks[key]
        self._forget(key)
        self._stopped[key] = rest = continued(request, [*request.tokens, *said])
        task.cancel()
        try:
            return rest.tokens, await self._upstream.handle(self._abilities, rest, HANDLE_S_MAX)
        except NoHandle as error:
            self.go_on(key)
            raise MoveEnded(str(error)) from error

    def go_on(self, key: int) -> None:
        """Continue a request whose stream was ended, as a new one of the same server."""
        if (rest := self._stopped.pop(key, None)) is not None:
            rest.cache_salt = read_salt(rest.cache_salt)[1]
            self._begin(key, self._salted(rest), rest.sampling.max_tokens, None)

    def accept(self, key: int, request: Generate, handle: dict[str, Any]) -> None:
        """Continue a request whose KV cache this handle names."""
        room = self.identity.context_tokens - len(request.tokens)
        most = min(request.sampling.max_tokens, room)
        if most <= 0:
            self._deliver([(key, Chunk(request.stream, [], finish="length"))])
            return
        self._begin(key, self._salted(request), most, handle)

    # --- how it fares

    def phase(self) -> Phase:
        if not self._tasks:
            return Phase("idle", self._moved_at)
        # While some stream speaks, every step is heard: none is excused by prompts that came after it began.
        heard = len(self._silent) < len(self._tasks)
        joined = self._moved_at + JOINS_WITHIN_S
        waiting = sum(tokens for came, tokens in self._silent.values() if came <= joined or not heard)
        return Phase("prefill" if waiting else "decode", self._moved_at, waiting)

    def load(self) -> Load:
        running = min(len(self._tasks), self._settings.batch_max)
        tokens = sum(self._lengths.values())
        profile = self.identity.profile
        used = -(-tokens // profile.block_tokens)
        own = Load(running, len(self._tasks) - running, used, profile.kv_blocks, tokens)
        return own if self._account is None else self._account.load(own, self._settings.batch_max)

    def ranks(self) -> list[Load]:
        return [] if self._account is None else self._account.ranks(self.identity.profile.kv_blocks)

    async def check(self) -> None:
        assert self._upstream is not None
        trouble = await self._upstream.healthy(CHECK_S_MAX)
        self._failures = self._failures + 1 if trouble else 0
        if trouble:
            log.warning("upstream_unhealthy", reason=trouble, in_a_row=self._failures)
        if self._failures >= CHECKS_FAILED_MAX:
            raise EngineDead(f"the upstream {self._settings.url} is unhealthy: {trouble}")

    def chaos(self, fault: str, argument: float, rank: int = 0) -> bool:
        return False  # break the upstream itself: that is what is to be rehearsed

    def heal(self, fault: str, rank: int = 0) -> None:
        """There is nothing to end."""

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S_MAX)
        if self._account is not None:
            await self._account.stop()
        if self._upstream is not None:
            await self._upstream.close()


def _nowhere(out: list[tuple[int, Chunk]]) -> None:
    """Where output goes before `start`."""
