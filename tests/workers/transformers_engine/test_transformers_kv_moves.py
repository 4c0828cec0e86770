"""Requests of the transformers engine that move with their KV cache."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from waits import turns

torch = pytest.importorskip("torch", reason="torch is not installed: make test-engines")
pytestmark = pytest.mark.engines

from engine_contract import Rig, asked, prompt  # noqa: E402
from engine_moves import EngineMoves, Made, Pair  # noqa: E402
from engine_walk import walk  # noqa: E402

from workers.engines.engine import MoveEnded, MoveRefused  # noqa: E402
from workers.engines.transformers.attention import Pool  # noqa: E402
from workers.engines.transformers.moving import Copier  # noqa: E402

MakeEngine = Callable[..., Any]


class TestTransformers(EngineMoves):
    """With half the tiny model."""

    @pytest.fixture
    def made(self, engine_of: MakeEngine) -> Made:
        return partial(engine_of, context_tokens=512)


class TestTransformersInSmallBlocks(EngineMoves):
    """The same with another block size and another dtype."""

    @pytest.fixture
    def made(self, engine_of: MakeEngine) -> Made:
        return partial(engine_of, context_tokens=512, block_tokens=16, kv_tokens=4096, dtype="bfloat16")


Both = Callable[..., AbstractAsyncContextManager[Pair]]


@pytest.fixture
def both(engine_of: MakeEngine) -> Both:
    """Start two engines with the given settings."""

    @asynccontextmanager
    async def started(**given: Any) -> AsyncIterator[Pair]:
        rigs = [Rig(engine_of(**{"context_tokens": 512, **given})) for _ in range(2)]
        for rig in rigs:
            await rig.start()
        yield Pair(*rigs)
        for rig in rigs:
            await rig.engine.stop()

    return started


def stepper(rig: Rig) -> Any:
    return rig.engine.stepper  # type: ignore[attr-defined]


def nothing_is_kept(rig: Rig) -> bool:
    """Whether every block is free, and exactly once."""
    blocks, transit = stepper(rig).blocks, stepper(rig).transit
    return (
        sorted([*blocks.empty, *blocks.idle]) == list(range(blocks.count))
        and not any(blocks.holders)
        and transit.empty
    )


def recorded_logits(rig: Rig) -> list[Any]:
    """Return a list to which the logits of every later step are appended."""
    model, kept = stepper(rig).model, []
    forward = model.forward

    def listening(*given: Any, **rest: Any) -> Any:
        kept.append(forward(*given, **rest))
        return kept[-1]

    model.forward = listening
    return kept


@pytest.mark.parametrize("seed", range(6))
async def test_no_token_is_lost_and_no_block_left_behind(both: Both, seed: int) -> None:
    async with both(context_tokens=256, kv_tokens=320, block_tokens=16, batch_max=6) as pair:
        await walk(pair, seed)
        assert nothing_is_kept(pair.source)
        assert nothing_is_kept(pair.target)


@pytest.mark.parametrize("cut", [7, 27, 31])
async def test_the_logits_after_a_move_are_bit_for_bit_those_of_the_undisturbed_run(
    both: Both, cut: int
) -> None:
    async with both() as pair:
        undisturbed = recorded_logits(pair.source)
        await pair.source.ask(prompt(70), max_tokens=50)
        undisturbed = undisturbed[-50:]
        _, export, stopped = await pair.stopped_at(cut, prompt(70), max_tokens=50)
        company = [pair.target.submit(prompt(20, n), max_tokens=200) for n in (1, 2)]
        other, coming = pair.reserve(asked(0, prompt(70), max_tokens=50), 120)
        after = recorded_logits(pair.target)
        settled = stepper(pair.target)
        await pair.carry(export, stopped, coming)
        await pair.target.until(lambda: other in settled or pair.target.answers[other].over.is_set())
        for one in company:
            pair.target.engine.cancel(one)
        await pair.target.answer(other)
        own = [
            row for step in after for row in step if any(torch.equal(row, full[0]) for full in undisturbed)
        ]
        assert len(own) == 50 - cut
        assert all(torch.equal(row, full[0]) for row, full in zip(own, undisturbed[cut:], strict=True))


async def test_bytes_are_laid_out_layer_by_layer_keys_before_values(both: Both) -> None:
    async with both() as pair:
        _, export = await pair.leaving(prompt(70), max_tokens=400)
        await export.stop()
        description = pair.source.engine.kv[0]
        data = bytearray(await export.blocks(0, 1, 1))
        pool = stepper(pair.source).pool
        shape = (description.layers, 2, description.heads, description.block_size, description.head_size)
        got = torch.frombuffer(data, dtype=torch.float32).view(shape)
        keys = [(pool.keys[:, block] == got[:, 0]).all().item() for block in range(pool.sink)]
        values = [(pool.values[:, block] == got[:, 1]).all().item() for block in range(pool.sink)]
        assert keys == values
        assert sum(keys) == 1
        assert len(data) == description.block_bytes == 4 * got.numel()


async def test_bytes_after_the_end_of_the_last_block_are_ignored(both: Both) -> None:
    async with both() as pair:
        whole = await pair.source.ask(prompt(40), max_tokens=30)
        key, export, stopped = await pair.stopped_at(5, prompt(40), max_tokens=30)
        description = pair.source.engine.kv[0]
        shape = (2, description.layers, 2, description.heads, description.block_size, description.head_size)
        data = torch.frombuffer(bytearray(await export.blocks(0, 0, 2)), dtype=torch.float32).view(shape)
        assert not data[1, :, :, :, stopped.computed - 32 :].any()
        data[1, :, :, :, stopped.computed - 32 :] = torch.nan
        other, coming = pair.reserve(asked(0, prompt(40), max_tokens=30), 80)
        await coming.take(0, 0, memoryview(data.numpy()).cast("B"))
        await coming.commit(stopped.tokens, stopped.computed)
        after = await pair.target.answer(other)
        assert pair.source.answers[key].tokens + after.tokens == whole.tokens


async def test_kv_of_fewer_tokens_than_given_is_completed_by_computing_the_rest(both: Both) -> None:
    async with both() as pair:
        whole = await pair.source.ask(prompt(100), max_tokens=30)
        key, export, stopped = await pair.stopped_at(5, prompt(100), max_tokens=30)
        other, coming = pair.reserve(asked(0, prompt(100), max_tokens=30), 140)
        await coming.take(0, 0, await export.blocks(0, 0, 2))
        await coming.commit(stopped.tokens, 64)
        after = await pair.target.answer(other)
        assert pair.source.answers[key].tokens + after.tokens == whole.tokens


async def test_blocks_being_copied_are_freed_after_the_copy(both: Both) -> None:
    async with both() as pair:
        gate = threading.Event()
        for rig in (pair.source, pair.target):
            slowed(rig, gate)
        key, export = await pair.leaving(prompt(100), max_tokens=400)
        other, coming = pair.reserve(asked(0, prompt(100), max_tokens=400), 140)
        size = pair.source.engine.kv[0].block_bytes
        copies = [
            asyncio.ensure_future(export.blocks(0, 0, 2)),
            asyncio.ensure_future(coming.take(0, 0, bytes(2 * size))),
        ]
        await turns()
        pair.source.engine.cancel(key)
        pair.target.engine.cancel(other)
        await pair.source.until(lambda: not pair.source.engine.load().running)
        assert pair.source.engine.load().kv_used == 4
        assert pair.target.engine.load().kv_used == 5
        gate.set()
        ended = await asyncio.gather(*copies, return_exceptions=True)
        assert [type(one) for one in ended] == [MoveEnded, MoveRefused]
        await pair.is_empty()
        assert nothing_is_kept(pair.source)
        assert nothing_is_kept(pair.target)


async def test_a_cancelled_copy_waits_until_its_memory_is_no_longer_read(both: Both) -> None:
    async with both() as pair:
        gate = threading.Event()
        slowed(pair.target, gate)
        other, coming = pair.reserve(asked(0, prompt(30)), 64)
        taking = asyncio.ensure_future(coming.take(0, 0, bytes(pair.target.engine.kv[0].block_bytes)))
        await turns()
        taking.cancel()
        done, _ = await asyncio.wait([taking], timeout=0.05)
        assert not done
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await taking
        pair.target.engine.cancel(other)
        await pair.is_empty()


async def test_a_copy_that_fails_ends_the_move_and_nothing_else(both: Both) -> None:
    async with both() as pair:
        whole = await pair.source.ask(prompt(70), max_tokens=60)
        key, export, _ = await pair.stopped_at(4, prompt(70), max_tokens=60)
        _, coming = pair.reserve(asked(0, prompt(70), max_tokens=60), 100)

        def broken(*_: Any) -> Any:
            raise RuntimeError("CUDA error: out of memory")

        for rig in (pair.source, pair.target):
            copier = rig.engine.moves.copier  # type: ignore[attr-defined]
            copier.out = copier.into = broken
        with pytest.raises(MoveEnded, match="out of memory"):
            await export.blocks(0, 0, 1)
        with pytest.raises(MoveRefused, match="out of memory"):
            await coming.take(0, 0, bytes(pair.target.engine.kv[0].block_bytes))
        export.close()
        assert (await pair.source.answer(key)).tokens == whole.tokens
        await pair.is_empty()


async def test_a_step_that_takes_too_long_ends_the_move_and_nothing_else(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.engines.transformers.moving.HOLD_S", 0.05)
    async with both() as pair:
        whole = await pair.source.ask(prompt(70), max_tokens=60)
        key, export = await pair.leaving(prompt(70), max_tokens=60)
        model, gate, begun = stepper(pair.source).model, threading.Event(), threading.Event()
        forward = model.forward

        def long(*given: Any, **rest: Any) -> Any:
            begun.set()
            assert gate.wait(10)
            return forward(*given, **rest)

        model.forward = long
        await pair.source.until(begun.is_set)
        with pytest.raises(MoveEnded, match="no step has ended"):
            await export.stop()
        gate.set()
        assert (await pair.source.answer(key)).tokens == whole.tokens
        export.close()
        await pair.is_empty()
        assert nothing_is_kept(pair.source)


async def test_a_preempted_request_cannot_leave_and_loses_no_token(both: Both) -> None:
    async with both(context_tokens=256, kv_tokens=320, block_tokens=16) as pair:
        wholes = [(await pair.source.ask(prompt(60, n), max_tokens=120)).tokens for n in (1, 2)]
        keys = [pair.source.submit(prompt(60, n), max_tokens=120) for n in (1, 2)]
        exports = [await pair.exported(key) for key in keys]
        await pair.source.until(lambda: stepper(pair.source).schedule.preemptions)
        with pytest.raises(MoveEnded, match="preempted"):
            await exports[0].stop()
        for export in exports:
            export.close()
        assert [(await pair.source.answer(key)).tokens for key in keys] == wholes
        await pair.is_empty()


async def test_a_leaving_request_is_preempted_last(both: Both) -> None:
    async with both(context_tokens=256, kv_tokens=320, block_tokens=16) as pair:
        wholes = [(await pair.source.ask(prompt(60, n), max_tokens=120)).tokens for n in (1, 2)]
        staying = pair.source.submit(prompt(60, 1), max_tokens=120)
        leaving, export = await pair.leaving(prompt(60, 2), max_tokens=120)
        await pair.source.until(lambda: stepper(pair.source).schedule.preemptions)
        stopped = await export.stop()
        assert list(stopped.tokens[60:]) == wholes[1][: len(stopped.tokens) - 60]
        pair.source.engine.cancel(leaving)
        assert (await pair.source.answer(staying)).tokens == wholes[0]
        await pair.is_empty()


async def test_a_dead_engine_cannot_stop_a_request(both: Both) -> None:
    async with both() as pair:
        _, export = await pair.leaving(prompt(), max_tokens=400)
        pair.source.engine.chaos("die", 0)
        with pytest.raises(MoveEnded, match="dead"):
            await export.stop()


async def test_a_reservation_keeps_its_place_in_the_batch(both: Both) -> None:
    async with both(batch_max=2) as pair:
        engine = pair.target.engine
        other, _ = pair.reserve(asked(0, prompt(30)), 64)
        keys = [pair.target.submit(prompt(30, n), max_tokens=100) for n in (1, 2)]
        await pair.target.until(lambda: pair.target.answers[keys[0]].tokens)
        assert (engine.load().running, engine.load().waiting) == (1, 1)
        assert engine.reserve(pair.target.key(), asked(0, prompt(30)), 40) == (
            "overloaded: all 2 places of the batch are taken"
        )
        engine.cancel(other)
        for key in keys:
            assert len((await pair.target.answer(key)).tokens) == 100


async def test_a_request_that_waits_for_reserved_blocks_runs_when_the_reservation_ends(both: Both) -> None:
    async with both(context_tokens=256, kv_tokens=256, block_tokens=16) as pair:
        other, _ = pair.reserve(asked(0, prompt(30)), 250)
        key = pair.target.submit(prompt(100), max_tokens=20)
        await pair.target.until(lambda: pair.target.engine.phase().name == "idle")
        assert pair.target.engine.load().waiting == 1
        pair.target.engine.cancel(other)
        assert len((await pair.target.answer(key)).tokens) == 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and a torch that sees it")
def test_blocks_of_a_gpu_are_copied_while_it_computes() -> None:
    device = torch.device("cuda")
    pools = [
        Pool(layers=3, blocks=40, kv_heads=2, block_tokens=16, width=32, dtype=torch.bfloat16, device=device)
        for _ in range(2)
    ]
    for half in (pools[0].keys, pools[0].values):
        half.normal_()
    torch.cuda.synchronize()
    large = torch.randn(4096, 4096, device=device)
    for _ in range(50):
        large = (large @ large).clamp_(-1, 1)
    table, other = [5, 3, 17, 30], [1, 2, 39, 0]
    pools[1].clear(other)
    data = Copier(pools[0]).out(table)
    assert len(data) == len(table) * Copier(pools[0]).block_bytes
    Copier(pools[1]).into(other, bytes(data))
    torch.cuda.synchronize()
    assert torch.equal(pools[1].keys[:, other], pools[0].keys[:, table])
    assert torch.equal(pools[1].values[:, other], pools[0].values[:, table])


def slowed(rig: Rig, gate: threading.Event) -> None:
    """Make every copy of this engine wait for a gate."""
    copier = rig.engine.moves.copier  # type: ignore[attr-defined]

    def waiting(copy: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*given: Any) -> Any:
            assert gate.wait(10)
            return copy(*given)

        return gated

    copier.out, copier.into = waiting(copier.out), waiting(copier.into)
