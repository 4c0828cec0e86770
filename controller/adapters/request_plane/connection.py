"""One connection to one worker: frames in, frames out, and who waits for which stream.

Steps are dispatched straight from the bytes' arrival to each stream's sink, without a queue or a task per
token: this is the frontend's hottest path. All steps that one read brings are one chunk to a stream: the busier
the frontend, the less each token costs it.
"""

import asyncio
import select
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import msgspec
import structlog

from controller.adapters.request_plane.frame_budget import FRAMES, FrameBudget
from controller.adapters.request_plane.hang import HangDetector, HangPolicy, Process
from controller.adapters.request_plane.reported_load import ReportedLoad
from controller.ports import LostCause, OthersWork, Sink, TransferSink, WorkerUnreachable
from events import wire
from events.fleet_key import FleetKey, FrontendHandshake, Stranger
from events.intrusion.reported_load import impossible_beat
from events.intrusion.send_budget import TrafficLimit


class StreamReservations:
    """The streams of one connection that are being moved."""

    def __init__(self) -> None:
        self.reserved: dict[int, TransferSink] = {}  # here, and nothing of it has begun
        self.shipping: dict[int, TransferSink] = {}  # open here, and on its way elsewhere

    def take(self, frame: wire.ToFrontend) -> None:
        """Pass on what the worker says of a move. What was given up meanwhile is dropped."""
        if isinstance(frame, wire.Reserved) and (sink := self.reserved.get(frame.stream)):
            sink.reserved(frame)
        elif isinstance(frame, wire.Declined):
            here = self.reserved.pop(frame.stream, None) or self.shipping.pop(frame.stream, None)
            if here is not None:
                here.declined(frame.stream, frame.reason)

    def forget(self, stream: int) -> bool:
        """Carry a stream no further. Return whether it was only reserved here."""
        self.shipping.pop(stream, None)
        return self.reserved.pop(stream, None) is not None

    def clear(self) -> dict[int, Sink]:
        """Forget everything: the connection is of no use any more. Return what was reserved here, to be told."""
        self.shipping.clear()
        reserved: dict[int, Sink] = {**self.reserved}
        self.reserved.clear()
        return reserved


log = structlog.get_logger(__name__)

WRITE_BYTES_MAX = 8 * 1024 * 1024  # requests queued towards a worker that does not read
BROKEN = "Stream ended before generation completed"


class WorkerConnection(asyncio.Protocol):
    """A connection from Hello to its end."""

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
        self._split = wire.Splitter()
        self._handshake = FrontendHandshake(key)
        self._transport: asyncio.Transport | None = None
        self._sinks: dict[int, Sink] = {}
        self._reservations = StreamReservations()
        self._reason = BROKEN
        self._cause: LostCause = "disconnected"
        self.detector = HangDetector(policy, self._loop.time(), process)
        self.load = ReportedLoad()
        self.draining = False
        self.live = False  # the worker has welcomed us and the connection stands
        self.instance = ""  # of the worker, once it has welcomed us
        self.stranger = ""  # why the other side is one
        self.late = 0  # chunks of streams that nobody reads any more
        self.budget = FrameBudget(self._loop.time(), frames)
        self.greeted: asyncio.Future[wire.Welcome] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()

    # --- the protocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.write(wire.encode(self._handshake.hello(self._frontend)))

    def data_received(self, data: bytes) -> None:
        self.detector.hear(self._loop.time())
        said: dict[int, wire.Chunk] = {}
        steps = frames = 0
        wrong = ""
        try:
            for body in self._split.feed(data):
                frames += 1
                frame = wire.to_frontend.decode(body)
                if type(frame) is wire.Step:
                    steps += 1
                    for chunk in frame.chunks:
                        earlier = said.get(chunk.stream)
                        if earlier is None:
                            said[chunk.stream] = chunk
                        elif not wire.join(earlier, chunk):
                            self._hand_out(said)
                            said[chunk.stream] = chunk
                    continue
                if steps:  # they came before it
                    self._stepped(steps, said)
                    steps = 0
                if type(frame) is wire.Beat:
                    self._beat(frame)
                elif type(frame) is wire.Welcome:
                    self.welcomed(frame)
                elif type(frame) is wire.Committed:
                    self._committed(frame)
                elif type(frame) is wire.Challenge:
                    self._tell(self._handshake.answer(frame))
                else:
                    self._reservations.take(frame)
        except (wire.BadFrame, msgspec.MsgspecError) as error:
            wrong = f"the worker sent what is not a frame: {error}"
        except Stranger as error:
            wrong = self.stranger = str(error)
        if steps:
            self._stepped(steps, said)
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

    # --- what comes in ------------------------------------------------------------------------------------

    def welcomed(self, frame: wire.Welcome) -> None:
        """The worker has said who it is: from now on it can be asked. Raise Stranger if it has to prove that it knows the fleet's
        key, and has not."""
        if not self._handshake.proven:
            raise Stranger(
                "the worker does not ask for the fleet's key: start it with --fleet-key-file, or with --data"
            )
        if not self.greeted.done():
            self.greeted.set_result(frame)
            self.live, self.instance = self._transport is not None, frame.instance

    def _stepped(self, steps: int, said: dict[int, wire.Chunk]) -> None:
        """So many steps came in one read, and said this."""
        self.detector.stepped(self._loop.time(), steps)
        self._hand_out(said)

    def _hand_out(self, said: dict[int, wire.Chunk]) -> None:
        """Give every stream what was said to it, then let each write it; `said` is empty afterwards."""
        touched: list[Sink] = []
        for stream, chunk in said.items():
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
        said.clear()
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
        """Return whether the engine gets on with other work, before or beside an answer of ours that has `begun` or not.
        Questions of ours that are asked side by side are other work to one another."""
        load = self.load.total
        if load.running + load.waiting < 2 or not self.detector.gets_on(self._loop.time(), own_tokens):
            return ""
        if self.detector.phase == "prefill" or (not begun and load.waiting > 0):
            return "before"
        return "beside"

    # --- what goes out ------------------------------------------------------------------------------------

    def _writable(self) -> asyncio.Transport:
        transport = self._transport
        if transport is None or transport.is_closing() or not self.live:
            raise WorkerUnreachable
        if transport.get_write_buffer_size() > WRITE_BYTES_MAX:
            raise WorkerUnreachable("the worker does not read what it is sent")
        return transport

    def open(self, stream: int, request: wire.Generate, sink: Sink) -> None:
        """Send a request. Raise WorkerUnreachable."""
        transport = self._writable()
        request.stream = stream
        frame = wire.encode(request)
        self._sinks[stream] = sink
        if request.rank:
            self.load.place(stream, request.rank)
        self.detector.opened(self._loop.time())
        if len(frame) > wire.FRAME_BYTES_MAX:  # would break the connection, and everybody's streams with it
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
        """Forget a stream or a reservation, and tell the worker why."""
        reserved = self._reservations.forget(stream)
        if self._sinks.pop(stream, None) is not None:
            self.detector.closed()
        elif not reserved:
            return
        self._tell(wire.Cancel(stream=stream, why=why))

    def _tell(self, frame: wire.ToWorker) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.encode(frame))

    # --- planned moves: a reservation is no open stream, and nobody owes us a frame for it --------------------

    def reserve(self, stream: int, request: wire.Generate, room: int, sink: TransferSink) -> None:
        """Ask the worker to keep room for a request. Raise WorkerUnreachable."""
        transport = self._writable()
        request.stream = stream
        frame = wire.encode(wire.Reserve(stream=stream, request=request, room_tokens=room))
        if len(frame) > wire.FRAME_BYTES_MAX:
            raise WorkerUnreachable(f"the request takes {len(frame)} bytes, more than a worker reads")
        self._reservations.reserved[stream] = sink
        if request.rank:
            self.load.place(stream, request.rank)
        transport.write(frame)

    def ship(self, stream: int, grants: list[bytes], sink: TransferSink) -> None:
        """Tell the worker to send a stream's KV cache. Raise WorkerUnreachable."""
        transport = self._writable()
        if stream not in self._sinks:
            raise WorkerUnreachable("the stream is over")
        self._reservations.shipping[stream] = sink
        transport.write(wire.encode(wire.Ship(stream=stream, grants=grants)))

    def stay(self, stream: int) -> None:
        """Tell the worker to go on decoding a stream that it was told to send."""
        if stream in self._sinks:
            self._reservations.forget(stream)
            self._tell(wire.Stay(stream=stream))

    def adopt(self, stream: int, sink: Sink) -> None:
        """Give an open stream another sink."""
        if stream in self._sinks:
            self._sinks[stream] = sink

    def _committed(self, frame: wire.Committed) -> None:
        """What was reserved is an open stream from now on."""
        sink = self._reservations.reserved.pop(frame.stream, None)
        if sink is not None:
            self._sinks[frame.stream] = sink
            self.detector.opened(self._loop.time())
            sink.committed(frame)

    # --- its end ------------------------------------------------------------------------------------------

    def lose(self, cause: LostCause, detail: str) -> None:
        """Tell every stream at once that nothing more comes; tell the worker too if it can still be told."""
        sinks, self._sinks = self._sinks, {}
        sinks |= self._reservations.clear()
        self.detector.open_streams = 0
        for stream in sinks:
            self._tell(wire.Cancel(stream=stream, why="elsewhere"))
        for sink in sinks.values():
            sink.lost(cause, detail)

    def drop(self, cause: LostCause, reason: str) -> None:
        """Drop the connection; nobody is sent here any more."""
        self._cause, self._reason = cause, reason
        self.live = False
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def abort(self, cause: LostCause, reason: str) -> None:
        """Drop the connection; its streams learn why now, not when the socket's end is noticed."""
        self.drop(cause, reason)
        self.lose(cause, reason)
        self._changed()

    def close(self) -> None:
        """Let go of the connection."""
        if self._transport is not None:
            self._transport.close()

    def readable(self) -> bool:
        """Say whether bytes lie in the socket that we have not read: then it is us who are late."""
        if self._transport is None:
            return False
        sock = self._transport.get_extra_info("socket")
        return sock is not None and _readable(sock.fileno())


class StreamReader:
    """A sink for one who reads at his own pace: a probe."""

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
