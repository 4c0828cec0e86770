"""Injects faults into the transformers engine, for rehearsals.

Memory faults change the values of named weights, and can be undone. They imitate a particle strike, a weak memory cell or a bad
bus: one flipped bit of one number, a row of zeros, or a tile of zeros. A seeded random generator selects the weight, in
proportion to its size, and the index, so that the same seed gives the same fault.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from events.errors import HoldfastError
from workers.engines.faults import EngineFaults

TILE = 16  # rows and columns of a zeroed tile: the size that one matrix unit of a GPU processes


class NotFloat32(HoldfastError):
    """Bits are flipped by the layout of float32. Serve the model with dtype float32 to rehearse bit flips."""


@dataclass(frozen=True, slots=True)
class WeightFault:
    """A memory fault at one index of one weight."""

    weight: str
    row: int
    column: int
    kind: str  # one of KINDS
    # the flipped bit of the float32 number, 0 for the lowest; None: the kind flips no bit
    bit: int | None = None

    def __str__(self) -> str:
        what = f"bit {self.bit} of" if self.bit is not None else f"{self.kind} at"
        return f"{what} {self.weight}[{self.row}, {self.column}]"


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


def draw_fault(weights: Mapping[str, Tensor], kind: str, draw: random.Random) -> WeightFault:
    """Return a random fault of this kind, drawn with `draw`. Every number of every matrix is equally likely to be selected."""
    matrices = [name for name, weight in weights.items() if weight.dim() == 2]
    name = draw.choices(matrices, [weights[name].numel() for name in matrices])[0]
    rows, columns = weights[name].shape
    return WeightFault(name, draw.randrange(rows), draw.randrange(columns), kind, KINDS[kind](draw))


class WeightFaultInjector:
    """Injects faults into weights, and keeps the original values so that `heal` can restore them."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        # the changed part (a view of the weight), and its original content
        self._before: list[tuple[Tensor, Tensor]] = []

    @torch.inference_mode()
    def inflict(self, fault: WeightFault) -> None:
        """Change the weight as the fault says. Raise NotFloat32 if a bit of a number that is not float32 would be flipped."""
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
        """Restore the original values of all weights, the last fault first."""
        while self._before:
            place, before = self._before.pop()
            place.copy_(before)


def _tile(at: int, size: int) -> slice:
    start = min(at // TILE * TILE, max(0, size - TILE))
    return slice(start, start + TILE)


def _flipped(place: Tensor, bit: int) -> Tensor:
    mask = (1 << bit) - (1 << 32 if bit == 31 else 0)  # as a signed 32-bit number
    return (place.contiguous().view(torch.int32) ^ mask).view(torch.float32)


@dataclass(slots=True, kw_only=True)
class TorchFaults(EngineFaults):
    """The faults that are active in the transformers engine now.

    In addition to the faults of `EngineFaults`, `bitflip` flips one bit of one weight. Its argument is the seed that selects the
    weight and the bit. Healing `bitflip` restores all flipped bits.
    """

    # Queue for the engine's thread. An entry is the seed of a bit flip to inject, or None to undo all flips.
    surgery: deque[int | None] = field(default_factory=deque)

    def inject(self, fault: str, argument: float, rank: int = 0) -> bool:
        if fault in ("bitflip", "heal"):
            self.surgery.append(int(argument) if fault == "bitflip" else None)
        return EngineFaults.inject(self, fault, argument, rank) or fault == "bitflip"

    def heal(self, fault: str, rank: int = 0) -> None:
        if fault == "bitflip":
            self.surgery.append(None)
        EngineFaults.heal(self, fault, rank)

    def misled(self, token: int, temperature: float, vocabulary: int, spared: frozenset[int]) -> int:
        """Return the token that the engine with its `sampler` and `corrupt` faults outputs instead of `token`.

        A token in `spared` is never output in place of another token, and `corrupt` never replaces one.
        """
        drawn = self.drawn(token, temperature, 0, vocabulary)
        token = token if drawn in spared else drawn
        altered = token if token in spared else self.altered(token, 0, vocabulary)
        return token if altered in spared else altered

    def drifted(self, logits: Tensor) -> Tensor:
        """Return the logits with the `drift` fault applied. The logits are scaled, so greedy tokens stay the same."""
        return logits * (1.0 + self.drift) if self.drift else logits


def bit_flip(weights: dict[str, Tensor], seed: int) -> WeightFault:
    """Return the weight fault that the fault `bitflip` injects with this seed."""
    return draw_fault(weights, "any one bit", random.Random(seed))
