"""KV caches damaged on their way between two real workers: the client of the frontend notices nothing.

The reason for a refused transfer is reported in `request_migrated`, and the stream is recomputed. Chunks that arrive twice or
in another order are not damage.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import pytest
from frontend_kit import Kit, frontend, text_of
from json_types import Json
from real_worker import RealWorker
from waits import until

from events.observations import MoveRequested, RequestAbandoned, RequestMigrated
from events.wire import Ship
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.kv_transfer.messages import (
    Accepted,
    Ending,
    Grant,
    KvChunk,
    Message,
    Open,
    TransferAddress,
    TransferRefused,
    framed,
)

SHAPE = EngineShape(context_tokens=4096, kv_blocks=2048)
COUNT = 300
LENGTH = 500  # tokens of a prompt: 128 KB of KV cache
LIMIT_MS = 1500.0

Piece = tuple[Message, bytes]  # a message, and the bytes that follow it
# applied to everything that a source sends, up to and including its final message
Damage = Callable[[list[Piece]], list[Piece]]
decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Open | KvChunk | Ending | Accepted | TransferRefused
)


def changed(**fields: object) -> Callable[[Piece], Piece]:
    return lambda piece: (msgspec.structs.replace(piece[0], **fields), piece[1])


def described(**fields: object) -> Callable[[Piece], Piece]:
    def change(piece: Piece) -> Piece:
        assert isinstance(piece[0], Open)
        return changed(description=msgspec.structs.replace(piece[0].description, **fields))(piece)

    return change


def at(place: int, change: Callable[[Piece], Piece]) -> Damage:
    return lambda pieces: [change(one) if n == place % len(pieces) else one for n, one in enumerate(pieces)]


def flipped(piece: Piece) -> Piece:
    return piece[0], bytes([piece[1][0] ^ 1]) + piece[1][1:]


def other_tokens(piece: Piece) -> Piece:
    assert isinstance(piece[0], Ending)
    return changed(tokens=b"\x05\0\0\0" + piece[0].tokens[4:])(piece)


REFUSED: dict[str, tuple[Damage, str]] = {
    "a snapshot of another model": (at(0, described(model="other")), "model is 'other' there"),
    "a snapshot of another dtype": (at(0, described(dtype="float16")), "dtype is 'float16' there"),
    "a snapshot of another block size": (at(0, described(block_size=32)), "block_size is 32 there"),
    "another ticket": (at(0, changed(ticket="x")), "reservation does not exist"),
    "a later version": (at(0, changed(version=9)), "version 9"),
    "a chunk too few": (lambda pieces: [pieces[0], *pieces[2:]], "not all arrived"),
    "a flipped byte": (at(1, flipped), "checksum differs"),
    "a chunk over another": (at(2, changed(offset=1)), "overlaps another"),
    "other tokens": (at(-1, other_tokens), "not those of their count and digest"),
    "a state of nothing": (at(-1, changed(state=b"\xc1")), "cannot decode the state"),
}  # fmt: skip
HARMLESS: dict[str, Damage] = {
    "nothing": list,
    "repeated": lambda pieces: [*pieces[:-1], *pieces[1:-1], pieces[-1]],
    "reordered": lambda pieces: [pieces[0], *pieces[-2:0:-1], pieces[-1]],
}


@dataclass
class DamagingProxy:
    """A proxy between the two workers. It receives a whole transfer and forwards the damaged one."""

    damage: Damage = list
    flip: int | None = None  # this byte of the whole transfer, modulo its length
    cut: int | None = None  # at this byte
    described: Json = field(default_factory=dict)  # changes to the target's grant
    port: int = 0
    to: TransferAddress = field(default_factory=lambda: TransferAddress("", 0))
    _server: asyncio.Server | None = None
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> "DamagingProxy":
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close both sides, also if the damage made neither side end the transfer."""
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def grants(self, frame: Ship) -> Ship:
        """Redirect a source to this proxy."""
        made = []
        for one in frame.grants:
            grant = msgspec.msgpack.decode(one, type=Grant)
            self.to = grant.endpoint
            made.append(
                msgspec.structs.replace(
                    grant,
                    endpoint=TransferAddress("127.0.0.1", self.port),
                    region="",
                    description=msgspec.structs.replace(grant.description, **self.described),
                )
            )
        return msgspec.structs.replace(frame, grants=[msgspec.msgpack.encode(one) for one in made])

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError, asyncio.IncompleteReadError):
            there, back = await asyncio.open_connection(self.to.host, self.to.port)
            with closing(back):
                pieces = await _pieces(reader)
                back.write(self._said(self.damage(pieces)))
                if self.cut is not None:
                    back.write_eof()
                await back.drain()
                writer.write(await there.read())
                await writer.drain()

    def _said(self, pieces: list[Piece]) -> bytes:
        said = bytearray().join(framed(message) + payload for message, payload in pieces)
        if self.flip is not None:
            said[self.flip % len(said)] ^= 1
        return bytes(said if self.cut is None else said[: self.cut % len(said)])


async def _pieces(reader: asyncio.StreamReader) -> list[Piece]:
    """Read up to and including the final message."""
    pieces: list[Piece] = []
    while not pieces or not isinstance(pieces[-1][0], Ending):
        length, _ = struct.unpack("<IQ", await reader.readexactly(12))
        message = decoder.decode(await reader.readexactly(length))
        payload = await reader.readexactly(message.bytes) if isinstance(message, KvChunk) else b""
        pieces.append((message, payload))
    return pieces


@dataclass
class World:
    """A frontend with two workers, and the proxy between these."""

    kit: Kit
    source: RealWorker
    target: RealWorker
    between: DamagingProxy
    asked: int = 0

    async def moved(self) -> RequestMigrated:
        """Move an answer, check that it equals the undisturbed one, and return the fact of its move."""
        self.asked += 1
        dice, before = Random(self.asked), len(self.kit.said(RequestMigrated))
        prompt = [dice.randint(300, 1500) for _ in range(LENGTH)]
        ask: Json = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": COUNT,
            "temperature": 0.8,
            "seed": 7,
            "ignore_eos": True,
        }
        endpoint = self.kit.director.table.endpoints[("w1", self.source.instance)]
        asking = asyncio.ensure_future(self.kit.stream(**ask))
        await until(
            lambda: any(
                len(generation.accepted) > 20 for generation in self.kit.director.running.at(endpoint)
            )
        )
        self.kit.tell(MoveRequested(worker="w1", instance=self.source.instance, to="w2", by="test"))
        text = text_of(await asking)
        fact: RequestMigrated = self.kit.said(RequestMigrated)[before]
        assert len(self.kit.said(RequestMigrated)) == before + 1
        assert fact.exact and self.kit.said(RequestAbandoned) == []
        await until(lambda: self.source.empty and self.target.empty)
        assert text == text_of(await self.kit.stream(**ask))
        return fact


@asynccontextmanager
async def world(**between: Any) -> AsyncIterator[World]:
    engines = [SimulatedEngine(SHAPE, ConstantTiming(itl_s=0.002)) for _ in range(2)]
    source, target = (RealWorker(name, one) for name, one in zip(("w1", "w2"), engines, strict=True))
    moving = {"setup_s": 0.0, "max_migration_time_ms": LIMIT_MS}
    async with DamagingProxy(**between) as line, frontend(moving=moving) as kit:
        for worker in (source, target):
            await worker.start()
            await kit.add(worker, **worker.facts)  # type: ignore[arg-type]
        kit.director.table.endpoints[("w2", target.instance)].begin(requests=8)
        moves = source.server
        ship = moves.ship
        moves.ship = lambda connection, frame: ship(connection, line.grants(frame))  # type: ignore[method-assign]
        yield World(kit, source, target, line)


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
async def test_a_damaged_transfer_is_refused_with_its_reason_and_recomputed(what: str) -> None:
    damage, why = REFUSED[what]
    async with world(damage=damage) as one:
        fact = await one.moved()
        assert (fact.method, fact.bytes) == ("reprefill", 0)
        assert why in fact.refused


@pytest.mark.slow
@pytest.mark.parametrize("what", HARMLESS)
async def test_chunks_that_arrive_twice_or_in_another_order_are_accepted(what: str) -> None:
    async with world(damage=HARMLESS[what]) as one:
        fact = await one.moved()
        assert (fact.method, fact.link, fact.refused) == ("transfer", "tcp", "")


@pytest.mark.slow
@pytest.mark.parametrize("field", ["model", "revision", "dtype"])
async def test_nothing_is_sent_to_a_target_of_another_model(field: str) -> None:
    async with world(described={field: "other"}) as one:
        fact = await one.moved()
        assert (fact.method, fact.bytes) == ("reprefill", 0)
        assert f"another model: {field} is 'other' there" in fact.refused


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flip", "cut"])
async def test_a_transfer_flipped_or_cut_at_any_byte_is_recomputed(how: str) -> None:
    chance = Random(how)
    async with world() as one:
        for _ in range(5):
            setattr(one.between, how, chance.choice((chance.randrange(200), chance.randrange(1 << 17))))
            fact = await one.moved()
            assert (fact.method, fact.bytes) == ("reprefill", 0)
            assert fact.refused
