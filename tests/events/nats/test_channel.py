"""A channel delivers all bytes in order, or it breaks, whatever happens to its messages."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from two_sides import RecordingProtocol, Sides
from waits import turns

from events.nats.channel import (
    BUFFER_BYTES,
    CLOSE,
    DATA,
    HEAD,
    OPEN,
    SILENT_S_MAX,
    WINDOW_BYTES,
    Channel,
    NoResponders,
)

Play = Callable[[Sides], None]


def play(act: Play, **sides: Any) -> Sides:
    """Run an action on two sides, on a new loop."""

    async def run() -> Sides:
        made = Sides(**sides)
        act(made)
        await turns()  # connection_lost is called a turn later
        return made

    return asyncio.run(run())


pieces = st.lists(st.tuples(st.integers(0, 1), st.binary(min_size=1, max_size=50)), min_size=1, max_size=12)
fates = st.lists(st.sampled_from(["carry", "carry", "lose", "twice", "swap"]), max_size=30)


@given(pieces, fates)
def test_whatever_happens_to_messages_each_side_receives_a_prefix_of_the_stream(
    said: list[tuple[int, bytes]], fates: list[str]
) -> None:
    harmed = False

    def act(sides: Sides) -> None:
        nonlocal harmed
        fate = iter(fates)
        for side, piece in said:
            sides.channels[side].write(piece)
            sides.flush()
            for n, wire in enumerate(sides.wires):
                posted, wire.posted = wire.posted, []
                for message in posted:
                    match next(fate, "carry"):
                        case "lose":
                            harmed = True
                        case "twice" if message[1]:
                            harmed = True
                            sides.deliver(n, message)
                            sides.deliver(n, message)
                        case "swap" if message[1]:
                            wire.posted.append(message)
                        case _:
                            sides.deliver(n, message)
        for _ in range(3):  # a loss at the very end is noticed at the next sign of life
            sides.carry()
            sides.tick(2.0)

    sides = play(act, payload_max=20)
    for n in (0, 1):
        whole = b"".join(piece for side, piece in said if side == 1 - n)
        assert whole.startswith(bytes(sides.protocols[n].heard))
        if not any(ear.lost for ear in sides.protocols):
            assert bytes(sides.protocols[n].heard) == whole
    if not harmed and "swap" not in fates:
        assert not any(ear.lost for ear in sides.protocols)


def test_a_lost_last_message_breaks_the_channel_on_both_sides() -> None:
    def act(sides: Sides) -> None:
        sides.channels[0].write(b"last words")
        sides.flush()
        sides.wires[0].posted.clear()
        sides.tick(0.1)
        sides.carry()

    sides = play(act)
    assert [type(ear.lost[0]) for ear in sides.protocols] == [ConnectionResetError, ConnectionResetError]
    assert "10 bytes are missing at 0" in str(sides.protocols[0].lost[0])


def test_at_most_a_window_is_in_flight_and_the_writer_is_asked_to_pause() -> None:
    async def run() -> None:
        sides = Sides(payload_max=1000)
        writer, reader = sides.channels
        reader.pause_reading()
        writer.write(b"x" * (WINDOW_BYTES + BUFFER_BYTES + 1))
        assert sides.protocols[0].paused
        sides.carry()
        assert (writer.get_write_buffer_size(), len(sides.protocols[1].heard)) == (BUFFER_BYTES + 1, 0)
        reader.resume_reading()
        sides.carry()
        assert (writer.get_write_buffer_size(), sides.protocols[0].paused) == (0, False)
        assert len(sides.protocols[1].heard) == WINDOW_BYTES + BUFFER_BYTES + 1

    asyncio.run(run())


def test_a_peer_that_sends_more_than_the_window_is_disconnected() -> None:
    def act(sides: Sides) -> None:
        sides.channels[1].pause_reading()
        for n in range(9):
            place = n * WINDOW_BYTES // 4
            sides.deliver(0, (HEAD.pack(DATA, place, 0), bytes(WINDOW_BYTES // 4)))

    assert "the peer sent more than the window allows" in str(play(act).protocols[1].lost[0])


@pytest.mark.parametrize(
    "message", [(OPEN, 0, 0), (DATA, 5, 0), (DATA, 0, 1), (CLOSE, 1, 0)], ids=["open", "gap", "read", "close"]
)
def test_an_invalid_message_breaks_the_channel(message: tuple[int, int, int]) -> None:
    sides = play(lambda sides: sides.deliver(0, (HEAD.pack(*message), b"")))
    assert isinstance(sides.protocols[1].lost[0], ConnectionResetError)


def test_what_was_written_before_close_arrives_before_the_end() -> None:
    def act(sides: Sides) -> None:
        sides.channels[0].write(b"x" * (2 * WINDOW_BYTES))
        sides.channels[0].close()
        sides.channels[0].write(b"too late")
        sides.carry()

    sides = play(act)
    assert (len(sides.protocols[1].heard), sides.protocols[1].eof) == (2 * WINDOW_BYTES, True)
    assert [ear.lost for ear in sides.protocols] == [[None], [None]]


def test_a_paused_reader_receives_all_data_of_a_closed_channel_later() -> None:
    def act(sides: Sides) -> None:
        sides.channels[1].pause_reading()
        sides.channels[0].write(b"farewell")
        sides.channels[0].close()
        sides.carry()
        assert sides.protocols[1].heard == b""
        sides.channels[1].resume_reading()

    sides = play(act)
    assert (bytes(sides.protocols[1].heard), sides.protocols[1].lost) == (b"farewell", [None])


def test_a_side_that_closed_or_broke_a_channel_receives_nothing_more() -> None:
    for end in ("close", "abort"):

        def act(sides: Sides, end: str = end) -> None:
            sides.channels[0].write(b"x")
            sides.wires[0].awake.clear()
            sides.channels[0].turn()
            sides.deliver(0, sides.wires[0].posted.pop())
            getattr(sides.channels[1], end)()
            sides.carry()

        sides = play(act)
        assert (bytes(sides.protocols[1].heard), sides.protocols[1].lost, len(sides.protocols[0].lost)) == (
            b"",
            [None],
            1,
        )


def test_data_sent_before_the_peer_broke_the_channel_is_still_received() -> None:
    def act(sides: Sides) -> None:
        sides.channels[0].write(b"last words")
        sides.channels[0].turn()
        sides.channels[0].abort()
        for message in sides.wires[0].posted:
            sides.deliver(0, message)

    assert play(act).protocols[1].heard == b"last words"


def test_an_aborted_channel_is_closed_at_once_on_both_sides() -> None:
    def act(sides: Sides) -> None:
        sides.channels[0].write(b"x" * (2 * WINDOW_BYTES))
        sides.channels[0].abort()
        sides.channels[0].abort()
        sides.carry()

    sides = play(act)
    assert sides.protocols[0].lost == [None]
    assert isinstance(sides.protocols[1].lost[0], ConnectionResetError)


def test_a_channel_in_use_sends_signs_of_life_more_often_than_an_idle_one() -> None:
    async def run() -> None:
        sides = Sides()
        writer = sides.channels[0]
        writer.write(b"x")
        sides.carry()
        counts = []
        for seconds in (0.06, 0.12, 0.31, 0.5, 1.4):
            sides.tick(seconds)
            counts.append(len(sides.wires[0].posted))
        assert counts[0] == 1
        assert counts[-1] > counts[0]

    asyncio.run(run())


def test_silence_breaks_a_channel_unless_this_process_was_blocked() -> None:
    long = SILENT_S_MAX + 1
    assert play(lambda sides: sides.tick(long, long)).protocols[0].lost == []
    assert "nothing was received for 10 s" in str(play(lambda sides: sides.tick(long)).protocols[0].lost[0])


def test_a_protocol_that_fails_breaks_its_channel_and_reports_why() -> None:
    class Failing(RecordingProtocol):
        def data_received(self, data: bytes) -> None:
            raise ValueError("a mistake of ours")

    async def run() -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        sides = Sides()
        sides.channels[1].set_protocol(failing := Failing())
        sides.channels[0].write(b"x")
        sides.carry()
        await turns()
        assert [type(context["exception"]) for context in told] == [ValueError]
        assert (failing.lost, len(sides.protocols[0].lost)) == ([None], 1)

    asyncio.run(run())


def test_a_protocol_that_fails_when_it_may_write_again_breaks_its_channel_only() -> None:
    class Failing(RecordingProtocol):
        def resume_writing(self) -> None:
            raise ValueError("a mistake of ours")

    async def run() -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        sides = Sides()
        sides.channels[0].set_protocol(failing := Failing())
        sides.channels[1].pause_reading()
        sides.channels[0].write(b"x" * (2 * WINDOW_BYTES))
        sides.channels[1].resume_reading()
        sides.carry()
        await turns()
        assert [type(context["exception"]) for context in told] == [ValueError]
        assert (failing.lost, len(sides.protocols[1].lost)) == ([None], 1)

    asyncio.run(run())


def test_dialling_a_subject_without_a_subscriber_fails() -> None:
    async def run() -> None:
        sides = Sides()
        dialling = Channel(sides.wires[0], "own", "other", RecordingProtocol)
        dialling.end(NoResponders("no responders"))
        with pytest.raises(NoResponders):
            dialling.answered.result()

    asyncio.run(run())


def test_it_is_a_transport_like_any_other() -> None:
    async def run() -> None:
        channel, _ = Sides().channels
        assert (channel.get_write_buffer_limits(), channel.is_reading()) == (
            (BUFFER_BYTES // 4, BUFFER_BYTES),
            True,
        )
        channel.set_write_buffer_limits(high=100)
        assert channel.get_write_buffer_limits() == (25, 100)
        assert isinstance(channel.get_protocol(), RecordingProtocol)
        assert channel.get_extra_info("socket") is None
        channel.close()
        assert (channel.is_closing(), channel.is_reading()) == (True, False)

    asyncio.run(run())
