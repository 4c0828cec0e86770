"""One connection to one worker: sends and receives frames, and passes streams' output to their sinks.

This is the hottest path of a frontend. When bytes arrive, the output is therefore passed directly to the sink of each stream,
without a queue or a task per token. Engine steps that are read together become one chunk per stream, so the cost per token falls
when more steps arrive at once.
"""

import asyncio
import select
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import msgspec
import structlog

from controller.adapters.request_plane.hang import HangDetector, HangPolicy, Process
from controller.ports import LostCause, OthersWork, Sink, TransferSink, WorkerUnreachable
from events import wire
from events.fleet_key import FleetKey, FrontendHandshake, UnknownPeer
from events.intrusion.reported_load import impossible_beat
from events.intrusion.send_budget import TrafficBudget, TrafficLimit, traffic
from events.wire import Beat, Load

# An engine step is one frame, and steps within one millisecond are sent together. 256 answers with 20 logprobs: 6 MB/s.
FRAMES = traffic(per_s=20_000.0, burst=100_000.0, mb_per_s=64.0, mb_burst=512.0)
SHARE = 0.01  # the budget is checked each time this share of a burst has arrived
WRITE_BYTES_MAX = 8 * 1024 * 1024  # requests queued towards a worker that does not read
BROKEN = "Stream ended before generation completed"

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class ReportedLoad:
    """The load in a worker's last beat (its periodic frame), and the part of this load that comes from other clients."""

    total: Load = field(default_factory=Load)
    by_rank: Sequence[Load] = ()  # load of each DP rank; empty before the first beat
    external: Load = field(default_factory=Load)  # load caused by other clients' requests
    # `external` for each DP rank; empty if the worker does not report ranks
    external_by_rank: Sequence[Load] = ()
    # DP rank of each stream and reservation of this client, if it is not 0
    ranks: dict[int, int] = field(default_factory=dict)

    def take(self, beat: Beat, own: int, streams: Collection[int], reserved: Collection[int]) -> None:
        """Record the load in a beat (a worker's periodic frame), and drop the stored DP ranks of streams that have ended.

        `own` is the number of this client's open requests. `streams` and `reserved` are the numbers of this client's streams and
        reservations.
        """
        self.total = beat.load
        self.by_rank = beat.ranks or (beat.load,)
        self.external = without(beat.load, own)
        if not (beat.ranks or self.ranks):
            self.external_by_rank = ()
            return
        self.ranks = {n: rank for n, rank in self.ranks.items() if n in streams or n in reserved}
        ours = Counter(self.ranks.get(stream, 0) for stream in streams)
        self.external_by_rank = [without(load, ours[rank]) for rank, load in enumerate(beat.ranks)]


def without(load: Load, own: int) -> Load:
    """Return a load without canaries and without `own` requests of this client.

    The number of tokens is an estimate, which assumes that all requests have equally many tokens. A weight outside 0 to 1 counts
    as 1, so that no worker can attract more requests than others.
    """
    whole = load.running + load.waiting - load.canaries
    others = max(0, whole - own)
    tokens = load.active_tokens * others // whole if whole > 0 else 0
    weight = load.weight if 0.0 < load.weight <= 1.0 else 1.0
    return Load(running=others, active_tokens=tokens, closed_s=load.closed_s, weight=weight)


class FrameBudget:
    """Limits the traffic that a worker may send on one connection.

    At each read, the connection adds the number of frames to `frames` and the number of bytes to `size`. The connection calls
    `spend` only when `frames` exceeds `frames_step` or `size` exceeds `size_step`. These steps are 1 % of the permitted burst, so
    most reads need no call. Once the budget is exceeded, `exceeded` stays true.
    """

    __slots__ = ("_traffic", "exceeded", "frames", "frames_step", "size", "size_step")

    def __init__(self, now: float, limit: TrafficLimit = FRAMES) -> None:
        self._traffic = TrafficBudget(limit, now)
        self.exceeded = False
        self.frames = self.size = 0
        self.frames_step = limit.messages.burst * SHARE
        self.size_step = limit.size.burst * SHARE

    def spend(self, now: float) -> str:
        """Charge the traffic since the last call to the budget, and reset `frames` and `size`.

        Return the reason to close the connection if the budget is exceeded; otherwise empty.
        """
        within = self._traffic.take(self.frames, self.size, now)
        self.frames = self.size = 0
        if within:
            return ""
        self.exceeded = True
        return "the worker sends more than an engine can compute"


class StreamReservations:
    """The streams that are moving to or from the worker of one connection, each with the sink for frames about its move."""

    def __init__(self) -> None:
        self.reserved: dict[int, TransferSink] = {}  # streams that will arrive at this worker
        self.shipping: dict[int, TransferSink] = {}  # open streams that this worker ships to another worker

    def take(self, frame: wire.ToFrontend) -> None:
        """Pass a worker's frame about a move to the sink of its stream. Frames of cancelled moves are dropped."""
        if isinstance(frame, wire.Reserved) and (sink := self.reserved.get(frame.stream)):
            sink.reserved(frame)
        elif isinstance(frame, wire.Declined):
            here = self.reserved.pop(frame.stream, None) or self.shipping.pop(frame.stream, None)
            if here is not None:
                here.declined(frame.stream, frame.reason)

    def forget(self, stream: int) -> bool:
        """Forget the move of a stream. Return whether the stream was only reserved on this worker and not yet open there."""
        self.shipping.pop(stream, None)
        return self.reserved.pop(stream, None) is not None

    def clear(self) -> dict[int, Sink]:
        """Forget all moves, because the connection is lost. Return the sinks of reservations, which the caller must notify."""
        self.shipping.clear()
        reserved: dict[int, Sink] = {**self.reserved}
        self.reserved.clear()
        return reserved


class WorkerConnection(asyncio.Protocol):
    """One connection to one worker, from the client's Hello to the connection's end."""

    def __init__(
        self,
        frontend: str,
        policy: HangPolicy,
        changed: Callable[[], None],
        process: Process | None = None,
        key: FleetKey | None = None,
        frames: TrafficLimit = FRAMES,
    ) -> None:
        self._frontend = frontend
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._split = wire.Splitter()
        self._handshake = FrontendHandshake(key)
        self._transport: asyncio.Transport | None = None
        self._sinks: dict[int, Sink] = {}
        self._reservations = StreamReservations()
        self._reason = BROKEN
        self._cause: LostCause = "disconnected"
        self.detector = HangDetector(policy, now, process or Process(now))
        self.load = ReportedLoad()
        self.draining = False
        self.live = False  # whether the worker has sent its Welcome and the connection is open
        self.instance = ""  # the worker's instance; empty until its Welcome
        self.stranger = ""  # the reason why the handshake failed; empty if it did not
        self.late = 0  # number of chunks that arrived for streams without a sink
        self.budget = FrameBudget(now, frames)
        self.greeted: asyncio.Future[wire.Welcome] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()

    # --- the protocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass of asyncio.Transport
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(wire.encode(self._handshake.hello(self._frontend)))

    def data_received(self, data: bytes) -> None:
        self.detector.frame_received(self._loop.time())
        chunks: dict[int, wire.Chunk] = {}
        steps = frames = 0
        wrong = ""
        try:
            for body in self._split.feed(data):
                frames += 1
                frame = wire.to_frontend.decode(body)
                if type(frame) is wire.Step:
                    steps += 1
                    for chunk in frame.chunks:
                        earlier = chunks.get(chunk.stream)
                        if earlier is None:
                            chunks[chunk.stream] = chunk
                        elif not wire.join(earlier, chunk):
                            self._dispatch(chunks)
                            chunks[chunk.stream] = chunk
                    continue
                if steps:  # handle the steps that arrived before this frame first
                    self._stepped(steps, chunks)
                    steps = 0
                self._handle(frame)
        except (wire.BadFrame, msgspec.MsgspecError) as error:
            wrong = f"the worker sent an invalid frame: {error}"
        except UnknownPeer as error:
            wrong = self.stranger = str(error)
        if steps:
            self._stepped(steps, chunks)
        budget = self.budget
        budget.frames += frames
        budget.size += len(data)
        if budget.frames > budget.frames_step or budget.size > budget.size_step:
            wrong = budget.spend(self._loop.time()) or wrong
        if wrong:
            self.abort("disconnected", wrong)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport, self.live = None, False
        if not self.greeted.done():
            self.greeted.cancel()
        if not self.ended.done():
            self.ended.set_result(None)
        self.lose(self._cause, self._reason)
        self._changed()

    # --- incoming frames ----------------------------------------------------------------------------------

    def _handle(self, frame: wire.ToFrontend) -> None:
        """Handle a frame that has no output of an engine step, such as a Welcome or a beat (a worker's periodic frame).

        Raise BadFrame for an invalid frame, UnknownPeer for a failed handshake.
        """
        if type(frame) is wire.Beat:
            self._beat(frame)
        elif type(frame) is wire.Welcome:
            self.welcomed(frame)
        elif type(frame) is wire.Committed:
            self._committed(frame)
        elif type(frame) is wire.Challenge:
            self._send(self._handshake.answer(frame))
        else:
            self._reservations.take(frame)

    def welcomed(self, frame: wire.Welcome) -> None:
        """Handle the worker's Welcome, after which the connection accepts requests.

        Raise UnknownPeer if the worker must prove that it knows the fleet key and has not done so.
        """
        if not self._handshake.proven:
            raise UnknownPeer(
                "the worker does not ask for the fleet key: start it with --fleet-key-file, or with --data"
            )
        if not self.greeted.done():
            self.greeted.set_result(frame)
            self.live, self.instance = self._transport is not None, frame.instance

    def _stepped(self, steps: int, chunks: dict[int, wire.Chunk]) -> None:
        """Handle the output of `steps` engine steps that arrived in one read. `chunks` maps stream numbers to chunks."""
        self.detector.stepped(self._loop.time(), steps)
        self._dispatch(chunks)

    def _dispatch(self, chunks: dict[int, wire.Chunk]) -> None:
        """Pass each chunk to the sink of its stream, and then flush these sinks. Clear `chunks`."""
        touched: list[Sink] = []
        for stream, chunk in chunks.items():
            sink = self._sinks.get(stream)
            if sink is None:
                self.late += 1
                continue
            if chunk.finish is not None or chunk.error is not None:
                del self._sinks[stream]
                self.detector.closed()
                self._reservations.forget(stream)
            touched.append(sink)
            sink.take(chunk)
        chunks.clear()
        for sink in touched:
            sink.flush()

    def _beat(self, frame: wire.Beat) -> None:
        if why := impossible_beat(frame):
            raise wire.BadFrame(f"an impossible load: {why}")
        was = (self.detector.stuck, self.draining)
        self.detector.beat(frame)
        self.load.take(frame, self.detector.open_streams, self._sinks, self._reservations.reserved)
        self.draining = frame.draining
        if was != (self.detector.stuck, self.draining):
            self._changed()

    def others_work(self, own_tokens: int, *, begun: bool) -> OthersWork:
        """Return whether the engine serves other requests "before" one of this client or "beside" (together with) it.

        "" if unknown. `own_tokens` is the number of tokens of the client's request, and `begun` is true if its answer has begun.
        All further requests of this client count as other requests. See `Prober.others_work`.
        """
        load = self.load.total
        if load.running + load.waiting < 2 or not self.detector.gets_on(self._loop.time(), own_tokens):
            return ""
        if self.detector.phase == "prefill" or (not begun and load.waiting > 0):
            return "before"
        return "beside"

    # --- outgoing frames ----------------------------------------------------------------------------------

    def _writable(self) -> asyncio.Transport:
        transport = self._transport
        if transport is None or transport.is_closing() or not self.live:
            raise WorkerUnreachable
        if transport.get_write_buffer_size() > WRITE_BYTES_MAX:
            raise WorkerUnreachable("the worker does not read its input")
        return transport

    def open(self, stream: int, request: wire.Generate, sink: Sink) -> None:
        """Send a request as stream number `stream`. `sink` receives the stream's output.

        A request that is too large for a frame is not sent, and its sink receives an error chunk. Raise WorkerUnreachable if the
        connection is closed or the worker does not read its input.
        """
        transport = self._writable()
        request.stream = stream
        frame = wire.encode(request)
        self._sinks[stream] = sink
        if request.rank:
            self.load.ranks[stream] = request.rank
        self.detector.opened(self._loop.time())
        if len(frame) > wire.FRAME_BYTES_MAX:  # the worker would close the connection with all its streams
            self._loop.call_soon(self._refuse, stream, len(frame))
            return
        transport.write(frame)

    def _refuse(self, stream: int, size: int) -> None:
        sink = self._sinks.pop(stream, None)
        if sink is None:
            return
        self.detector.closed()
        why = f"invalid_request: the request takes {size} bytes, {wire.FRAME_BYTES_MAX} are the most that a worker reads"
        sink.take(wire.Chunk(stream, [], error=why))
        sink.flush()

    def cancel(self, stream: int, why: wire.Why) -> None:
        """Drop a stream or a reservation, and send the reason to the worker. Unknown streams are ignored."""
        reserved = self._reservations.forget(stream)
        if self._sinks.pop(stream, None) is not None:
            self.detector.closed()
        elif not reserved:
            return
        self._send(wire.Cancel(stream=stream, why=why))

    def _send(self, frame: wire.ToWorker) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.encode(frame))

    # --- planned moves (a reservation is not an open stream, so the worker need not send frames for it) -------------------

    def reserve(self, stream: int, request: wire.Generate, room: int, sink: TransferSink) -> None:
        """Command the worker to reserve KV blocks for `room` tokens of a request.

        Raise WorkerUnreachable if the connection is closed, the worker does not read its input, or the request is too large.
        """
        transport = self._writable()
        request.stream = stream
        frame = wire.encode(wire.Reserve(stream=stream, request=request, room_tokens=room))
        if len(frame) > wire.FRAME_BYTES_MAX:
            raise WorkerUnreachable(f"the request takes {len(frame)} bytes, more than a worker reads")
        self._reservations.reserved[stream] = sink
        if request.rank:
            self.load.ranks[stream] = request.rank
        transport.write(frame)

    def ship(self, stream: int, grants: list[bytes], sink: TransferSink) -> None:
        """Command the worker to send a stream's KV cache to the target, which issued `grants` when it reserved KV blocks.

        Raise WorkerUnreachable if the connection is closed, the worker does not read its input, or the stream has ended.
        """
        transport = self._writable()
        if stream not in self._sinks:
            raise WorkerUnreachable("the stream has ended")
        self._reservations.shipping[stream] = sink
        transport.write(wire.encode(wire.Ship(stream=stream, grants=grants)))

    def stay(self, stream: int) -> None:
        """Command the worker to abort the transfer of a stream's KV cache and continue decoding. Unknown streams are ignored."""
        if stream in self._sinks:
            self._reservations.forget(stream)
            self._send(wire.Stay(stream=stream))

    def adopt(self, stream: int, sink: Sink) -> None:
        """Replace the sink of an open stream. Unknown streams are ignored."""
        if stream in self._sinks:
            self._sinks[stream] = sink

    def _committed(self, frame: wire.Committed) -> None:
        """Handle a Committed frame, which turns a reservation into an open stream."""
        sink = self._reservations.reserved.pop(frame.stream, None)
        if sink is not None:
            self._sinks[frame.stream] = sink
            self.detector.opened(self._loop.time())
            sink.committed(frame)

    # --- end of the connection ----------------------------------------------------------------------------

    def lose(self, cause: LostCause, detail: str) -> None:
        """End every stream and reservation with this cause. If the worker is connected, cancel them at the worker too."""
        sinks, self._sinks = self._sinks, {}
        sinks |= self._reservations.clear()
        self.detector.open_streams = 0
        for stream in sinks:
            self._send(wire.Cancel(stream=stream, why="elsewhere"))
        for sink in sinks.values():
            sink.lost(cause, detail)

    def drop(self, cause: LostCause, reason: str) -> None:
        """Close the connection at once, so that no further requests are sent over it.

        The streams end later, when the caller or `connection_lost` calls `lose`.
        """
        self._cause, self._reason = cause, reason
        self.live = False
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def abort(self, cause: LostCause, reason: str) -> None:
        """Abort the connection, and end its streams at once instead of in `connection_lost`."""
        self.drop(cause, reason)
        self.lose(cause, reason)
        self._changed()

    def close(self) -> None:
        """Close the connection after its buffered data has been sent."""
        if self._transport is not None:
            self._transport.close()

    def readable(self) -> bool:
        """Return whether the socket has unread bytes. If so, this process has not read them yet, and the worker is not silent."""
        if self._transport is None:
            return False
        sock = self._transport.get_extra_info("socket")
        return sock is not None and _readable(sock.fileno())


class StreamReader:
    """A sink that queues chunks for a consumer that awaits them, such as a probe.

    Chunks beyond `chunks_max` are dropped.
    """

    def __init__(self, chunks_max: int) -> None:
        self._chunks: asyncio.Queue[wire.Chunk | WorkerUnreachable] = asyncio.Queue(chunks_max + 1)
        self._max = chunks_max

    def take(self, chunk: wire.Chunk) -> None:
        if self._chunks.qsize() < self._max:
            self._chunks.put_nowait(chunk)

    def flush(self) -> None:
        pass

    def lost(self, cause: LostCause, detail: str) -> None:
        with suppress(asyncio.QueueFull):
            self._chunks.put_nowait(WorkerUnreachable(f"{cause}: {detail}"))

    async def next(self) -> wire.Chunk:
        item = await self._chunks.get()
        if isinstance(item, WorkerUnreachable):
            raise item
        return item


def _readable(descriptor: int) -> bool:
    if descriptor < 0:
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
