"""A publisher of KV events over real ZeroMQ sockets, in vLLM's format, with a scripted prefix cache.

It runs in the test's own thread: a batch is sent when the test requests it. A small thread answers replays, as in vLLM. Shapes:
`map` is vLLM 0.32's, `array` that of SGLang and of earlier vLLM.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import zmq
from waits import block_until

from controller.adapters.embedded.free_port import free_port

Shape = Literal["map", "array"]
END = (-1).to_bytes(8, "big", signed=True)
STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)


def stored(
    keys: Sequence[Any],
    tokens: Sequence[Any],
    size: int,
    parent: Any = None,
    shape: Shape = "map",
    **more: Any,
) -> Any:
    """Return an encoded BlockStored."""
    fields = {
        "block_hashes": list(keys), "parent_block_hash": parent, "token_ids": list(tokens), "block_size": size,
        "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": None, **more,
    }  # fmt: skip
    if shape == "array":
        return ["BlockStored", *(fields[name] for name in STORED)]
    return {"type": "BlockStored", **fields}


def removed(keys: Sequence[Any], medium: str | None = "GPU", shape: Shape = "map", **more: Any) -> Any:
    """Return an encoded BlockRemoved."""
    if shape == "array":
        return ["BlockRemoved", list(keys), medium]
    return {"type": "BlockRemoved", "block_hashes": list(keys), "medium": medium, **more}


def cleared(shape: Shape = "map") -> Any:
    """Return an encoded AllBlocksCleared."""
    return ["AllBlocksCleared"] if shape == "array" else {"type": "AllBlocksCleared"}


def packed(events: Sequence[Any], at: float = 1.0, rank: int = 0) -> bytes:
    """Return an encoded batch."""
    return msgspec.msgpack.encode([at, list(events), rank])


class Publisher:
    """One rank of an engine. `lose` drops batches: they are numbered and kept, but not sent."""

    def __init__(self, replay: bool = True, keep: int = 10_000, topic: bytes = b"") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)  # a PUB that reports its subscribers
        self._port = free_port()  # bound again by `drop_listeners`
        self._socket.bind(self.endpoint)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self._topic = topic
        self._clock = 1000.0
        self.number = 0  # of the next batch
        self.lose = False
        self.asked: list[int] = []  # first batch of each replay request
        self.cut: Callable[[int], bool] = lambda number: False  # batches that a replay loses
        self.silent = False  # replays are not answered
        self._over = threading.Event()
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint = ""
        if replay:
            self._replay = self._context.socket(zmq.ROUTER)
            port = self._replay.bind_to_random_port("tcp://127.0.0.1")
            self.replay_endpoint = f"tcp://127.0.0.1:{port}"
            self._thread = threading.Thread(target=self._answer, daemon=True)
            self._thread.start()

    @property
    def endpoint(self) -> str:
        """The endpoint of its batches."""
        return f"tcp://127.0.0.1:{self._port}"

    def wait_for_listener(self, deadline_s: float = 20.0) -> None:
        """Wait for a subscriber: earlier batches are lost."""
        assert self._socket.poll(int(deadline_s * 1e3)), "no subscriber"
        self._socket.recv()

    def publish(self, *events: Any) -> int:
        """Send a batch; return its number."""
        self._clock += 1.0
        return self.send(packed(events, self._clock))

    def send(self, payload: bytes) -> int:
        """Send a batch of these bytes; return its number."""
        number = self.number
        self.number += 1
        self._kept.append((number, payload))
        if not self.lose:
            self._socket.send_multipart([self._topic, number.to_bytes(8, "big"), payload])
        return number

    def send_frames(self, *frames: bytes) -> None:
        """Send any frames."""
        self._socket.send_multipart(list(frames))

    def restart(self) -> None:
        """Restart on the same ports with the same subscribers: numbers from 0, an empty cache."""
        self.number = 0
        self._kept.clear()
        self._clock += 60.0

    def drop_listeners(self) -> None:
        """Break the connections, and accept new ones."""
        self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.XPUB)
        block_until(self._binds, 10.0)  # ZeroMQ releases a port in a thread of its own

    def _binds(self) -> bool:
        with contextlib.suppress(zmq.ZMQError):
            self._socket.bind(self.endpoint)
            return True
        return False

    def close(self) -> None:
        """Release the ports."""
        self._over.set()
        if self._replay is not None:
            self._thread.join(10.0)
        self._context.destroy(linger=0)

    def _answer(self) -> None:
        assert self._replay is not None
        while not self._over.is_set():
            if not self._replay.poll(50):
                continue
            peer, _, first = self._replay.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            if self.silent:
                continue
            for number, payload in list(self._kept):
                if number >= self.asked[-1] and not self.cut(number):
                    self._replay.send_multipart([peer, b"", self._topic, number.to_bytes(8, "big"), payload])
            self._replay.send_multipart([peer, b"", b"", END, b""])
        self._replay.close(linger=0)
