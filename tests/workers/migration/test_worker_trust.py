"""A worker that may compute wrong results can ship no KV cache."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from faults import SOURCE_POINTS, Watched
from move_kit import Cancel, Committed, Declined, road

from events.wire import Chunk
from workers.kv_transfer.messages import Grant
from workers.migration.trust import SenderDistrusted, Trust, TrustedSender


async def test_an_untrusted_worker_cannot_make_a_shipment(tmp_path: Path) -> None:
    async with road(tmp_path) as way:
        move = await way.begin()
        await way.reserve(move)
        grant = msgspec.msgpack.decode(move.grants[0], type=Grant)
        trust = Trust()
        before = TrustedSender(trust)
        shipment = await before.shipment(grant)
        trust.lose("device", "Xid 48")
        with pytest.raises(SenderDistrusted, match="Xid 48"):
            TrustedSender(trust)
        with pytest.raises(SenderDistrusted, match="Xid 48"):
            await before.shipment(grant)
        with pytest.raises(SenderDistrusted):
            trust.shipment(grant)
        with pytest.raises(Exception, match=r"cancelled|not open"):
            await shipment.open()
        trust.regain("device")
        with pytest.raises(SenderDistrusted, match="meanwhile"):
            await before.shipment(grant)
        TrustedSender(trust).check()
        shipment.close()
        trust.close()


async def test_each_doubt_counts_until_it_is_cleared() -> None:
    trust = Trust()
    assert trust.lose("corrupt", "a canary")
    assert not trust.lose("corrupt", "another canary")
    assert trust.lose("device", "Xid 48")
    trust.regain("corrupt")
    assert trust.reason == "Xid 48"
    trust.regain("an unknown cause")
    trust.regain("device")
    assert trust.reason == ""


async def test_a_convicted_worker_ships_nothing(tmp_path: Path) -> None:
    async with road(tmp_path, Watched, Watched) as way:
        move = await way.begin()
        await way.reserve(move)
        way.source.server.output.distrust("corrupt", "a canary has convicted this worker")
        way.ship(move)
        assert "convicted" in (await way.source.wait_for(Declined, move.stream)).reason
        way.target.frontend.say(Cancel(move.there))
        await way.stays(move)
        await way.is_empty()
        assert way.source.server.counters.moves == {("out", "declined"): 1}


@pytest.mark.parametrize("begun", ["before the doubt", "under the doubt", "after it"])
async def test_results_computed_under_a_doubt_are_not_shipped_after_it_is_cleared(
    tmp_path: Path, begun: str
) -> None:
    async with road(tmp_path) as way:
        trust = way.source.server.moves.trust
        move = await way.begin()
        trust.lose("corrupt", "a canary has convicted this worker")
        if begun == "under the doubt":
            move = await way.begin(salt=3)
        trust.regain("corrupt")
        if begun == "after it":
            move = await way.begin(salt=3)
        await way.reserve(move)
        way.ship(move)
        if begun == "after it":
            await way.target.wait_for(Committed, move.there)
        else:
            assert "while it computed" in (await way.source.wait_for(Declined, move.stream)).reason


@pytest.mark.parametrize("point", SOURCE_POINTS)
async def test_a_conviction_aborts_running_shipments(tmp_path: Path, point: str) -> None:
    async with road(tmp_path, Watched, Watched) as way:
        move = await way.begin()
        happened = asyncio.Event()

        async def convict() -> None:
            way.source.server.output.distrust("corrupt", "a canary has convicted this worker")
            happened.set()

        way.source.engine.at[point] = convict
        await way.reserve(move)
        way.ship(move)
        assert "convicted" in (await way.source.wait_for(Declined, move.stream)).reason
        await way.target.wait_for(Declined, move.there)
        assert happened.is_set() and way.target.frame_of(Committed, move.there) is None
        await way.stays(move)
        await way.is_empty()


async def test_nan_in_the_logits_is_a_doubt(tmp_path: Path) -> None:
    async with road(tmp_path) as way:
        move = await way.begin()
        await way.reserve(move)
        broken = await way.begin(salt=3)
        key = max(way.source.server.streams.by_key)
        way.source.server.deliver([(key, Chunk(broken.stream, [], error="non_finite: layer 3"))])
        way.ship(move)
        assert "non_finite" in (await way.source.wait_for(Declined, move.stream)).reason
