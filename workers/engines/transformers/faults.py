"""Faults that can be injected into the transformers engine. They last until healed."""

import random
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from workers.engines.faults import SLOW_TIMES, EngineFaults
from workers.engines.transformers.weight_faults import WeightFault, WeightFaultInjector, draw_fault

NAMES = ("error", "corrupt", "drift", "sampler", "slow", "bitflip", "die", "heal")


@dataclass(slots=True, kw_only=True)
class TorchFaults(EngineFaults):
    """The faults active in the transformers engine now."""

    slow: float = 1.0
    # Queue for the engine's thread: the seed of a bit flip to inject, or None to undo all flips.
    surgery: deque[int | None] = field(default_factory=deque)

    def inject(self, fault: str, argument: float) -> bool:
        """Begin one fault, or `heal` all; False if it is unknown. An argument of 0 selects the fault's default.

        `bitflip` flips any one bit of one weight; its argument is the seed that selects them.
        """
        match fault:
            case "slow":
                self.slow = max(1.0, argument or SLOW_TIMES)
            case "bitflip":
                self.surgery.append(int(argument))
            case "heal":
                for one in ("error", "corrupt", "drift", "sampler", "slow", "bitflip"):
                    self.heal(one)
            case _:
                return self.begin(fault, argument)
        return True

    def heal(self, fault: str) -> None:
        """End one fault; `bitflip` restores all flipped bits at once. A dead engine stays dead."""
        match fault:
            case "slow":
                self.slow = 1.0
            case "bitflip":
                self.surgery.append(None)
            case _:
                self.end(fault)

    def altered(self, token: int, vocabulary: int, spared: frozenset[int]) -> int:
        """Return the token as the faulty engine outputs it: one in k is wrong, but never one of `spared`."""
        drawn = None if token in spared else self.draw_corruption()
        if drawn is None:
            return token
        wrong = (token + 1 + drawn % (vocabulary - 1)) % vocabulary
        return token if wrong in spared else wrong

    def drawn(self, token: int, temperature: float, vocabulary: int, spared: frozenset[int]) -> int:
        """Return the token as the sampler draws it: while it is broken, a random one that is not in `spared`."""
        drawn = self.misdrawn(temperature)
        wrong = token if drawn is None else drawn % vocabulary
        return token if wrong in spared else wrong

    def drifted(self, logits: Tensor) -> Tensor:
        """Return drifted logits. They are scaled, so that greedy tokens stay the same."""
        return logits * (1.0 + self.drift) if self.drift else logits


def flip_bit(weights: dict[str, Tensor], surgeon: WeightFaultInjector, seed: int) -> str:
    """Flip one bit of one weight, selected by `seed`; return where. Raise NotFloat32."""
    fault = bit_flip(weights, seed)
    surgeon.inflict(fault)
    return str(fault)


def bit_flip(weights: dict[str, Tensor], seed: int) -> WeightFault:
    """Return the fault of a `bitflip` with this seed."""
    return draw_fault(weights, "any one bit", random.Random(seed))
