"""Faults that the transformers engine plays for rehearsals. They last until healed."""

import random
from collections import deque
from dataclasses import dataclass, field

import xxhash
from torch import Tensor

from workers.engines.transformers.weight_faults import Surgeon, WeightFault, draw_fault

CORRUPT_ONE_IN = 8
DRIFT = 0.05
SLOW_TIMES = 5.0
NAMES = ("error", "corrupt", "drift", "slow", "bitflip", "die", "heal")


@dataclass(slots=True)
class TorchFaults:
    """What is wrong with the engine right now. A fresh value is a healthy engine."""

    error: bool = False
    errors_left: int = 0  # 0: until healed
    corrupt_one_in: int = 0
    drift: float = 0.0
    slow: float = 1.0
    dead: bool = False
    # For the engine's thread, in this order: the seed of a bit flip to make, or None to undo them all.
    surgery: deque[int | None] = field(default_factory=deque)
    _said: int = 0  # tokens said while corrupting

    def inject(self, fault: str, argument: float) -> bool:
        """Begin one fault, or `heal` all; False if there is no such fault. An argument of 0 takes the fault's default.

        `bitflip` flips any one bit of one weight; its argument is the seed that chooses them.
        """
        match fault:
            case "error":
                self.error, self.errors_left = True, int(argument)
            case "corrupt":
                self.corrupt_one_in = max(1, int(argument) or CORRUPT_ONE_IN)
            case "drift":
                self.drift = argument or DRIFT
            case "slow":
                self.slow = max(1.0, argument or SLOW_TIMES)
            case "bitflip":
                self.surgery.append(int(argument))
            case "die":
                self.dead = True
            case "heal":
                self.error, self.errors_left, self.corrupt_one_in = False, 0, 0
                self.drift, self.slow = 0.0, 1.0
                self.surgery.append(None)
            case _:
                return False
        return True

    def heal(self, fault: str) -> None:
        """End one fault; bits that were flipped are put back all at once. Who is dead stays so."""
        match fault:
            case "error":
                self.error, self.errors_left = False, 0
            case "corrupt":
                self.corrupt_one_in = 0
            case "drift":
                self.drift = 0.0
            case "slow":
                self.slow = 1.0
            case "bitflip":
                self.surgery.append(None)

    def raised(self, requests: int) -> int:
        """Return how many of `requests` the raising engine takes down now, and count them."""
        if not self.error:
            return 0
        if not self.errors_left:
            return requests
        taken = min(requests, self.errors_left)
        self.errors_left -= taken
        self.error = self.errors_left > 0
        return taken

    def altered(self, token: int, vocabulary: int, spared: frozenset[int]) -> int:
        """Return the token as the sick engine says it: one in k is another one, never one of `spared`.

        Which ones is a hash of a running count, as in the simulated engine: no stream and no canary is spared for ever.
        """
        if not self.corrupt_one_in or token in spared:
            return token
        self._said += 1
        dice = xxhash.xxh64_intdigest(self._said.to_bytes(8, "little"))
        if dice % self.corrupt_one_in:
            return token
        wrong = (token + 1 + (dice >> 32) % (vocabulary - 1)) % vocabulary
        return token if wrong in spared else wrong

    def drifted(self, logits: Tensor) -> Tensor:
        """Return logits that are off but choose the same greedy tokens: scaled, so that their order stays."""
        return logits * (1.0 + self.drift) if self.drift else logits


def flip_bit(weights: dict[str, Tensor], surgeon: Surgeon, seed: int) -> str:
    """Flip one bit of one weight, chosen by `seed`; return where. Raise NotFloat32."""
    fault = bit_flip(weights, seed)
    surgeon.inflict(fault)
    return str(fault)


def bit_flip(weights: dict[str, Tensor], seed: int) -> WeightFault:
    """Return the fault that `bitflip` with this seed is."""
    return draw_fault(weights, "any one bit", random.Random(seed))
