"""The request plane's frames, and the splitter that finds them in a stream of bytes."""

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events import wire
from events.wire import (
    Beat,
    Cancel,
    Chunk,
    Committed,
    Declined,
    Generate,
    Hello,
    Load,
    Logprob,
    ProxiedPiece,
    Reserve,
    Reserved,
    Sampling,
    Ship,
    Splitter,
    Stay,
    Step,
    Welcome,
)

FRAMES = [
    Hello("frontend-0"),
    Generate(7, "req", [1, 2, 3], 2, Sampling(max_tokens=5, stop_token_ids=[2]), guided={"json": {}}),
    Cancel(7),
    Reserve(8, Generate(8, "req", [1, 2, 3, 9], 3, Sampling(max_tokens=4)), room_tokens=40),
    Ship(7, [b"grant"]),
    Stay(7),
]
ANSWERS = [
    Welcome("w3", "i1", "llama"),
    Step([Chunk(7, [9], logprobs=[Logprob(-0.1, [(9, -0.1), (8, -2.0)])]), Chunk(8, [], "stop")]),
    Beat("decode", 12.5, load=Load(running=3), draining=True),
    Reserved(8, [b"grant"], cached_tokens=32),
    Declined(8, "no room"),
    Committed(8, [4, 5], bytes=4096, blocks=2, link="shm", stopped_ms=0.4),
]


@pytest.mark.parametrize("frame", FRAMES)
def test_frames_to_a_worker_survive_the_wire(frame: wire.ToWorker) -> None:
    (body,) = Splitter().feed(wire.encode(frame))
    assert wire.to_worker.decode(body) == frame


class SamplingOf020(msgspec.Struct, array_like=True, frozen=True):
    """The sampling parameters of release 0.2.0."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int = 0


def test_sampling_is_compatible_with_the_previous_release_both_ways() -> None:
    ours = Sampling(5, temperature=0.5, logprobs=3, min_p=0.1, logit_bias={300: -1.5, 7: 100.0})
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(ours), type=SamplingOf020)
    assert there == SamplingOf020(5, temperature=0.5, logprobs=3)
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(there), type=Sampling)
    assert back == Sampling(5, temperature=0.5, logprobs=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ours), type=Sampling) == ours


@pytest.mark.parametrize("frame", ANSWERS)
def test_frames_to_a_frontend_survive_the_wire(frame: wire.ToFrontend) -> None:
    (body,) = Splitter().feed(wire.encode(frame))
    assert wire.to_frontend.decode(body) == frame


@given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(1, 64), min_size=1))
def test_however_the_bytes_are_cut_the_frames_are_the_same(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    splitter, found, at, turn = Splitter(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        found += list(splitter.feed(stream[at : at + size]))
        at, turn = at + size, turn + 1
    assert found == bodies


def test_a_half_frame_waits() -> None:
    splitter = Splitter()
    whole = wire.encode(Cancel(1))
    assert list(splitter.feed(whole[:-1])) == []
    assert list(splitter.feed(whole[-1:] + whole[:3])) == [whole[4:]]
    assert list(splitter.feed(whole[3:])) == [whole[4:]]


def test_a_frame_that_arrives_in_many_reads_is_not_copied_at_each_read() -> None:
    splitter, piece, count = Splitter(), b"x" * 1024, 8 * 1024
    assert list(splitter.feed((len(piece) * count).to_bytes(4, "little"))) == []
    began = time.process_time()
    found = [body for _ in range(count) for body in splitter.feed(piece)]
    assert [len(body) for body in found] == [8 * 1024 * 1024]
    assert time.process_time() - began < 2.0, "4 MB copied 8,000 times take 5 s and more"


def test_an_absurd_length_is_refused_before_it_is_waited_for() -> None:
    with pytest.raises(wire.BadFrame, match="limit"):
        list(Splitter().feed((wire.FRAME_BYTES_MAX + 1).to_bytes(4, "little")))
    good = wire.encode(Cancel(1))
    splitter, found = Splitter(), []
    with pytest.raises(wire.BadFrame):
        for body in splitter.feed(good + b"\xff\xff\xff\xff"):
            found.append(body)  # noqa: PERF402 (one by one: the error comes in the middle)
    assert found == [good[4:]]  # the frame before the bad one is not lost


def test_a_reader_that_stops_in_the_middle_loses_nothing() -> None:
    splitter = Splitter()
    frames = splitter.feed(wire.encode(Cancel(1)) + wire.encode(Cancel(2)))
    assert wire.to_worker.decode(next(frames)) == Cancel(1)
    frames.close()  # type: ignore[attr-defined]
    assert [wire.to_worker.decode(body) for body in splitter.feed(b"")] == [Cancel(2)]


def test_a_later_versions_extra_field_is_tolerated() -> None:
    longer = msgspec.msgpack.encode(["cancel", 7, "gone", "a field of tomorrow"])
    assert wire.to_worker.decode(longer) == Cancel(7)
    older = msgspec.msgpack.encode(["cancel", 7])
    assert wire.to_worker.decode(older) == Cancel(7)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgspec.msgpack.encode(["tomorrow", 1]), msgspec.msgpack.encode([1])]
)
def test_nonsense_is_not_a_frame(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.to_worker.decode(body)


# --- several chunks of a stream as one --------------------------------------------------------------------

PIECES = st.one_of(
    st.builds(lambda tokens: Chunk(1, tokens), st.lists(st.integers(0, 99), max_size=3)),
    st.builds(
        lambda tokens: Chunk(1, tokens, logprobs=[Logprob(-float(token), []) for token in tokens]),
        st.lists(st.integers(0, 99), min_size=1, max_size=3),
    ),
    st.builds(lambda text: Chunk(1, [], text=text), st.text("ab", max_size=2)),
    st.builds(lambda cached: Chunk(1, [5], cached_tokens=cached), st.integers(0, 64)),
    st.builds(lambda finish: Chunk(1, [6], finish), st.sampled_from(["stop", "length"])),
    st.builds(lambda error: Chunk(1, [], error=error), st.sampled_from(["engine_error", "overloaded"])),
)


def said(chunks: list[Chunk]) -> tuple[list[object], int | None]:
    """Return the content of the chunks in order, up to the first end; and the number of cached prompt tokens."""
    out: list[object] = []
    cached = None
    for chunk in chunks:
        for place, token in enumerate(chunk.tokens):
            logprobs = chunk.logprobs or []
            out.append((token, logprobs[place].chosen if place < len(logprobs) else None))
        out += chunk.text or ""
        cached = chunk.cached_tokens if cached is None else cached
        if chunk.finish is not None or chunk.error is not None:
            return [*out, (chunk.finish, chunk.error)], cached
    return out, cached


@given(st.lists(PIECES, max_size=12))
def test_joined_chunks_have_the_content_of_the_separate_ones(chunks: list[Chunk]) -> None:
    apart = said(chunks)
    joined: list[Chunk] = []
    for chunk in chunks:
        if not joined or not wire.join(joined[-1], chunk):
            joined.append(chunk)
    assert said(joined) == apart
    assert all(not chunk.tokens or chunk.text is None for chunk in joined)


def test_chunks_are_joined_where_one_chunk_can_carry_both() -> None:
    chunk = Chunk(1, [300], cached_tokens=16)
    assert wire.join(chunk, Chunk(1, [301])) and wire.join(chunk, Chunk(1, [302], "length"))
    assert chunk == Chunk(1, [300, 301, 302], "length", cached_tokens=16)
    assert not wire.join(chunk, Chunk(1, [303])), "nothing follows a stream's end"
    sure = Chunk(1, [300], logprobs=[Logprob(-1.0, [])])
    assert wire.join(sure, Chunk(1, [301], logprobs=[Logprob(-2.0, [])])) and wire.join(sure, Chunk(1, [302]))
    assert not wire.join(sure, Chunk(1, [303], logprobs=[Logprob(-3.0, [])])), "it would be 302's"


def test_pieces_of_a_proxied_response_are_joined_and_never_with_other_output() -> None:
    first = Chunk(1, [], proxied=ProxiedPiece(b"a", 200, "text/plain"))
    assert wire.join(first, Chunk(1, [], proxied=ProxiedPiece(b"b"))) and wire.join(
        first, Chunk(1, [], "stop")
    )
    assert first == Chunk(1, [], "stop", proxied=ProxiedPiece(b"ab", 200, "text/plain"))
    empty = Chunk(1, [], cached_tokens=0)
    assert wire.join(empty, Chunk(1, [], proxied=ProxiedPiece(b"c", 200)))
    assert empty.proxied == ProxiedPiece(b"c", 200)
    for other in (Chunk(1, [300]), Chunk(1, [], text="x")):
        assert not wire.join(Chunk(1, [], proxied=ProxiedPiece(b"a", 200)), other)
        assert not wire.join(other, Chunk(1, [], proxied=ProxiedPiece(b"a", 200)))


class WelcomeOf020(msgspec.Struct, tag="welcome", array_like=True):
    """The welcome frame of release 0.2.0."""

    worker: str
    instance: str
    model: str
    version: int = wire.VERSION


def test_a_welcome_is_understood_by_peers_of_both_versions() -> None:
    (body,) = Splitter().feed(wire.encode(Welcome("w3", "i1", "llama", alike=True)))
    assert msgspec.msgpack.decode(body, type=WelcomeOf020) == WelcomeOf020("w3", "i1", "llama")
    old = msgspec.msgpack.encode(WelcomeOf020("w3", "i1", "llama"))
    assert wire.to_frontend.decode(old) == Welcome("w3", "i1", "llama", alike=False)
