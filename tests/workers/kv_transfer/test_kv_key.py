"""KV caches are exchanged only between workers that know the fleet's key."""

import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from kv_kit import BLOCKS, KV, TOKENS, WAYS, by, content, receiving

from events.fleet_key import FleetKey
from workers.kv_transfer.messages import (
    Grant,
    Open,
    Opened,
    TransferAddress,
    TransferFailed,
    TransferRefused,
    TransferSocket,
)
from workers.kv_transfer.receiver import Arrived, Receiver
from workers.kv_transfer.sender import Sender

OURS, OTHERS = FleetKey(b"the fleet's own key"), FleetKey(b"another fleet's key")


def reserved(receiver: Receiver) -> Grant:
    grant = receiver.reserve(KV, BLOCKS, TOKENS[:10])
    return grant


@pytest.mark.parametrize("way", WAYS)
def test_a_transfer_between_two_workers_with_the_key_succeeds(tmp_path: Path, way: str) -> None:
    with receiving(tmp_path, key=OURS) as (receiver, _):
        grant = reserved(receiver)
        sender = Sender(by(way, grant), key=OURS)
        sender.open()
        sender.finish(content(BLOCKS), TOKENS, 50)
        arrived = receiver.arrival(grant.ticket).result(20)
        assert (
            isinstance(arrived, Arrived) and bytes(arrived.memory) == content(BLOCKS)[: len(arrived.memory)]
        )


@pytest.mark.parametrize("key", [None, OTHERS])
@pytest.mark.parametrize("way", WAYS)
def test_a_source_without_the_key_is_refused(tmp_path: Path, way: str, key: FleetKey | None) -> None:
    with receiving(tmp_path, key=OURS) as (receiver, _):
        sender = Sender(by(way, reserved(receiver)), key=key)
        with pytest.raises(TransferFailed, match="the source does not have this fleet's key"):
            sender.open()
            sender.finish(content(BLOCKS), TOKENS, 50)


def test_a_ticket_tried_by_a_stranger_is_still_valid_for_its_owner(tmp_path: Path) -> None:
    with receiving(tmp_path, key=OURS) as (receiver, _):
        grant = reserved(receiver)
        with pytest.raises(TransferFailed):
            Sender(grant, key=OTHERS).open()
        sender = Sender(grant, key=OURS)
        sender.open()
        sender.finish(content(BLOCKS), TOKENS, 50)
        assert isinstance(receiver.arrival(grant.ticket).result(20), Arrived)


@pytest.mark.parametrize("answer", [Opened(b"p" * 32), TransferRefused("no"), None])
def test_a_stranger_at_the_targets_port_receives_no_byte_of_the_cache(
    tmp_path: Path, answer: Opened | TransferRefused | None
) -> None:
    """The target has died, and another process listens on its port."""
    received: list[object] = []
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as port,
        receiving(tmp_path, key=OURS) as (receiver, _),
    ):
        place = TransferAddress("127.0.0.1", port.getsockname()[1])
        grant = msgspec.structs.replace(reserved(receiver), endpoint=place, region="", seconds=2.0)

        def listen() -> None:
            line = TransferSocket(port.accept()[0], time.monotonic() + 20)
            received.append(line.receive())
            if answer is not None:
                line.send(answer)
            try:
                received.append(line.receive())
            except TransferFailed:
                line.close()

        stranger = threading.Thread(target=listen)
        stranger.start()
        with pytest.raises(TransferFailed):
            Sender(grant, key=OURS).open()
        stranger.join(20)
        assert [type(one) for one in received] == [Open]
