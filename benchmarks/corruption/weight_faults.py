"""The kinds of memory faults that the benchmark of silent corruption injects into weights."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engines.transformers.faults import BitFlip, WeightFaultInjector, draw_place

TILE = 16  # rows and columns of a zeroed tile: the size that one matrix unit of a GPU processes

# Draws the bit that each kind flips; None: the kind flips no bit. A float32 has 1 sign bit (31), 8 exponent bits (30–23) and 23
# mantissa bits.
KINDS: Mapping[str, Callable[[random.Random], int | None]] = {
    "any one bit": lambda draw: draw.randrange(32),
    "exponent top bit": lambda draw: 30,
    "other exponent bit": lambda draw: draw.randrange(23, 30),
    "sign": lambda draw: 31,
    "top-4 mantissa bits": lambda draw: draw.randrange(19, 23),
    "low mantissa bits": lambda draw: draw.randrange(19),
    "one row zeroed": lambda draw: None,
    "16×16 tile zeroed": lambda draw: None,
}


@dataclass(frozen=True, slots=True)
class Zeroed:
    """A row or a tile of one weight that is set to zero."""

    weight: str
    row: int
    column: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.weight}[{self.row}, {self.column}]"


WeightFault = BitFlip | Zeroed


def draw_fault(weights: Mapping[str, Tensor], kind: str, draw: random.Random) -> WeightFault:
    """Return a random fault of this kind, drawn with `draw`."""
    name, row, column = draw_place(weights, draw)
    bit = KINDS[kind](draw)
    return Zeroed(name, row, column, kind) if bit is None else BitFlip(name, row, column, bit)


class AnyFaultInjector(WeightFaultInjector):
    """Injects faults of any kind into weights."""

    def inflict(self, fault: WeightFault) -> None:
        if isinstance(fault, BitFlip):
            super().inflict(fault)
            return
        weight = self.weights[fault.weight]
        if fault.kind == "one row zeroed":
            place = weight[fault.row : fault.row + 1]
        else:
            place = weight[_tile(fault.row, weight.shape[0]), _tile(fault.column, weight.shape[1])]
        self.replace(place, torch.zeros_like(place))


def _tile(at: int, size: int) -> slice:
    start = min(at // TILE * TILE, max(0, size - TILE))
    return slice(start, start + TILE)
