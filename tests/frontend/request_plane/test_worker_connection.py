"""One read of a worker's connection: its frames arrive as one chunk per stream, in order."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.adapters.request_plane.connection import WorkerConnection
from controller.adapters.request_plane.hang import HangPolicy
from events import wire
from events.wire import Beat, Chunk, Generate, Sampling, Step, ToFrontend, Welcome


class Wire(asyncio.Transport):
    """A transport that discards its data."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def write(self, data: object) -> None:
        pass

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.aborted = True


class RecordingSink:
    """A sink that records its notifications in order."""

    def __init__(self, heard: list[object], stream: int) -> None:
        self.heard, self.stream = heard, stream

    def take(self, chunk: Chunk) -> None:
        assert chunk.stream == self.stream
        self.heard.append((self.stream, list(chunk.tokens), chunk.finish))

    def flush(self) -> None:
        self.heard.append((self.stream, "flush"))

    def lost(self, cause: str, detail: str) -> None:
        self.heard.append((self.stream, cause))


def connection_with(*streams: int) -> tuple[WorkerConnection, list[object]]:
    """Return a welcomed connection with these streams open, and the list of their notifications."""
    heard: list[object] = []
    connection = WorkerConnection("f0", HangPolicy(), lambda: heard.append("changed"))
    connection.connection_made(Wire())
    tell(connection, Welcome("w0", "i1", "m"))
    for stream in streams:
        request = Generate(0, "r", [1], 1, Sampling(max_tokens=64))
        connection.open(stream, request, RecordingSink(heard, stream))
    return connection, heard


def tell(connection: WorkerConnection, *frames: ToFrontend, then: bytes = b"") -> None:
    """Let the connection read these frames at once."""
    connection.data_received(b"".join(wire.encode(frame) for frame in frames) + then)


async def test_all_steps_of_one_read_are_one_chunk_per_stream_and_one_write() -> None:
    connection, heard = connection_with(1, 2)
    tell(
        connection,
        Step([Chunk(1, [5]), Chunk(2, [7])]),
        Step([Chunk(2, [8])]),
        Step([Chunk(1, [6], "length")]),
    )
    assert heard == [(1, [5, 6], "length"), (2, [7, 8], None), (1, "flush"), (2, "flush")]
    assert connection.detector.open_streams == 1


async def test_frames_after_steps_are_delivered_after_them() -> None:
    connection, heard = connection_with(1)
    tell(connection, Step([Chunk(1, [5])]), Beat("decode", 1.0, draining=True), Step([Chunk(1, [6])]))
    assert heard == [(1, [5], None), (1, "flush"), "changed", (1, [6], None), (1, "flush")]
    connection.detector.phase, connection.detector.age_s = "idle", 9.0
    tell(connection, Step([Chunk(1, [7])]), Beat("decode", 250.0))
    assert connection.detector.age_s == 0.25, "of a step that began after these"


async def test_frames_before_invalid_data_are_not_lost() -> None:
    connection, heard = connection_with(1, 2)
    tell(connection, Step([Chunk(1, [5], "stop")]), Step([Chunk(2, [7])]), then=b"\xff\xff\xff\xff")
    assert heard == [
        (1, [5], "stop"), (2, [7], None), (1, "flush"), (2, "flush"), (2, "disconnected"), "changed"
    ]  # fmt: skip


async def test_nothing_follows_the_end_of_a_stream() -> None:
    connection, heard = connection_with(1)
    tell(connection, Step([Chunk(1, [5], "stop")]), Step([Chunk(1, [6])]))
    assert heard == [(1, [5], "stop"), (1, "flush")] and connection.late == 1
    assert connection.detector.open_streams == 0


async def test_one_streams_tokens_may_end_another_stream_of_the_same_read() -> None:
    """A stop string of one choice cancels the others, which have tokens in the same read."""
    connection, heard = connection_with(2)

    class CancellingSink(RecordingSink):
        def take(self, chunk: Chunk) -> None:
            super().take(chunk)
            connection.cancel(2, "gone")

    connection.open(1, Generate(0, "r", [1], 1, Sampling(max_tokens=64)), CancellingSink(heard, 1))
    tell(connection, Step([Chunk(1, [5]), Chunk(2, [7])]))
    assert heard == [(1, [5], None), (1, "flush")] and connection.late == 1


STEPS = st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=4), max_size=12)


@given(STEPS, st.lists(st.integers(1, 90), min_size=1, max_size=5))
def test_every_stream_gets_the_same_however_reads_split_the_steps(
    steps: Sequence[Sequence[tuple[int, int]]], cuts: Sequence[int]
) -> None:
    async def listened() -> None:
        connection, heard = connection_with(1, 2, 3)
        data = b"".join(wire.encode(Step([Chunk(s, [t]) for s, t in step])) for step in steps)
        at = turn = 0
        while at < len(data):
            size = cuts[turn % len(cuts)]
            connection.data_received(data[at : at + size])
            at, turn = at + size, turn + 1
        for stream in (1, 2, 3):
            taken = [said[1] for said in heard if isinstance(said, tuple) and said[0] == stream]
            tokens = [token for said in taken if said != "flush" for token in said]
            assert tokens == [t for step in steps for s, t in step if s == stream]

    asyncio.run(listened())


@pytest.mark.parametrize("reads", [1, 8, 64])
async def test_the_recorded_step_time_decays_per_step_and_not_per_read(reads: int) -> None:
    connection, _ = connection_with(1)
    detector, now = connection.detector, asyncio.get_running_loop().time()
    detector.stepped(now - 4.0)
    detector.stepped(now)
    detector.closed()
    detector.opened(now)  # another stream: the time between the two is no step
    for _ in range(reads):
        tell(connection, *[Step([Chunk(1, [5])])] * (64 // reads))
    assert detector.step_limit_s() == pytest.approx(HangPolicy().step_factor * 4.0 * 0.98**63, rel=0.02)
