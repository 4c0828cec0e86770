"""Copies blocks of the KV cache to bytes and back, while the model computes.

    a block    [layer][keys, values][KV head][token][head width]

On a GPU, copies have their own stream and pinned memory, so that they run beside a step. Outgoing copies need no order between
the streams: a block counts as full once its step's tokens were chosen, which waits for the GPU. Incoming copies wait for the
last clearing of blocks, which may have cleared their target. Both return only when the bytes have arrived.
"""

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Sequential
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.engines.transformers.attention import Pool
from workers.kv_transfer.messages import Buffer


class Copier:
    """Copies whole blocks out of one pool and into it. May be called from several threads."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        layers, _, heads, tokens, width = pool.keys.shape
        self._shape = (layers, 2, heads, tokens, width)
        self.block_bytes = 2 * pool.keys[:, 0].numel() * pool.keys.element_size()
        device = pool.keys.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def out(self, blocks: Sequential[int]) -> memoryview:
        """Return the bytes of these blocks."""
        host = self._empty(len(blocks))
        with self._beside():
            there = host if self._stream is None else torch.empty_like(host, device=self._pool.keys.device)
            for place, block in enumerate(blocks):
                there[place, :, 0] = self._pool.keys[:, block]
                there[place, :, 1] = self._pool.values[:, block]
            if there is not host:
                host.copy_(there, non_blocking=True)
        return memoryview(_bytes(host))

    @torch.inference_mode()
    def into(self, blocks: Sequential[int], data: Buffer) -> None:
        """Write bytes into these blocks."""
        host = self._empty(len(blocks))
        np.copyto(_bytes(host), np.frombuffer(data, np.uint8))  # without the GIL, and from read-only memory
        with self._beside():
            if self._stream is not None and self._pool.cleared is not None:
                self._stream.wait_event(self._pool.cleared)
            arrived = host.to(self._pool.keys.device, non_blocking=True)
            for place, block in enumerate(blocks):
                self._pool.keys[:, block] = arrived[place, :, 0]
                self._pool.values[:, block] = arrived[place, :, 1]

    def _empty(self, blocks: int) -> Tensor:
        pinned = self._stream is not None
        return torch.empty((blocks, *self._shape), dtype=self._pool.keys.dtype, pin_memory=pinned)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            done = self._stream.record_event()
        done.synchronize()


def _bytes(tensor: Tensor) -> Any:
    """Return a tensor's memory as a numpy array."""
    return tensor.view(-1).view(torch.uint8).numpy()
