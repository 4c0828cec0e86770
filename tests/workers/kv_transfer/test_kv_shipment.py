"""Transfers awaited on an event loop, which keeps running meanwhile."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kv_kit import BLOCKS, KV, TOKENS, content, receiving

from workers.kv_transfer.messages import Grant, TransferFailed, TransferRefused
from workers.kv_transfer.receiver import ArrivalProgress, Arrived
from workers.kv_transfer.sender import Sender, Shipment


@asynccontextmanager
async def shipping(grant: Grant, threads: ThreadPoolExecutor | None = None) -> AsyncIterator[Shipment]:
    """Open a shipment, and close it at the end."""
    own = threads or ThreadPoolExecutor(1)
    shipment = Shipment(Sender(grant), own)
    await shipment.open()
    try:
        yield shipment
    finally:
        shipment.close()
        if threads is None:
            own.shutdown(wait=False)


async def test_the_loop_keeps_running_during_a_transfer(tmp_path: Path) -> None:
    with receiving(tmp_path) as (receiver, _):
        grant = await asyncio.to_thread(receiver.reserve, KV, BLOCKS, TOKENS[:10])
        waiting = asyncio.ensure_future(asyncio.wrap_future(receiver.arrival(grant.ticket)))
        source = content(BLOCKS)
        async with shipping(grant) as sent:
            await sent.send(source[:4096])
            await sent.finish(source[4096:], TOKENS, 50, b"state")
        async with asyncio.timeout(20):
            got = await waiting
        assert isinstance(got, Arrived)
        assert (bytes(got.memory), got.tokens, got.computed, got.state) == (source, TOKENS, 50, b"state")
        receiver.release(grant.ticket)


async def test_shipments_share_threads(tmp_path: Path) -> None:
    threads = ThreadPoolExecutor(3, thread_name_prefix="kv-test")
    with receiving(tmp_path) as (receiver, _):
        source = content(BLOCKS)

        async def move() -> None:
            grant = await asyncio.to_thread(receiver.reserve, KV, BLOCKS, TOKENS[:10])
            async with shipping(grant, threads) as sent:
                await sent.send(source[:4096])
                await sent.finish(source[4096:], TOKENS, 50)
            arrived = await asyncio.wrap_future(receiver.arrival(grant.ticket))
            assert isinstance(arrived, Arrived)
            receiver.release(grant.ticket)

        async with asyncio.timeout(20):
            for _ in range(3):
                await asyncio.gather(*(move() for _ in range(3)))
    assert sum(thread.name.startswith("kv-test") for thread in threading.enumerate()) <= 3
    threads.shutdown()


async def test_leaving_a_shipment_early_frees_the_reservation(tmp_path: Path) -> None:
    with receiving(tmp_path) as (receiver, _):
        grant = await asyncio.to_thread(receiver.reserve, KV, BLOCKS)
        async with shipping(grant) as sent:
            await sent.send(content(1))
        async with asyncio.timeout(20):
            arrived = await asyncio.wrap_future(receiver.arrival(grant.ticket))
            assert isinstance(arrived, TransferRefused)


async def test_a_cancelled_await_ends_soon_and_cancels_the_transfer(tmp_path: Path) -> None:
    """The target's thread is blocked, so that the source waits for an answer."""
    with receiving(tmp_path) as (receiver, _):
        grant = await asyncio.to_thread(receiver.reserve, KV, BLOCKS, TOKENS[:10])
        arrival = receiver.arrival(grant.ticket)
        async with shipping(grant) as sent:
            over = threading.Event()

            class Held(ArrivalProgress):
                def set(self) -> None:
                    super().set()
                    over.wait(20)

            held = Held()
            receiver.watch(grant.ticket, held)
            running = asyncio.ensure_future(sent.finish(content(BLOCKS), TOKENS, 50))
            async with asyncio.timeout(20):
                await held.wait()
                assert not running.done()
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
            over.set()
            with pytest.raises(TransferFailed, match="cancelled"):
                await sent.finish(b"", TOKENS, 50)
        await asyncio.wait_for(asyncio.wrap_future(arrival), 20)
