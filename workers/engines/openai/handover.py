"""Moves a request with its KV cache from one vLLM server to another by a handle.

vLLM's own connector (NIXL) transfers the blocks. The worker requests one more token from the source server, with
`do_remote_decode`. This costs the source one step, because its prefix cache has the rest. It answers with a handle that locates
the blocks, and keeps them for a lease of 30 s. The target receives the handle with the same tokens, and pulls the blocks.

Between workers a handle travels as one block of KV cache that holds the whole sequence (`Handed`, `Arriving`).

Pitfalls (vLLM 0.32): Streamed answers carry no handle, so the handle is requested without streaming. The blocks of a cancelled
request are not kept for other servers, but its prefix stays in the cache. The target must continue exactly the tokens that the
handle covers: one more token that begins a new block terminates its engine.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from events.wire import Generate
from workers.engines.engine import MoveEnded, MoveRefused, Stopped
from workers.kv_transfer.messages import Buffer, Description

HANDLE_BYTES = 2 * 1024 * 1024  # one block number needs about six bytes
TOKENS_MAX = HANDLE_BYTES // 2  # of a sequence: the block must have at least two bytes per token


class Hands(Protocol):
    """The interface that an engine needs to move requests by a handle."""

    async def hand_over(self, key: int) -> tuple[list[int], dict[str, Any]]:
        """End a request's stream; return all its tokens and a handle to their KV cache. Raise MoveEnded."""
        ...

    def resume(self, key: int) -> None:
        """Continue a request after `hand_over` has ended its stream, as a new request to the same server."""
        ...

    def accept(self, key: int, request: Generate, handle: dict[str, Any]) -> None:
        """Continue a request from another server, with the KV cache that this handle locates."""
        ...


def description(model: str, revision: str, engine_version: str) -> Description:
    """Return the description of a handle: servers of the same version and model accept each other's handles."""
    return Description(
        model=model, revision=revision, dtype=f"handle/{engine_version}", layers=1, heads=1, head_size=1,
        block_size=TOKENS_MAX, block_bytes=HANDLE_BYTES,
    )  # fmt: skip


def continued(request: Generate, tokens: Sequence[int]) -> Generate:
    """Return a request that continues after `tokens`. Tokens generated in the meantime count against its limits."""
    generated = len(tokens) - len(request.tokens)
    sampling = request.sampling
    less = msgspec.structs.replace(
        sampling,
        max_tokens=sampling.max_tokens - generated,
        min_tokens=max(0, sampling.min_tokens - generated),
        prompt_logprobs=None,  # already delivered
    )
    return msgspec.structs.replace(request, tokens=list(tokens), sampling=less)


class Handed:
    """An `Export`: a request that moves to another worker by a handle. Nothing can be sent before the request has stopped."""

    def __init__(self, engine: Hands, key: int) -> None:
        self._engine = engine
        self._key = key
        self._handle: dict[str, Any] | None = None

    def full_blocks(self) -> int:
        return 0

    async def stop(self) -> Stopped:
        tokens, self._handle = await self._engine.hand_over(self._key)
        return Stopped(tokens, len(tokens))

    async def blocks(self, shard: int, first: int, count: int) -> Buffer:
        """Return the handle, padded to the size of a block. Raise MoveEnded before `stop`, or if it is too long."""
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
    """An `Import`: the reservation for a request that arrives by a handle."""

    cached_tokens = 0

    def __init__(self, engine: Hands, key: int, request: Generate) -> None:
        self._engine = engine
        self._key = key
        self._request = request
        self._words = b""

    async def take(self, shard: int, first: int, data: Buffer) -> None:
        self._words = bytes(data)

    async def commit(self, tokens: Sequence[int], computed: int) -> None:
        """Have the upstream continue with the handle that arrived. Raise MoveRefused if it is invalid."""
        try:
            handle = json.loads(self._words)
        except ValueError:
            raise MoveRefused("the data that arrived is not a handle") from None
        if not isinstance(handle, dict):
            raise MoveRefused("the data that arrived is not a handle")
        self._engine.accept(self._key, continued(self._request, tokens), handle)

    def abort(self) -> None:
        self._words = b""
