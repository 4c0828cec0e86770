"""A worker's open streams, and the flags that a drain waits for.

    begin ──▶ prefill ── first output ──▶ decode ──▶ end

Canaries are nobody's request: they have streams, and are not counted.
"""

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from events.wire import Chunk, Generate, Sampling
from workers.frontends import FrontendConnection, Heartbeats


class RequestOrigin(NamedTuple):
    """What a request was when it came here, without its tokens."""

    request: str
    prompt_tokens: int
    replayed: int  # tokens of the answer that it brought along
    sampling: Sampling

    @classmethod
    def of(cls, request: Generate) -> "RequestOrigin":
        """Return what is remembered of a request."""
        prompt = request.prompt_tokens
        return cls(request.request, prompt, len(request.tokens) - prompt, request.sampling)


@dataclass(slots=True)
class Stream:
    """One open stream: where its output goes."""

    connection: FrontendConnection
    number: int  # by which its frontend knows it
    canary: bool
    begun: float  # loop time, in seconds
    asked: RequestOrigin
    turn: int = 0  # of the trust in what is computed here, when it began
    held: list[tuple[int, Chunk]] | None = (
        None  # output before its frontend may have it; None: nothing is held
    )
    decodes: bool = False  # its prompt is computed: it has output
    leaving: bool = False  # it is on its way out, with its KV cache


class StreamTable:
    """All open streams of one worker, by the engine's keys."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        """`heartbeats`: those of the frontends, due sooner once a stream has begun."""
        self._heartbeats = heartbeats
        self.by_key: dict[int, Stream] = {}
        self.users = 0  # streams that are not canaries
        self._prefills = 0  # of these, still without output
        self.all_ended = asyncio.Event()  # a flag: no user's stream is open
        self.all_ended.set()
        self.all_decode = asyncio.Event()  # a flag: no user's stream is in its prefill
        self.all_decode.set()

    def begin(self, key: int, stream: Stream) -> None:
        """Take a stream in, for its frontend too."""
        connection = stream.connection
        self.by_key[key] = stream
        connection.streams[stream.number] = key
        if not stream.canary:
            self.users += 1
            self._prefills += 1
            self.all_ended.clear()
            self.all_decode.clear()
        self._heartbeats.hasten()

    def first_output(self, stream: Stream) -> None:
        """Note that a stream's prefill is over."""
        stream.decodes = True
        if not stream.canary:
            self._prefills -= 1
            if not self._prefills:
                self.all_decode.set()

    def end(self, key: int) -> None:
        """Forget a stream that is over. Unknown keys are ignored."""
        stream = self.by_key.pop(key, None)
        if stream is None:
            return
        connection = stream.connection
        connection.streams.pop(stream.number, None)
        if not stream.decodes:
            self.first_output(stream)
        if not stream.canary:
            self.users -= 1
            if not self.users:
                self.all_ended.set()
