"""Sends one request from a worker to its upstream and relays the answer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
import msgspec
import structlog

from events.wire import Chunk, Generate
from workers.engines.openai.capabilities import Abilities
from workers.engines.openai.constraints import Constraints
from workers.engines.openai.prompt_logprobs import prompt_logprobs, put_before
from workers.engines.openai.stream_decoder import Fault, UpstreamStream
from workers.engines.openai.upstream import Upstream, hidden, refusal
from workers.engines.openai.upstream_errors import UNAUTHORIZED, UpstreamUnavailable
from workers.engines.openai.watch.api_key import UpstreamKey
from workers.engines.openai.watch.identity_watch import IdentityWatch
from workers.engines.openai.watch.retry_after import RetryGate

NOT_FOUND = 404
OVERLOADED = "overloaded"
STRANGE = (*UNAUTHORIZED, NOT_FOUND)  # statuses that suggest that the server was replaced

log = structlog.get_logger(__name__)
Emit = Callable[[list[Chunk]], None]


class Exchange:
    """Sends requests to one upstream and relays the answers."""

    def __init__(
        self,
        upstream: Upstream,
        abilities: Abilities,
        key: UpstreamKey,
        identity: IdentityWatch,
        gate: RetryGate,
    ) -> None:
        self._upstream = upstream
        self._abilities = abilities
        self._key = key
        self._identity = identity
        self._gate = gate
        self._constraints = Constraints(partial(upstream.completed_text, abilities), lambda: identity.doubts)

    async def answer(self, request: Generate, handle: dict[str, Any] | None, emit: Emit) -> None:
        """Relay the upstream's answer. If it refused an API key that was replaced in the meantime, retry once."""
        used = self._upstream.key
        error = await self._attempt(request, handle, emit)
        if error is not None and await self._key.replaced(used):
            error = await self._attempt(request, handle, emit)
        if error is not None:
            emit([Chunk(0, [], error=hidden(hidden(error, used), self._upstream.key))])

    async def _attempt(self, request: Generate, handle: dict[str, Any] | None, emit: Emit) -> str | None:
        """Send a request once. Return the error if no answer began; None if the answer was relayed."""
        reading = UpstreamStream(request, self._abilities.ids_for(request))
        try:
            if request.guided is not None:
                guided = await self._constraints.translate(request.guided)
                request = msgspec.structs.replace(request, guided=guided)
            before = await prompt_logprobs(self._upstream, self._abilities, request)
            async with self._upstream.complete(self._abilities, request, handle) as response:
                if response.status != 200:
                    return await self._refused(response, canary=request.canary)
                async for data in response.content.iter_any():
                    self._emit(emit, put_before(reading.feed(data), before))
                    if reading.over:
                        return None
                self._emit(emit, reading.end())
        except Fault as fault:
            return str(fault)
        except (aiohttp.ClientError, OSError, TimeoutError, UpstreamUnavailable) as error:
            self._identity.doubt()  # after a restart it may be another server
            words = str(error) or type(error).__name__
            self._emit(emit, [Chunk(0, [], error=f"upstream_lost: the upstream's connection broke: {words}")])
        except Exception as error:  # a bug in this worker: the caller must not wait for ever
            log.exception("request_failed")
            emit([Chunk(0, [], error=f"engine_error: {type(error).__name__} in the worker")])
        return None

    async def _refused(self, response: aiohttp.ClientResponse, *, canary: bool) -> str:
        """Return the error in a response that is not a stream. Re-read the identity if another server may have answered."""
        error = await refusal(response, canary=canary)
        if self._gate.refused(response.status, response.headers, canary=canary):
            return f"{OVERLOADED}: {error.partition(': ')[2] or error}"
        if response.status in STRANGE:
            self._identity.distrust()
            if changed := await self._identity.look():
                return f"not_serving: the server behind the worker has changed ({changed})"
        return error

    def _emit(self, emit: Emit, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            chunk.error = chunk.error and hidden(chunk.error, self._upstream.key)
        emit(chunks)
