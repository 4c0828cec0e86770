"""Where does what the engine says go?

The engine knows keys, frontends know stream numbers; a stream ties the two together, and whatever the engine still says
about one that is over is dropped here. Only `deliver` may be called from another thread than the loop's.
"""

import asyncio
import threading
from collections.abc import Callable

from events.wire import Chunk
from workers.counters import WorkerCounters
from workers.engines.engine import Engine
from workers.serving.frontends import FrontendConnections
from workers.streams import Stream, StreamTable


class StreamOutput:
    """What one worker's engine says, on its way to the frontends."""

    def __init__(
        self,
        engine: Engine,
        streams: StreamTable,
        connections: FrontendConnections,
        counters: WorkerCounters,
        *,
        began: Callable[[], None],
        ended: Callable[[int, Stream, str | None], None],
        is_moving: Callable[[int], bool],
    ) -> None:
        """`began` is told that a stream has begun that came from elsewhere; `ended` of each whose last chunk is on its way,
        with its error. `is_moving` says of a key whether its stream is on its way out."""
        self._engine = engine
        self._streams = streams
        self._connections = connections
        self._counters = counters
        self._began = began
        self._ended = ended
        self._is_moving = is_moving
        self._sending_on = ""  # why streams that decode are sent elsewhere; "": they are not
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0

    def start(self) -> None:
        """Deliver on the running loop, in this thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def deliver(self, out: list[tuple[int, Chunk]]) -> None:
        """Take one step's output, from any thread, and send each frontend its part as one frame."""
        if threading.get_ident() == self._thread:
            self._deliver(out)
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, out)

    def _deliver(self, out: list[tuple[int, Chunk]]) -> None:
        streams, tokens, prefilled = self._streams.by_key, 0, False
        for key, chunk in out:
            stream = streams.get(key)
            if stream is None:
                continue
            if stream.held is not None:
                stream.held.append((key, chunk))
                continue
            chunk.stream = stream.number
            connection = stream.connection
            connection.batch.append(chunk)
            tokens += len(chunk.tokens)
            if not stream.decodes and (chunk.tokens or chunk.text):
                self._streams.first_output(stream)
                prefilled = True
            if chunk.finish is not None or chunk.error is not None:
                self._ended(key, stream, chunk.error)
        self._counters.tokens += tokens
        if prefilled and self._sending_on:
            self._send_on()
        for connection in self._connections.open:
            if connection.batch:
                connection.flush()

    # --- streams that come from elsewhere

    def expect(self, key: int, stream: Stream) -> None:
        """Expect the first words of a stream that has come with its KV cache, and hold them."""
        self._streams.begin(key, stream)
        self._streams.first_output(stream)
        self._began()

    def release(self, key: int) -> None:
        """Say what was held, and hold no more."""
        self._counters.requests += 1
        stream = self._streams.by_key[key]
        held, stream.held = stream.held, None
        self._deliver(held or [])

    def give_up(self, key: int) -> None:
        """Expect it no more."""
        self._streams.end(key)

    # --- streams that are to go elsewhere

    def end_all(self, error: str) -> None:
        """End every stream with an error. New ones are refused already, and those that were to come have been given up."""
        keys = list(self._streams.by_key)
        for key in keys:
            self._engine.cancel(key)
        self._deliver([(key, Chunk(0, [], error=error)) for key in keys])

    def send_on(self, error: str) -> None:
        """End every user's stream that decodes, with an error; from now on, each as soon as its prefill is over. Those
        that are on their way to another worker with their KV cache need not be told."""
        self._sending_on = error
        self._send_on()
        self._connections.flush()

    def stays(self) -> None:
        """Take in that a stream which was on its way stays: where streams are sent elsewhere, it is one of them."""
        if self._sending_on:
            self.send_on(self._sending_on)

    def _send_on(self) -> None:
        for key, stream in list(self._streams.by_key.items()):
            if not stream.decodes or stream.canary or stream.held is not None or self._is_moving(key):
                continue
            self._engine.cancel(key)
            connection = stream.connection
            connection.batch.append(Chunk(stream.number, [], error=self._sending_on))
            self._ended(key, stream, self._sending_on)
