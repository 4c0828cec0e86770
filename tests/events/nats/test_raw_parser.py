"""The fast path of the parser passes on exactly what nats-py's own does, however the data is split."""

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from events.nats.overrides import RawParser

RAW, OTHER = 7, 8


class Client:
    """The interface that a parser calls."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: Any) -> None:
        self.heard.append((sid, subject, reply, data, headers))

    async def _process_ping(self) -> None:
        self.heard.append("ping")

    async def _process_pong(self) -> None:
        self.heard.append("pong")

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.heard.append(info)

    async def _process_err(self, error: str) -> None:
        self.heard.append(error)

    def take(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.heard.append((RAW, subject, reply, data, headers))


def message(sid: int, reply: bytes, headers: bytes, body: bytes) -> bytes:
    sizes = b"%d %d" % (len(headers), len(headers) + len(body))
    return b"HMSG a.b %d %s%s\r\n%s%s\r\n" % (sid, reply and reply + b" ", sizes, headers, body)


headers = st.sampled_from([b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\nce-id: x\r\nk: \r\n\r\n"])
bodies = st.one_of(st.binary(max_size=40), st.just(b"HMSG a 7 0 0\r\n\r\n"))
said = st.one_of(
    st.builds(
        message, st.sampled_from([RAW, RAW, OTHER]), st.sampled_from([b"", b"$JS.ACK.1"]), headers, bodies
    ),
    st.builds(lambda body: b"MSG a.b 7 %d\r\n%s\r\n" % (len(body), body), bodies),
    st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b'INFO {"a":1}\r\n', b"-ERR 'Unknown'\r\n"]),
)


async def heard(parser: Parser, client: Client, pieces: list[bytes]) -> list[Any]:
    for piece in pieces:
        await parser.parse(piece)
    return client.heard


@given(st.lists(said, max_size=8), st.lists(st.integers(0, 400), max_size=6))
def test_it_passes_on_the_same_messages_as_nats_py(all_said: list[bytes], cuts: list[int]) -> None:
    wire = b"".join(all_said)
    places = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    pieces = [wire[a:b] for a, b in itertools.pairwise(places)]
    ours, theirs = Client(), Client()
    got = asyncio.run(heard(RawParser(ours, {RAW: ours.take}), ours, pieces))
    assert got == asyncio.run(heard(Parser(theirs), theirs, pieces))


async def test_data_that_is_not_the_protocol_is_refused() -> None:
    client = Client()
    with pytest.raises(ProtocolError):
        await RawParser(client, {RAW: client.take}).parse(b"HMSG a.b 7 nonsense 3\r\nabc\r\n")


async def test_a_handler_that_fails_does_not_end_the_reading() -> None:
    client = Client()

    def fail(*_: Any) -> None:
        raise ValueError("a mistake of ours")

    await RawParser(client, {RAW: fail}).parse(message(RAW, b"", b"NATS/1.0\r\n\r\n", b"x") + b"PING\r\n")
    assert client.heard == ["ping"]
