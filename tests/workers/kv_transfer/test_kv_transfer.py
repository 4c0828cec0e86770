"""Whole transfers: between two processes, damaged in every way, and aborted at any point."""

import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_kit import BIG, BLOCKS, KV, TOKENS, WAYS, Target, by, content, receiving

from workers.kv_transfer.messages import (
    Accepted,
    Ending,
    Grant,
    KvChunk,
    Message,
    Open,
    RegionTaken,
    TransferFailed,
    TransferRefused,
    TransferSocket,
    digest,
    framed,
    packed,
)
from workers.kv_transfer.receiver import PREFIX, ArrivalProgress, Arrived, Receiver, Regions, sweep
from workers.kv_transfer.sender import Mappings, Sender

MAPPINGS = Mappings()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    there = Target(tmp_path_factory.mktemp("shm"))
    yield there
    there.end()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("turn", ["first", "into memory used before"])
def test_another_process_receives_exactly_what_was_sent(target: Target, way: str, turn: str) -> None:
    source = content(4, BIG, seed=len(way + turn))
    grant = target.grant(4)
    sender = Sender(by(way, grant), MAPPINGS)
    sender.open()
    assert sender.shared == (way == "shared")
    sender.send(source[: 1 << 20])  # the engine keeps decoding meanwhile
    sender.send(source[1 << 20 : 3 << 20])
    sender.finish(source[3 << 20 :], TOKENS, 50, b"\x05")
    assert target.ask("arrival", grant.ticket).split() == [sha256(source).hexdigest(), "50", "05"]


def test_a_large_send_is_split_among_threads_and_arrives_complete(target: Target) -> None:
    source = content(12, BIG, seed=12)
    grant = target.grant(12)
    sender = Sender(grant, MAPPINGS)
    sender.open()
    sender.finish(source, list(TOKENS) * 4, 12 * 16)
    assert target.ask("arrival", grant.ticket).startswith(sha256(source).hexdigest())


def test_a_target_that_is_killed_ends_the_transfer_and_its_memory_is_swept(tmp_path: Path) -> None:
    there = Target(tmp_path)
    grant = there.grant(4)
    sender = Sender(grant)
    sender.open()
    sender.send(content(1, BIG))
    assert sweep(tmp_path) == []  # the target is alive
    there.process.send_signal(signal.SIGKILL)
    there.end()
    with pytest.raises(TransferFailed):
        sender.finish(content(3, BIG), TOKENS, 50)
    assert [path.name for path in tmp_path.iterdir()] == [PREFIX + f"target-{there.process.pid}"]
    assert sweep(tmp_path) == [f"target-{there.process.pid}"]
    assert list(tmp_path.iterdir()) == []


def reserved(receiver: Receiver, blocks: int = BLOCKS) -> Grant:
    grant = receiver.reserve(KV, blocks, TOKENS[:10])
    return grant


@pytest.mark.parametrize("way", WAYS)
def test_the_source_receives_the_reason_of_a_refusal(tmp_path: Path, way: str) -> None:
    with receiving(tmp_path) as (receiver, _):
        grant = by(way, reserved(receiver))
        sender = Sender(grant)
        sender.open()
        sender.send(content(BLOCKS))
        with pytest.raises(TransferFailed, match="do not continue"):
            sender.finish(b"", [1, *TOKENS[1:]], 50)
        assert receiver.live == 0
        foreign = msgspec.structs.replace(by(way, reserved(receiver)), description=BIG)
        stranger = Sender(foreign)
        stranger.open()
        with pytest.raises(TransferFailed, match="block_bytes is"):
            stranger.finish(content(BLOCKS), TOKENS, 50)


def test_more_than_was_reserved_is_not_written(tmp_path: Path) -> None:
    with receiving(tmp_path) as (receiver, _):
        sender = Sender(reserved(receiver))
        sender.open()
        with pytest.raises(TransferFailed, match="room for only"):
            sender.send(content(BLOCKS + 1))


class Grown(ArrivalProgress):
    """Records how much has arrived, at each step."""

    def __init__(self, receiver: Receiver, ticket: str) -> None:
        self.sizes: list[int] = []
        self._receiver, self._ticket = receiver, ticket

    def set(self) -> None:
        self.sizes.append(len(self._receiver.received(self._ticket)))


@pytest.mark.parametrize("way", WAYS)
def test_only_the_blocks_that_the_target_lacks_travel(tmp_path: Path, way: str) -> None:
    with receiving(tmp_path) as (receiver, _):
        made = receiver.reserve(KV, 2, TOKENS[:48], first_block=2)
        assert isinstance(made, Grant) and (made.first_block, made.description) == (2, KV)
        grown = Grown(receiver, made.ticket)
        receiver.watch(made.ticket, grown)
        sender = Sender(by(way, made))
        sender.open()
        source = content(BLOCKS)
        sender.send(source[2 * 4096 : 3 * 4096])
        sender.finish(source[3 * 4096 :], TOKENS, 50)
        got = receiver.arrival(made.ticket).result(10)
        assert isinstance(got, Arrived) and got.memory == source[2 * 4096 :]
        assert got.link == {"shared": "shm"}.get(way, way)
        assert grown.sizes == [4096, 8192]
        receiver.release(made.ticket)
        assert receiver.live == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_transfer_frees_what_was_reserved(tmp_path: Path, way: str) -> None:
    with receiving(tmp_path) as (receiver, _):
        grant = by(way, reserved(receiver))
        arrival = receiver.arrival(grant.ticket)
        sender = Sender(grant)
        sender.open()
        sender.send(content(1))
        sender.cancel()
        with pytest.raises(TransferFailed, match="cancelled"):
            sender.send(content(1))
        assert isinstance(arrival.result(10), TransferRefused)
        assert receiver.live == 0


def test_a_target_that_aborts_sends_the_reason_to_a_waiting_source(tmp_path: Path) -> None:
    with receiving(tmp_path) as (receiver, _):
        grant = reserved(receiver)
        sender = Sender(grant)
        sender.open()
        sender.send(content(1))
        until = time.monotonic() + 10
        while len(receiver.received(grant.ticket)) < KV.block_bytes and time.monotonic() < until:
            pass
        assert receiver.received(grant.ticket) == content(1)
        receiver.abort(grant.ticket, "the operator aborted it")
        with pytest.raises(TransferFailed, match="operator aborted it"):
            sender.finish(content(3), TOKENS, 50)
        assert receiver.live == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_silent_source_is_ended_at_the_deadline(tmp_path: Path, way: str) -> None:
    with receiving(tmp_path, lasts=timedelta(seconds=0.3)) as (receiver, _):
        grant = by(way, reserved(receiver))
        arrival = receiver.arrival(grant.ticket)
        sender = Sender(grant)
        sender.open()
        assert "deadline has passed" in str(arrival.result(10))
        with pytest.raises(TransferFailed):
            sender.finish(content(BLOCKS), TOKENS, 50)
        assert receiver.live == 0


def test_memory_of_an_ended_reservation_is_reused_only_if_no_source_can_write_there(tmp_path: Path) -> None:
    with receiving(tmp_path) as (receiver, _):
        first = reserved(receiver)
        slow = Sender(first)
        slow.open()
        slow.send(content(1))
        arrival = receiver.arrival(first.ticket)
        receiver.abort(first.ticket)
        assert isinstance(arrival.result(10), TransferRefused)
        second = reserved(receiver)
        assert second.region != first.region and not Path(first.region).exists()
        sender = Sender(second)
        sender.open()
        sender.finish(content(BLOCKS), TOKENS, 50)
        receiver.release(second.ticket)
        assert reserved(receiver).region == second.region
        slow.close()


def test_without_a_directory_the_bytes_come_over_the_socket(tmp_path: Path) -> None:
    for root in (None, tmp_path / "missing"):
        with receiving(root) as (receiver, regions):
            grant = reserved(receiver)
            assert (grant.region, grant.endpoint.path, regions.folder) == ("", "", None)
            arrival = receiver.arrival(grant.ticket)
            sender = Sender(grant)
            sender.open()
            sender.finish(content(BLOCKS), TOKENS, 50)
            got = arrival.result(10)
            assert isinstance(got, Arrived) and got.memory == content(BLOCKS)


def test_a_region_is_plain_memory_if_the_directory_is_full(tmp_path: Path) -> None:
    regions = Regions("a", tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        region = regions.take(1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (region.path, region.size) == ("", 1 << 20)
    assert regions.folder is not None and list(regions.folder.iterdir()) == []
    regions.close()


def test_a_reservation_beyond_the_machines_memory_is_refused(tmp_path: Path) -> None:
    with receiving(tmp_path, bytes_max=1 << 62) as (receiver, _):
        with pytest.raises(TransferFailed, match="no room"):
            receiver.reserve(KV, 1 << 48)
        assert receiver.live == 0


# Raw streams, damaged

Piece = tuple[Message, bytes]


def good_stream(grant: Grant, source: bytes) -> list[Piece]:
    """Return the messages of a source over a socket: four chunks of 4 KiB."""
    pieces: list[Piece] = [(Open(grant.ticket, KV, False), b"")]
    for n in range(BLOCKS):
        part = source[n * KV.block_bytes : (n + 1) * KV.block_bytes]
        pieces.append(
            (KvChunk(grant.ticket, n, n * KV.block_bytes, len(part), xxhash.xxh3_64_intdigest(part)), part)
        )
    ids = packed(TOKENS)
    return [*pieces, (Ending(grant.ticket, BLOCKS, 50, 50, ids, digest(ids), b"s"), b"")]


def answer_to(grant: Grant, data: bytes) -> Message | None:
    """Send raw bytes and close; return the answer."""
    with socket.create_connection((grant.endpoint.host, grant.endpoint.port), 10) as raw:
        with suppress(OSError):
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
        with suppress(TransferFailed):
            return TransferSocket(raw, time.monotonic() + 10).receive()
        return None


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    with receiving(tmp_path_factory.mktemp("shm")) as (receiver, _):
        yield receiver


def check(receiver: Receiver, grant: Grant, data: bytes, source: bytes, good: bool) -> None:
    arrival = receiver.arrival(grant.ticket)
    answer = answer_to(grant, data)
    if good:
        assert isinstance(answer, Accepted)
        got = arrival.result(10)
        assert isinstance(got, Arrived) and got.memory == source and got.tokens == TOKENS
        receiver.release(grant.ticket)
    else:
        assert not isinstance(answer, Accepted)
        assert answer is None or (isinstance(answer, TransferRefused) and answer.reason)
        receiver.abort(grant.ticket)  # if not even the ticket was readable
        got = arrival.result(10)
        assert isinstance(got, TransferRefused) and got.reason
    assert receiver.live == 0


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_stream_flipped_or_cut_anywhere_is_refused(here: Receiver, data: st.DataObject) -> None:
    grant, source = reserved(here), content(BLOCKS)
    stream = b"".join(framed(message) + payload for message, payload in good_stream(grant, source))
    if data.draw(st.booleans(), "flip"):
        frames = [framed(message) for message, _ in good_stream(grant, source)]
        starts = [sum(len(frame) for frame in frames[:n]) + max(0, n - 1) * KV.block_bytes for n in range(6)]
        near = st.sampled_from(starts).flatmap(lambda at: st.integers(at, min(at + 80, len(stream) - 1)))
        at = data.draw(near | st.integers(0, len(stream) - 1), "at")
        flip = data.draw(st.integers(1, 255), "bits")
        stream = stream[:at] + bytes([stream[at] ^ flip]) + stream[at + 1 :]
    else:
        stream = stream[: data.draw(st.integers(0, len(stream) - 1), "cut")]
    check(here, grant, stream, source, good=False)


@settings(max_examples=60, deadline=None)
@given(order=st.permutations(range(BLOCKS)), repeated=st.lists(st.integers(0, BLOCKS - 1), max_size=4))
def test_reordered_and_repeated_chunks_are_harmless(
    here: Receiver, order: list[int], repeated: list[int]
) -> None:
    grant, source = reserved(here), content(BLOCKS)
    first, *chunks, last = good_stream(grant, source)
    pieces = [first, *(chunks[n] for n in order), *(chunks[n] for n in repeated), last]
    check(here, grant, b"".join(framed(m) + p for m, p in pieces), source, good=True)


SAY = {
    "a chunk too few": lambda g, s: [*s[:2], *s[3:]],
    "another ticket's chunk": lambda g, s: [*s[:2], (changed(s[2], ticket="x"), s[2][1]), *s[3:]],
    "beyond the region": lambda g, s: [*s[:4], (changed(s[4], offset=3 * 4096 + 1), s[4][1]), s[5]],
    "before the region": lambda g, s: [*s[:4], (changed(s[4], offset=-1), s[4][1]), s[5]],
    "over another": lambda g, s: [*s[:2], (changed(s[2], offset=4095), s[2][1]), *s[3:]],
    "exchanged contents": lambda g, s: [s[0], (s[1][0], s[2][1]), (s[2][0], s[1][1]), *s[3:]],
    "the same number for another": lambda g, s: [*s[:2], (changed(s[2], number=0), s[2][1]), *s[3:]],
    "a chunk of gigabytes": lambda g, s: [s[0], (changed(s[1], bytes=1 << 40), s[1][1])],
    "nothing at all in it": lambda g, s: [s[0], (changed(s[1], bytes=0), b"")],
    "no ticket first": lambda g, s: s[1:],
    "a ticket twice": lambda g, s: [s[0], *s],
    "an unknown ticket": lambda g, s: [(changed(s[0], ticket="x"), b""), *s[1:]],
    "an answer": lambda g, s: [s[0], (Accepted(g.ticket), b"")],
}


def changed(piece: Piece, **fields: object) -> Message:
    return msgspec.structs.replace(piece[0], **fields)


@pytest.mark.parametrize("what", SAY)
def test_an_invalid_stream_is_refused(here: Receiver, what: str) -> None:
    grant, source = reserved(here), content(BLOCKS)
    pieces = SAY[what](grant, good_stream(grant, source))  # type: ignore[no-untyped-call]
    check(here, grant, b"".join(framed(m) + p for m, p in pieces), source, good=False)


@pytest.mark.parametrize(
    "junk", [b"", b"\x00" * 12, b"GET / HTTP/1.1\r\n\r\n" * 9, struct.pack("<IQ", 1 << 31, 0)]
)
def test_junk_is_refused(here: Receiver, junk: bytes) -> None:
    grant = reserved(here)
    check(here, grant, junk, b"", good=False)


def test_bytes_overwritten_in_shared_memory_before_their_notice_are_refused(here: Receiver) -> None:
    grant, source = reserved(here), content(BLOCKS)
    memory = MAPPINGS.get(grant.region, grant.bytes)
    assert memory is not None
    pieces = good_stream(grant, source)
    memory[: len(source)] = list(source)
    memory[5000] ^= 1
    opening = Open(grant.ticket, KV, True)
    answer = answer_to(grant, b"".join(framed(m) for m, _ in [(opening, b""), *pieces[1:]]))
    assert answer == TransferRefused("chunk 1 is damaged: its checksum differs")
    assert here.live == 0


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    acts=st.lists(
        st.tuples(
            st.sampled_from(WAYS),
            st.integers(0, 4),
            st.sampled_from(["finish", "cancel", "vanish", "abort", "wrong tokens", "never come"]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_nothing_is_left_however_transfers_end(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, int, str]]
) -> None:
    root = tmp_path_factory.mktemp("shm")
    source = content(BLOCKS)
    with receiving(root) as (receiver, regions):
        threads = [threading.Thread(target=act, args=(receiver, source, *one)) for one in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert receiver.live == 0
        kept = sum(1 for path in root.glob("*/[0-9]*"))
        assert kept == len(regions.spares)
    assert list(root.iterdir()) == []


def act(receiver: Receiver, source: bytes, way: str, before: int, end: str) -> None:
    grant = reserved(receiver)
    arrival = receiver.arrival(grant.ticket)
    sender = Sender(by(way, grant), MAPPINGS)
    cut = before * KV.block_bytes
    with suppress(TransferFailed):
        if end != "never come":
            sender.open()
            sender.send(source[:cut])
        match end:
            case "finish":
                sender.finish(source[cut:], TOKENS, 50)
                got = arrival.result(10)
                assert isinstance(got, Arrived) and got.memory == source
                receiver.release(grant.ticket)
            case "wrong tokens":
                sender.finish(source[cut:], TOKENS[1:], 49)
            case "cancel":
                sender.cancel()
            case "vanish":
                sender.close()
            case _:
                receiver.abort(grant.ticket)
    arrival.result(10)
    sender.close()


def test_an_instance_has_one_live_owner(tmp_path: Path) -> None:
    first = Regions("a", tmp_path)
    with pytest.raises(RegionTaken):
        Regions("a", tmp_path)
    other = Regions("b", tmp_path)
    region = other.take(4096)
    assert region.path and sweep(tmp_path) == []
    first.close()
    Regions("a", tmp_path).close()
    other.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="name"):
        Regions("../a", tmp_path)


def test_regions_may_be_closed_by_two_threads_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions, closed = Regions("a", tmp_path), list[int]()
    monkeypatch.setattr("workers.kv_transfer.receiver.os.close", closed.append)
    monkeypatch.setattr("workers.kv_transfer.receiver.shutil.rmtree", lambda *_, **__: regions.close())
    regions.close()  # now the other thread is at the same point
    assert len(closed) == 1
    monkeypatch.undo()
    os.close(*closed)
