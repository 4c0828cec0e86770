"""A transport writes into the target's region; the rest of a transfer is unchanged."""

import importlib.util
import mmap
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from kv_kit import BIG, BLOCKS, KV, TOKENS, Target, content, receiving
from playing import Playing

from workers.kv_transfer.messages import Grant, TransferFailed, TransferRefused
from workers.kv_transfer.nixl import Nixl, NoNixl
from workers.kv_transfer.receiver import Arrived, Receiver
from workers.kv_transfer.sender import Sender

real = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs NIXL: make test-nixl")


def granted(receiver: Receiver) -> Grant:
    found = receiver.reserve(KV, BLOCKS, TOKENS[:10])
    return found


def test_bytes_go_through_the_transport_that_the_target_offers(tmp_path: Path) -> None:
    transport, source = Playing(), content(BLOCKS)
    with receiving(tmp_path, transport=transport) as (receiver, _):
        grant = granted(receiver)
        sender = Sender(grant, transport=transport)
        sender.open()
        assert sender.way == "playing"
        sender.send(source[: 2 * KV.block_bytes])
        sender.finish(source[2 * KV.block_bytes :], TOKENS, 50)
        arrived = receiver.arrival(grant.ticket).result(5)
        assert isinstance(arrived, Arrived)
        assert bytes(arrived.memory) == source
        receiver.release(grant.ticket)
        assert not transport.offered
    assert not transport.open and not transport.late


def test_a_transport_is_told_which_memory_may_still_be_written_to(tmp_path: Path) -> None:
    transport = Playing()
    with receiving(tmp_path, transport=transport) as (receiver, _):
        grant = granted(receiver)
        sender = Sender(grant, transport=transport)
        sender.open()
        memory = transport.offered[grant.offer]
        receiver.abort(grant.ticket)
        assert transport.late == [memory] and not transport.offered
        sender.close()


@pytest.mark.parametrize(
    ("fault", "why"), [("write", "network is gone"), ("flip", "checksum"), ("remote", "cannot be reached")]
)
def test_a_transport_that_fails_ends_the_transfer_with_its_reason(
    tmp_path: Path, fault: str, why: str
) -> None:
    transport = Playing(fault)
    with receiving(tmp_path, transport=transport) as (receiver, _):
        grant = granted(receiver)
        sender = Sender(grant, transport=transport)
        with pytest.raises(TransferFailed, match=why):
            sender.open()
            sender.finish(content(BLOCKS), TOKENS, 50)
        sender.close()
        receiver.abort(grant.ticket)
        assert isinstance(receiver.arrival(grant.ticket).result(5), TransferRefused)
    assert not transport.offered
    assert not transport.open


@pytest.mark.parametrize("fault", ["offer", "unused"])
def test_without_a_common_transport_bytes_go_over_the_usual_path(tmp_path: Path, fault: str) -> None:
    theirs = Playing(fault)
    with receiving(tmp_path, transport=theirs) as (receiver, _):
        grant = granted(receiver)
        sender = Sender(grant, transport=Playing() if fault == "offer" else None)
        sender.open()
        assert sender.way == "shm"
        sender.finish(content(BLOCKS), TOKENS, 50)
        assert isinstance(receiver.arrival(grant.ticket).result(5), Arrived)


@pytest.mark.skipif(
    importlib.util.find_spec("nixl") is not None,
    reason="needs an environment without NIXL: make clean install",
)
def test_without_nixl_its_transport_names_the_package_to_install() -> None:
    with pytest.raises(NoNixl, match=r"pip install -e"):
        Nixl("w0")


@real
def test_nixl_carries_blocks_between_two_processes(tmp_path: Path) -> None:
    target = Target(tmp_path, nixl=True)
    nixl = Nixl(f"source-{os.getpid()}")
    for turn in range(2):  # the second time into reused memory
        source = content(BLOCKS, BIG, seed=turn)
        sender = opened(target, nixl, blocks=BLOCKS)
        sender.send(source[: 1 << 20])
        sender.finish(source[1 << 20 :], TOKENS, 50, b"\x05")
        assert target.ask("arrival", sender.grant.ticket).split() == [sha256(source).hexdigest(), "50", "05"]
    target.end()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make UCX send over TCP, where the peer process takes part in each write."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@real
def test_a_target_survives_late_writes_of_nixl(tmp_path: Path, over_tcp: None) -> None:
    target = Target(tmp_path, nixl=True)
    nixl = Nixl(f"source-{os.getpid()}-3")
    source = content(64, BIG)
    for _ in range(3):
        sender = opened(target, nixl, blocks=64)
        with ThreadPoolExecutor(1) as threads:
            writing = threads.submit(sender.send, source)
            target.process.send_signal(signal.SIGSTOP)
            time.sleep(0.1)  # so that some bytes are under way
            sender._connection.break_off()  # type: ignore[union-attr]  # `cancel` would break the write off, too
            target.process.send_signal(signal.SIGCONT)
            with pytest.raises(TransferFailed):
                writing.result(20)
        sender.close()
    sender = opened(target, nixl, blocks=BLOCKS)
    sender.finish(source[: BLOCKS << 20], TOKENS, 50)
    target.end()


@real
def test_a_write_does_not_wait_for_another_sources_write(tmp_path: Path, over_tcp: None) -> None:
    target = Target(tmp_path, nixl=True)
    nixl = Nixl(f"source-{os.getpid()}-4")
    sender = opened(target, nixl, blocks=BLOCKS)
    source, memory = content(BLOCKS, BIG), memoryview(mmap.mmap(-1, 1 << 20))
    target.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(sender.send, source)
        time.sleep(0.1)  # so that the write is under way
        offering = threads.submit(nixl.offer, memory)
        assert offering.result(10) and not writing.done()
        nixl.withdraw(memory, quiet=False)
        sender.cancel()
        with pytest.raises(TransferFailed, match="cancelled"):
            writing.result(10)
    assert nixl.unfinished
    target.process.send_signal(signal.SIGCONT)
    sender = opened(target, nixl, blocks=BLOCKS)
    sender.finish(source, TOKENS, 50)
    opened(target, nixl, blocks=BLOCKS).close()
    assert not nixl.unfinished
    target.end()


def opened(target: Target, nixl: Nixl, blocks: int) -> Sender:
    """Reserve blocks, and begin to send them."""
    sender = Sender(msgspec.structs.replace(target.grant(blocks), region=""), transport=nixl)
    sender.open()
    assert sender.way == "nixl"
    return sender


@real
def test_an_invalid_nixl_offer_is_refused() -> None:
    nixl = Nixl(f"source-{os.getpid()}-2")
    with pytest.raises(TransferFailed, match="not a NIXL offer"):
        nixl.remote(b"\x00", 0.0)
    with pytest.raises(TransferFailed, match="NIXL"):
        nixl.remote(msgspec.msgpack.encode([b"no metadata", 4096]), 0.0)
