"""The parts of a planned move: the transferred state, concurrent work, and the receiver."""

import asyncio
import gc
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from move_kit import Declined, road
from waits import turns

from events.wire import Generate, Sampling
from workers.engines.engine import MoveRefused
from workers.frontends import RequestOrigin
from workers.kv_transfer.messages import STATE_BYTES_MAX, Description, Grant
from workers.kv_transfer.receiver import Regions
from workers.migration.source import run_concurrently
from workers.migration.state import (
    RequestMigrationState,
    difference,
    packed_state,
    unpacked_state,
)
from workers.migration.target import KvMoveSettings, LazyReceiver
from workers.output import layout

KV = Description("tiny", "main", "float32", 2, 2, 8, 16, 4096)
SAMPLING = Sampling(40, temperature=0.5, seed=3, stop_token_ids=[9, 4])
ASKED = RequestOrigin.of(Generate(1, "r1", list(range(12)), 10, SAMPLING))


def state(**changed: object) -> RequestMigrationState:
    made = unpacked_state(packed_state(ASKED, 20, 19, 1.5, "shm"))
    return msgspec.structs.replace(made, **changed)


def test_a_later_replay_is_the_same_request() -> None:
    """Its limits are reduced by the replayed tokens."""
    reduced = msgspec.structs.replace(SAMPLING, max_tokens=35, stop_token_ids=[4, 9])
    later = RequestOrigin.of(Generate(7, "r1", list(range(17)), 10, reduced))
    assert difference(state(), later, range(20), 19) == ""
    assert (state().generated_tokens, state().stopped_ms, state().link) == (10, 1.5, "shm")


@pytest.mark.parametrize(
    "changed",
    [
        {"request_id": "r2"},
        {"prompt_tokens": 9},
        {"num_computed_tokens": 18},
        {"sequence_position": 21},
    ],
)
def test_each_field_that_differs_is_named(changed: dict[str, object]) -> None:
    assert difference(state(**changed), ASKED, range(20), 19).startswith(next(iter(changed)))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", bytes(STATE_BYTES_MAX + 1)])
def test_an_invalid_state_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="the state"):
        unpacked_state(data)


async def test_the_first_failure_ends_the_others_and_is_raised() -> None:
    ended: list[str] = []

    async def waits(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def fails() -> None:
        raise MoveRefused("the first")

    async with asyncio.timeout(20):
        with pytest.raises(MoveRefused, match="the first"):
            await run_concurrently([waits("a"), fails(), waits("b")])
    assert ended == ["a", "b"]


async def test_a_cancelled_caller_ends_the_work_that_it_awaits() -> None:
    ended = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.ensure_future(run_concurrently([waits(), waits()]))
    await turns(2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


def test_the_registered_layout_matches_the_cache_size_of_a_token() -> None:
    shards = [msgspec.structs.replace(KV, tp_size=2, rank=rank) for rank in range(2)]
    made = layout(shards)
    assert made is not None and (made.kv_heads, made.element_bytes) == (2 * KV.heads, 4)
    size = 2 * made.layers * made.kv_heads * made.head_size * made.element_bytes * KV.block_size
    assert size == 2 * KV.block_bytes
    assert layout(()) is None


async def test_sources_connect_to_the_workers_advertised_address(tmp_path: Path) -> None:
    async with road(tmp_path, advertise="worker-7.example") as way:
        move = await way.begin()
        await way.reserve(move)
        grants = [msgspec.msgpack.decode(one, type=Grant) for one in move.grants]
        assert {grant.endpoint.host for grant in grants} == {"worker-7.example"}
        assert {grant.description.rank for grant in grants} == {0, 1}


async def test_a_worker_that_cannot_receive_declines_with_the_reason(tmp_path: Path) -> None:
    async with road(tmp_path) as way:
        taken = Regions("target-1", tmp_path)
        move = await way.begin()
        assert "another live process" in (await way.target.wait_for(Declined, way.ask_for_room(move))).reason
        taken.close()
        await way.reserve(move)
        await way.stays(move)
    async with road(tmp_path, host="203.0.113.1") as way:
        move = await way.begin()
        assert (
            "cannot receive KV caches" in (await way.target.wait_for(Declined, way.ask_for_room(move))).reason
        )
        assert not list(tmp_path.iterdir())
        await way.stays(move)


async def test_a_root_path_too_long_for_a_socket_is_declined_with_the_reason(tmp_path: Path) -> None:
    root = tmp_path / ("x" * 60)
    root.mkdir()
    landing = LazyReceiver("w" * 64, lambda: (KV,), KvMoveSettings(root=root))
    with pytest.raises(MoveRefused, match="too long"):
        await landing.grants(2, [1, 2, 3], 0)
    assert not list(root.iterdir())
    gc.collect()  # an unclosed socket would cause a warning


@pytest.mark.parametrize("instance", ["a/b:c", "..", "x" * 200])
async def test_any_instance_name_works(instance: str) -> None:
    with TemporaryDirectory() as folder:  # a socket's path must be short
        root = Path(folder)
        landing = LazyReceiver(instance, lambda: (KV,), KvMoveSettings(root=root))
        (grant,) = await landing.grants(2, [1, 2, 3], 0)
        assert Path(grant.region).parent.parent == root
        await landing.close()
        assert not list(root.iterdir())
    with pytest.raises(MoveRefused, match="shutting down"):
        await landing.grants(2, [1, 2, 3], 0)
