"""Injects faults into the transformers engine, for rehearsals of failures.

A memory fault changes one bit of one number of a named weight, and can be undone. It imitates a particle strike, a weak memory
cell or a bad bus. A seeded random generator selects one of all the numbers of all weight matrices. So the same seed gives the
same fault.
"""

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from events.errors import HoldfastError
from workers.engines.faults import EngineFaults


class NotFloat32(HoldfastError):
    """Bits are flipped by the layout of float32. Serve the model with dtype float32 to rehearse bit flips."""


@dataclass(frozen=True, slots=True)
class BitFlip:
    """One flipped bit of one number of one weight."""

    weight: str
    row: int
    column: int
    bit: int  # of the float32 number, 0 for the lowest

    def __str__(self) -> str:
        return f"bit {self.bit} of {self.weight}[{self.row}, {self.column}]"


def draw_place(weights: Mapping[str, Tensor], draw: random.Random) -> tuple[str, int, int]:
    """Select a number at random from all weight matrices. Return the matrix's name, and the number's row and column.

    All numbers are equally likely, whichever matrix they are in.
    """
    matrices = [name for name, weight in weights.items() if weight.dim() == 2]
    name = draw.choices(matrices, [weights[name].numel() for name in matrices])[0]
    rows, columns = weights[name].shape
    return name, draw.randrange(rows), draw.randrange(columns)


class WeightFaultInjector:
    """Injects faults into weights, and keeps the original values so that `heal` can restore them."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        # the changed part (a view of the weight), and its original content
        self._before: list[tuple[Tensor, Tensor]] = []

    @torch.inference_mode()
    def inflict(self, fault: BitFlip) -> None:
        """Flip a bit. Raise NotFloat32 if the weight is not float32."""
        weight = self.weights[fault.weight]
        if weight.dtype != torch.float32:
            raise NotFloat32
        place = weight[fault.row : fault.row + 1, fault.column : fault.column + 1]
        mask = (1 << fault.bit) - (1 << 32 if fault.bit == 31 else 0)  # as a signed 32-bit number
        self.replace(place, (place.contiguous().view(torch.int32) ^ mask).view(torch.float32))

    @torch.inference_mode()
    def replace(self, place: Tensor, content: Tensor) -> None:
        """Overwrite `place`, a view of a part of a weight, with `content` until `heal` is called."""
        self._before.append((place, place.clone()))
        place.copy_(content)

    @torch.inference_mode()
    def heal(self) -> None:
        """Restore the original values of all weights, the last fault first."""
        while self._before:
            place, before = self._before.pop()
            place.copy_(before)


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
        """Return the token that the engine outputs instead of `token` because of the `sampler` and `corrupt` faults.

        If `token` is not in `spared`, the result is not in `spared` either. If `token` is in `spared`, only the fault `sampler`
        can lead to another result.
        """
        drawn = self.drawn(token, temperature, 0, vocabulary)
        token = token if drawn in spared else drawn
        altered = token if token in spared else self.altered(token, 0, vocabulary)
        return token if altered in spared else altered

    def drifted(self, logits: Tensor) -> Tensor:
        """Return the logits with the `drift` fault applied. The logits are scaled, so greedy tokens stay the same."""
        return logits * (1.0 + self.drift) if self.drift else logits


def bit_flip(weights: Mapping[str, Tensor], seed: int) -> BitFlip:
    """Return the bit flip that the fault `bitflip` injects with this seed."""
    draw = random.Random(seed)
    return BitFlip(*draw_place(weights, draw), draw.randrange(32))
