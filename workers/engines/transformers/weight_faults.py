"""Memory faults for rehearsals, put into named weights and undone again.

They imitate a particle strike, a weak cell or a bad bus: one flipped bit of one number, a row of zeros, a tile of zeros. Each
kind is drawn from a seed, weight by weight in proportion to its size, so that the same seed gives the same fault.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from events.errors import HoldfastError

TILE = 16  # the side of a zeroed tile, as one matrix unit processes it


class NotFloat32(HoldfastError):
    """Bits are flipped by the layout of float32. Serve the model with dtype float32 to rehearse bit flips."""


@dataclass(frozen=True, slots=True)
class WeightFault:
    """One fault: the weight, the index in it and the change. `bit` counts from the lowest of the number's 32."""

    weight: str
    row: int
    column: int
    kind: str
    bit: int | None = None

    def __str__(self) -> str:
        what = f"bit {self.bit} of" if self.bit is not None else f"{self.kind} at"
        return f"{what} {self.weight}[{self.row}, {self.column}]"


# The bit that each kind flips; None: not a bit. float32 is 1 sign bit (31), 8 exponent bits (30–23), 23 mantissa bits.
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


def draw_fault(weights: Mapping[str, Tensor], kind: str, draw: random.Random) -> WeightFault:
    """Draw one fault of a kind; every number of every matrix is equally likely."""
    matrices = [name for name, weight in weights.items() if weight.dim() == 2]
    name = draw.choices(matrices, [weights[name].numel() for name in matrices])[0]
    rows, columns = weights[name].shape
    return WeightFault(name, draw.randrange(rows), draw.randrange(columns), kind, KINDS[kind](draw))


class WeightFaultInjector:
    """Injects faults into weights, and keeps the original values to restore them."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        # the changed part (a view of the weight), and its original content
        self._before: list[tuple[Tensor, Tensor]] = []

    @torch.inference_mode()
    def inflict(self, fault: WeightFault) -> None:
        """Put a fault into its weight. Raise NotFloat32."""
        weight = self._weights[fault.weight]
        place = weight[fault.row : fault.row + 1, fault.column : fault.column + 1]
        if fault.kind == "one row zeroed":
            place = weight[fault.row : fault.row + 1]
        elif fault.bit is None:
            place = weight[_tile(fault.row, weight.shape[0]), _tile(fault.column, weight.shape[1])]
        elif weight.dtype != torch.float32:
            raise NotFloat32
        self._before.append((place, place.clone()))
        place.copy_(torch.zeros_like(place) if fault.bit is None else _flipped(place, fault.bit))

    @torch.inference_mode()
    def heal(self) -> None:
        """Restore everything, the last fault first."""
        while self._before:
            place, before = self._before.pop()
            place.copy_(before)


def _tile(at: int, size: int) -> slice:
    start = min(at // TILE * TILE, max(0, size - TILE))
    return slice(start, start + TILE)


def _flipped(place: Tensor, bit: int) -> Tensor:
    mask = (1 << bit) - (1 << 32 if bit == 31 else 0)  # as a signed 32-bit number
    return (place.contiguous().view(torch.int32) ^ mask).view(torch.float32)
