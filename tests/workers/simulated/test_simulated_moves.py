"""Requests of the simulated engine that move with their KV cache: the contract, and altered bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from engine_contract import Rig, asked, prompt
from engine_moves import COUNT, EngineMoves, Made, Pair
from engine_walk import walk
from simulated_kit import Listener
from waits import turns, until

from events.kv import Tier
from workers.engines.engine import MoveEnded, MoveRefused
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import BadShape, EngineShape
from workers.engines.simulated.timing import ConstantTiming

SMALL = EngineShape(context_tokens=2048, kv_blocks=512)


@asynccontextmanager
async def both(shape: EngineShape, timing: ConstantTiming | None = None) -> AsyncIterator[Pair]:
    """Two engines of this shape."""
    rigs = [Rig(SimulatedEngine(shape, timing)) for _ in range(2)]
    for rig in rigs:
        await rig.start()
    yield Pair(*rigs)
    for rig in rigs:
        await rig.engine.stop()


class TestFlatOut(EngineMoves):
    """Flat out, as benchmarks run it."""

    @pytest.fixture
    def made(self) -> Made:
        return lambda: SimulatedEngine(SMALL)


class TestWithTiming(EngineMoves):
    """With steps that take time."""

    @pytest.fixture
    def made(self) -> Made:
        return lambda: SimulatedEngine(SMALL, ConstantTiming(itl_s=0.0005, prefill_tokens_per_s=1_000_000))


class TestManyRanks(EngineMoves):
    """Four ranks, an odd block size, and a link with its own speed."""

    @pytest.fixture
    def made(self) -> Made:
        shape = EngineShape(
            context_tokens=1024, kv_blocks=256, block_tokens=12, kv_block_bytes=1001, tp=4, kv_token_s=1e-6
        )
        return lambda: SimulatedEngine(shape)


async def test_a_moving_request_gets_one_token_per_turn_of_the_loop() -> None:
    rig = Rig(SimulatedEngine(SMALL, turn_tokens=64))
    await rig.start()
    key = rig.submit(prompt(), max_tokens=1900)
    answer = rig.answers[key]

    async def turn() -> int:
        before = len(answer.tokens)
        await turns()
        return len(answer.tokens) - before

    await turn()
    assert await turn() > 10
    export = rig.engine.export(key)
    assert export is not None
    assert [await turn() for _ in range(20)] == [1] * 20
    export.close()
    assert await turn() > 10
    other = rig.key()
    arrival = rig.engine.reserve(other, asked(0, prompt(salt=1), max_tokens=20), 100)
    assert not isinstance(arrival, str)
    assert [await turn() for _ in range(20)] == [1] * 20
    rig.engine.cancel(other)
    assert await turn() > 10
    await rig.engine.stop()


async def test_a_transfer_takes_the_time_of_its_link_unless_aborted() -> None:
    async with both(EngineShape(context_tokens=512, kv_blocks=128, kv_token_s=0.001)) as pair:
        tokens, loop = prompt(40), asyncio.get_running_loop()
        _, export, _ = await pair.stopped_at(3, tokens, max_tokens=200)
        other, coming = pair.reserve(asked(0, tokens, max_tokens=200), 60)
        began = loop.time()
        await coming.take(0, 0, await export.blocks(0, 0, 2))
        assert loop.time() - began > 0.03
        taking = asyncio.create_task(coming.take(0, 2, await export.blocks(0, 2, 1)))
        await turns()
        pair.target.engine.cancel(other)
        with pytest.raises(MoveRefused):
            await taking


@pytest.mark.parametrize(
    "change", ["flipped", "swapped", "of another rank", "of another request", "beyond the end"]
)
async def test_any_wrong_byte_is_detected(change: str) -> None:
    made = EngineShape(context_tokens=512, kv_blocks=128, tp=2)
    async with both(made) as pair:
        tokens = prompt(40)
        _, export, stopped = await pair.stopped_at(3, tokens, max_tokens=200)
        _, other = await pair.leaving(prompt(40, 1), max_tokens=400)
        for place in range(0, 3 * 4096, 997):
            data = [bytearray(await export.blocks(shard, 0, 3)) for shard in range(2)]
            match change:
                case "flipped":
                    data[1][place] ^= 1
                case "swapped":
                    data[1][:4096], data[1][4096:8192] = data[1][4096:8192], data[1][:4096]
                case "of another rank":
                    data[1] = data[0]
                case "of another request":
                    data[0][:4096] = await other.blocks(0, 0, 1)
                case "beyond the end":
                    data[0][-1 - place % 1000] = 1
            _, coming = pair.reserve(asked(0, tokens, max_tokens=200), 60)
            for shard in range(2):
                await coming.take(shard, 0, data[shard])
            with pytest.raises(MoveRefused, match="has wrong content"):
                await coming.commit(stopped.tokens, stopped.computed)
            assert pair.target.engine.load().kv_used == 0


async def test_a_corrupt_engines_tokens_are_exported_unchanged() -> None:
    async with both(SMALL) as pair:
        pair.source.engine.chaos("corrupt", 3)
        key, export, stopped = await pair.stopped_at(20, prompt(), max_tokens=200)
        assert list(stopped.tokens[40:]) == pair.source.answers[key].tokens
        _, coming = pair.reserve(asked(0, prompt(), max_tokens=200), 90)
        await pair.carry(export, stopped, coming)


async def test_blocks_cached_at_the_target_are_not_sent_and_stay() -> None:
    async with both(EngineShape(context_tokens=256, kv_blocks=20)) as pair:
        tokens = prompt(96)
        await pair.target.ask(tokens)
        _, export, stopped = await pair.stopped_at(4, tokens, max_tokens=60)
        other, coming = pair.reserve(asked(0, tokens, max_tokens=60), 120)
        assert (
            coming.cached_tokens == 80
        )  # the last prompt token is computed, so its block is not taken from there
        for salt in range(1, 5):  # they need the room of the cached blocks
            await pair.target.ask(prompt(150, salt), max_tokens=20)
        await pair.carry(export, stopped, coming)
        assert len((await pair.target.answer(other)).tokens) == 56


async def test_a_stop_cancelled_while_it_completes_is_undone() -> None:
    async with both(SMALL, ConstantTiming(itl_s=0.005)) as pair:
        whole = await pair.whole(prompt(), max_tokens=COUNT)
        key, export = await pair.leaving(prompt(), max_tokens=COUNT)
        rank = pair.source.engine.each[0]  # type: ignore[attr-defined]
        await until(lambda: rank.stepping)
        stopping, soon = asyncio.ensure_future(export.stop()), asyncio.get_running_loop().call_soon
        pair.source.after_delivery = lambda: soon(stopping.cancel)  # before the task learns that it is held
        with pytest.raises(asyncio.CancelledError):
            await stopping
        pair.source.after_delivery = None
        assert (await pair.source.answer(key)).tokens == whole.tokens


async def test_a_reservation_keeps_its_blocks_and_its_place() -> None:
    async with both(EngineShape(context_tokens=256, kv_blocks=16, batch_max=2)) as pair:
        engine = pair.target.engine
        other, _ = pair.reserve(asked(0, prompt(30), max_tokens=100), 100)
        assert engine.load().kv_used == 100 // 16 + 1
        keys = [pair.target.submit(prompt(30, n), max_tokens=100) for n in (1, 2)]
        await turns()
        assert (engine.load().running, engine.load().waiting) == (1, 1)
        assert engine.reserve(pair.target.key(), asked(0, prompt(30)), 40) == (
            "overloaded: all 2 places of the batch are taken"
        )
        engine.cancel(other)
        for key in keys:
            assert len((await pair.target.answer(key)).tokens) == 100


async def test_a_request_of_the_whole_context_can_arrive_in_a_pool_of_that_size() -> None:
    async with both(EngineShape(context_tokens=256, kv_blocks=16)) as pair:
        _, export, stopped = await pair.stopped_at(55, prompt(200), max_tokens=100)
        key, coming = pair.reserve(asked(0, prompt(200), max_tokens=100), 256)
        assert pair.target.engine.load().kv_used == 16
        await pair.carry(export, stopped, coming)
        assert len((await pair.target.answer(key)).tokens) == 1


async def test_a_leaving_request_is_preempted_last() -> None:
    async with both(EngineShape(context_tokens=256, kv_blocks=20)) as pair:
        whole = [(await pair.source.ask(prompt(60, n), max_tokens=120)).tokens for n in (1, 2)]
        staying = pair.source.submit(prompt(60, 1), max_tokens=120)
        leaving, export = await pair.leaving(prompt(60, 2), max_tokens=120)
        assert (await pair.source.answer(leaving)).tokens == whole[1]
        with pytest.raises(MoveEnded, match="it has ended"):
            await export.stop()
        export.close()
        assert (await pair.source.answer(staying)).tokens == whole[0]


async def test_a_preempted_leaving_request_cannot_leave_and_loses_no_token() -> None:
    async with both(EngineShape(context_tokens=256, kv_blocks=20)) as pair:
        whole = [(await pair.source.ask(prompt(60, n), max_tokens=120)).tokens for n in (1, 2)]
        moves = [await pair.leaving(prompt(60, n), max_tokens=120) for n in (1, 2)]
        await pair.source.until(lambda: pair.source.engine.load().waiting)
        with pytest.raises(MoveEnded, match="preempted"):
            await moves[0][1].stop()
        for _, export in moves:
            export.close()
        assert [(await pair.source.answer(key)).tokens for key, _ in moves] == whole
        await pair.is_empty()


async def test_a_stop_takes_effect_at_the_end_of_the_step() -> None:
    async with both(SMALL, ConstantTiming(itl_s=0.05)) as pair:
        key, export = await pair.leaving(prompt(), max_tokens=100)
        await turns()  # the next step begins
        said = len(pair.source.answers[key].tokens)
        stopped = await export.stop()
        assert len(stopped.tokens) - 40 == len(pair.source.answers[key].tokens) == said + 1


async def test_a_cancelled_stop_lets_the_request_continue() -> None:
    async with both(SMALL, ConstantTiming(itl_s=0.01)) as pair:
        whole = (await pair.source.ask(prompt(), max_tokens=20)).tokens
        key, export = await pair.leaving(prompt(), max_tokens=20)
        stopping = asyncio.ensure_future(export.stop())
        await turns()
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert (await pair.source.answer(key)).tokens == whole


async def test_a_dead_engine_cannot_stop_a_request() -> None:
    async with both(SMALL) as pair:
        _, export = await pair.leaving(prompt(), max_tokens=1000)
        pair.source.engine.chaos("die", 0)
        with pytest.raises(MoveEnded, match="dead"):
            await export.stop()


def test_a_block_holds_a_byte_of_every_token() -> None:
    with pytest.raises(BadShape, match="kv_block_bytes = 15: a KV block of 16 tokens has a byte for each"):
        EngineShape(kv_block_bytes=15)


CROWDED = EngineShape(context_tokens=256, kv_blocks=28, batch_max=6, kv_block_bytes=256, tp=2)


@pytest.mark.slow
@pytest.mark.parametrize("itl_s", [0.0, 0.001])
@pytest.mark.parametrize("seed", range(8))
async def test_no_token_is_lost_and_no_block_left_behind(seed: int, itl_s: float) -> None:
    async with both(CROWDED, ConstantTiming(itl_s=itl_s)) as pair:
        await walk(pair, seed)


async def test_such_histories_are_full_of_moves() -> None:
    async with both(CROWDED, ConstantTiming(itl_s=0.001)) as pair:
        walked = await walk(pair, 1, lives=40)
    assert walked.moved > 5  # 14 on a quiet machine, 10 on an overloaded one
    assert walked.given_up > 3
    assert walked.finished > 10


@pytest.mark.parametrize("seed", range(3))
async def test_announcements_match_the_caches_through_all_moves(seed: int) -> None:
    rigs, heard = [Rig(SimulatedEngine(CROWDED)) for _ in range(2)], [Listener() for _ in range(2)]
    for rig, listener in zip(rigs, heard, strict=True):
        await rig.engine.start(rig.deliver, listener.announce)
    await walk(Pair(*rigs), seed)
    for rig, listener in zip(rigs, heard, strict=True):
        if not rig.engine.each[0].scheduler.prefill.trusted:  # type: ignore[attr-defined]
            rig.engine.trust(True)
        await rig.ask(prompt(), max_tokens=2)
        kv = rig.engine.each[0].scheduler.kv  # type: ignore[attr-defined]
        assert len(listener.held[Tier.DEVICE]) == len(kv.inactive) > 0
        assert all(block in kv.inactive for block in listener.held[Tier.DEVICE])
        await rig.engine.stop()


async def test_evictions_by_a_reservation_are_announced_on_an_idle_engine() -> None:
    rig, listener = Rig(SimulatedEngine(EngineShape(context_tokens=64, kv_blocks=4))), Listener()
    await rig.engine.start(rig.deliver, lambda _, events: listener.hear(events))
    await rig.ask(prompt(48), max_tokens=1)
    await rig.until(lambda: rig.engine.phase().name == "idle")
    assert len(listener.held[Tier.DEVICE]) == 3
    assert not isinstance(rig.engine.reserve(rig.key(), asked(0, prompt(30, 1)), 60), str)
    assert len(listener.held[Tier.DEVICE]) == 0
    await rig.engine.stop()
