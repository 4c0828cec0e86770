"""What a busy turn of the loop says to a worker over its port leaves together, in order, and nothing of it is lost."""

import asyncio

import pytest

from controller.adapters.request_plane.connection import WRITE_BYTES_MAX
from controller.adapters.request_plane.dialers import TcpConnection
from controller.adapters.request_plane.hang import HangPolicy
from controller.ports import WorkerUnreachable
from events import wire
from events.wire import Cancel, Chunk, Generate, Hello, Proof, Sampling, Stay, Welcome


class Socket(asyncio.Transport):
    """A connection whose writes are kept."""

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
        """What each write said."""
        return [[wire.to_worker.decode(body) for body in wire.Splitter().feed(data)] for data in self.writes]


class Ear:
    """A sink that hears only of the end."""

    def __init__(self) -> None:
        self.end = ""

    def take(self, chunk: Chunk) -> None: ...
    def flush(self) -> None: ...
    def lost(self, cause: str, detail: str) -> None:
        self.end = cause


async def connected() -> tuple[TcpConnection, Socket]:
    """Return a connection that has been welcomed and whose last turn was busy, and its socket, whose writes are forgotten."""
    connection, socket = TcpConnection("f0", HangPolicy(), lambda: None), Socket()
    connection.connection_made(socket)
    assert socket.frames == [[Hello("f0")]]
    connection.data_received(wire.encode(Welcome("w0", "i1", "m")))
    connection.open(98, question(), Ear())
    connection.open(99, question(), Ear())
    await asyncio.sleep(0)
    socket.writes.clear()
    return connection, socket


def question(tokens: int = 1) -> Generate:
    return Generate(0, "r", [1] * tokens, tokens, Sampling(max_tokens=64))


async def test_what_one_turn_says_is_one_write_in_its_order() -> None:
    connection, socket = await connected()
    for stream in (1, 2, 3):
        connection.open(stream, question(), Ear())
    connection.cancel(2, "gone")
    connection.stay(3)
    assert not socket.writes
    await asyncio.sleep(0)
    (said,) = socket.frames
    assert [type(frame) for frame in said] == [Generate, Generate, Generate, Cancel, Stay]
    assert [frame.stream for frame in said if not isinstance(frame, Hello | Proof)] == [1, 2, 3, 2, 3]


async def test_where_turns_say_one_thing_each_nothing_waits_for_their_end() -> None:
    connection, socket = await connected()
    written = []
    for stream in (1, 2, 3):
        connection.open(stream, question(), Ear())
        written.append(len(socket.writes))
        await asyncio.sleep(0)
        assert len(socket.writes) == stream
    assert written == [0, 2, 3], "only the first one waited: the turn before had been busy"


async def test_the_first_of_a_burst_leaves_at_once_and_before_the_others() -> None:
    connection, socket = await connected()
    connection.open(1, question(), Ear())
    await asyncio.sleep(0)
    for stream in (2, 3, 4):
        connection.open(stream, question(), Ear())
        assert len(socket.writes) == 2
    await asyncio.sleep(0)
    streams = [[frame.stream for frame in said if isinstance(frame, Generate)] for said in socket.frames]
    assert streams == [[1], [2], [3, 4]]


async def test_what_has_gathered_counts_as_not_read_by_the_worker() -> None:
    connection, socket = await connected()
    socket.unsent = WRITE_BYTES_MAX - 100
    connection.open(1, question(), Ear())
    connection.open(2, question(200), Ear())
    with pytest.raises(WorkerUnreachable, match="does not read"):
        connection.open(3, question(), Ear())
    await asyncio.sleep(0)
    assert [frame.stream for frame in socket.frames[0] if isinstance(frame, Generate)] == [1, 2]


async def test_what_was_said_before_a_connection_is_let_go_of_still_leaves() -> None:
    connection, socket = await connected()
    connection.open(1, question(), Ear())
    connection.cancel(1, "gone")
    connection.close()
    assert [len(said) for said in socket.frames] == [2] and socket.ended == "closed"
    await asyncio.sleep(0)
    assert len(socket.writes) == 1


async def test_a_connection_that_breaks_before_the_turn_is_over_takes_its_requests_with_it() -> None:
    connection, socket = await connected()
    ear = Ear()
    connection.open(1, question(), ear)
    socket.ended = "reset"
    connection.connection_lost(ConnectionResetError())
    assert ear.end == "disconnected"
    await asyncio.sleep(0)
    assert not socket.writes


async def test_a_connection_that_is_dropped_says_nothing_more() -> None:
    connection, socket = await connected()
    ear = Ear()
    connection.open(1, question(), ear)
    connection.abort("stalled", "it hangs")
    assert ear.end == "stalled" and socket.ended == "aborted"
    await asyncio.sleep(0)
    assert not socket.writes
