"""Frames to a worker's port from one busy turn of the loop leave together, in order, and none is lost."""

import asyncio

import pytest
from waits import turns

from controller.adapters.request_plane.connection import WRITE_BYTES_MAX
from controller.adapters.request_plane.dialers import TcpConnection
from controller.adapters.request_plane.hang import HangPolicy
from controller.ports import WorkerUnreachable
from events import wire
from events.wire import Cancel, Chunk, Generate, Hello, Proof, Sampling, Stay, Welcome


class Socket(asyncio.Transport):
    """A connection that records its writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.unsent = 0
        self.ended = ""

    def write(self, data: object) -> None:
        assert isinstance(data, bytes) and not self.ended
        self.writes.append(data)

    def is_closing(self) -> bool:
        return bool(self.ended)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    @property
    def frames(self) -> list[list[wire.ToWorker]]:
        """The frames of each write."""
        return [[wire.to_worker.decode(body) for body in wire.Splitter().feed(data)] for data in self.writes]


class RecordingSink:
    """A sink that records only the end."""

    def __init__(self) -> None:
        self.end = ""

    def take(self, chunk: Chunk) -> None: ...
    def flush(self) -> None: ...
    def lost(self, cause: str, detail: str) -> None:
        self.end = cause


async def connected() -> tuple[TcpConnection, Socket]:
    """Return a welcomed connection after a busy turn, and its socket, without the writes so far."""
    connection, socket = TcpConnection("f0", HangPolicy(), lambda: None), Socket()
    connection.connection_made(socket)
    assert socket.frames == [[Hello("f0")]]
    connection.data_received(wire.encode(Welcome("w0", "i1", "m")))
    connection.open(98, question(), RecordingSink())
    connection.open(99, question(), RecordingSink())
    await turns()
    socket.writes.clear()
    return connection, socket


def question(tokens: int = 1) -> Generate:
    return Generate(0, "r", [1] * tokens, tokens, Sampling(max_tokens=64))


async def test_frames_of_one_turn_are_one_write_in_order() -> None:
    connection, socket = await connected()
    for stream in (1, 2, 3):
        connection.open(stream, question(), RecordingSink())
    connection.cancel(2, "gone")
    connection.stay(3)
    assert not socket.writes
    await turns()
    (said,) = socket.frames
    assert [type(frame) for frame in said] == [Generate, Generate, Generate, Cancel, Stay]
    assert [frame.stream for frame in said if not isinstance(frame, Hello | Proof)] == [1, 2, 3, 2, 3]


async def test_with_one_frame_per_turn_none_waits_for_the_end_of_the_turn() -> None:
    connection, socket = await connected()
    written = []
    for stream in (1, 2, 3):
        connection.open(stream, question(), RecordingSink())
        written.append(len(socket.writes))
        await turns()
        assert len(socket.writes) == stream
    assert written == [0, 2, 3], "only the first one waited, because the turn before was busy"


async def test_the_first_frame_of_a_burst_leaves_at_once_and_before_the_others() -> None:
    connection, socket = await connected()
    connection.open(1, question(), RecordingSink())
    await turns()
    for stream in (2, 3, 4):
        connection.open(stream, question(), RecordingSink())
        assert len(socket.writes) == 2
    await turns()
    streams = [[frame.stream for frame in said if isinstance(frame, Generate)] for said in socket.frames]
    assert streams == [[1], [2], [3, 4]]


async def test_gathered_frames_count_as_not_read_by_the_worker() -> None:
    connection, socket = await connected()
    socket.unsent = WRITE_BYTES_MAX - 100
    connection.open(1, question(), RecordingSink())
    connection.open(2, question(200), RecordingSink())
    with pytest.raises(WorkerUnreachable, match="does not read"):
        connection.open(3, question(), RecordingSink())
    await turns()
    assert [frame.stream for frame in socket.frames[0] if isinstance(frame, Generate)] == [1, 2]


async def test_frames_sent_before_a_connection_is_closed_still_leave() -> None:
    connection, socket = await connected()
    connection.open(1, question(), RecordingSink())
    connection.cancel(1, "gone")
    connection.close()
    assert [len(said) for said in socket.frames] == [2] and socket.ended == "closed"
    await turns()
    assert len(socket.writes) == 1


async def test_a_connection_that_breaks_before_the_end_of_the_turn_loses_its_requests() -> None:
    connection, socket = await connected()
    sink = RecordingSink()
    connection.open(1, question(), sink)
    socket.ended = "reset"
    connection.connection_lost(ConnectionResetError())
    assert sink.end == "disconnected"
    await turns()
    assert not socket.writes


async def test_an_aborted_connection_sends_nothing_more() -> None:
    connection, socket = await connected()
    sink = RecordingSink()
    connection.open(1, question(), sink)
    connection.abort("stalled", "it hangs")
    assert sink.end == "stalled" and socket.ended == "aborted"
    await turns()
    assert not socket.writes
