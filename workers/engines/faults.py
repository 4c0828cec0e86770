"""Injects faults into an engine: failing steps, slow steps and wrong tokens."""

from dataclasses import dataclass, field

import xxhash

CORRUPT_ONE_IN = 8
DRIFT = 0.05
SLOW_TIMES = 5.0
KINDS = ("error", "corrupt", "drift", "sampler", "slow")  # the faults that `heal` can end


@dataclass(slots=True, kw_only=True)
class EngineFaults:
    """The faults that are active in an engine now.

    A fault ends when it is healed. An `error` fault may also end after a number of failed requests. A new `EngineFaults` object
    has no active fault.
    """

    healthy: bool = True  # every pass succeeds with the right greedy tokens and logprobs, at any speed
    error: bool = False
    errors_left: int = 0  # number of requests still to fail; 0: all requests until healed
    raising_rank: int = 0
    corrupt_one_in: int = 0
    drift: float = 0.0
    sampler: bool = False  # above temperature 0, the sampler draws any token; greedy answers stay right
    # factor on a step's duration: the largest of all ranks, because they wait for the slowest
    slow: float = 1.0
    slowness: dict[int, float] = field(default_factory=dict)  # by rank
    dead: bool = False
    _count: int = 0  # number of pseudo-random draws so far; each draw is a hash of this number

    def inject(self, fault: str, argument: float, rank: int = 0) -> bool:
        """Begin a fault. The fault name `heal` instead ends all faults except `die`. Return False if the name is unknown.

        The meaning of `argument` depends on the fault:

            error    number of requests that fail; 0: all requests, until the fault is healed
            corrupt  one in this many tokens is wrong; 0: one in 8
            drift    strength of the error in the logits or logprobs; 0: 0.05
            slow     factor on the duration of a step of `rank`; 0: 5
        """
        match fault:
            case "error":
                self.error, self.errors_left, self.raising_rank = True, int(argument), rank
            case "corrupt":
                self.corrupt_one_in = max(1, int(argument) or CORRUPT_ONE_IN)
            case "drift":
                self.drift = argument or DRIFT
            case "sampler":
                self.sampler = True
            case "slow":
                self.slowness[rank] = max(1.0, argument or SLOW_TIMES)
            case "die":
                self.dead = True
            case "heal":
                for kind in KINDS:
                    self.heal(kind)
                self.slowness.clear()
            case _:
                return False
        self._update()
        return True

    def heal(self, fault: str, rank: int = 0) -> None:
        """End one fault. The fault `slow` ends only for `rank`, any other fault for all ranks. A dead engine stays dead."""
        match fault:
            case "error":
                self.error, self.errors_left = False, 0
            case "corrupt":
                self.corrupt_one_in = 0
            case "drift":
                self.drift = 0.0
            case "sampler":
                self.sampler = False
            case "slow":
                self.slowness.pop(rank, None)
        self._update()

    def _update(self) -> None:
        self.healthy = not (self.error or self.corrupt_one_in or self.drift)
        self.slow = max(self.slowness.values(), default=1.0)

    def raised(self, requests: int) -> int:
        """Return how many of `requests` requests fail now because of the `error` fault.

        If the fault was injected for a limited number of requests, subtract the result from the remaining number.
        """
        if not self.error:
            return 0
        if not self.errors_left:
            return requests
        taken = min(requests, self.errors_left)
        self.errors_left -= taken
        self.error = self.errors_left > 0
        self._update()
        return taken

    def altered(self, token: int, first: int, count: int) -> int:
        """Return the token that an engine with the `corrupt` fault outputs instead of `token`.

        On average, one in `corrupt_one_in` tokens is replaced by another of the `count` consecutive token ids from `first` on. A
        hash of a running count selects the tokens to replace. If every k-th token were replaced instead, some streams would
        never be affected. If a hash of the text selected the tokens, some canaries would never be affected.
        """
        if not self.corrupt_one_in or (dice := self._dice()) % self.corrupt_one_in:
            return token
        return first + (token - first + 1 + (dice >> 32) % (count - 1)) % count

    def drawn(self, token: int, temperature: float, first: int, count: int) -> int:
        """Return the token that the sampler draws instead of `token`.

        With the `sampler` fault and a temperature above 0, return a pseudo-random one of the `count` consecutive token ids from
        `first` on. Otherwise, return `token`.
        """
        return first + self._dice() % count if self.sampler and temperature > 0 else token

    def _dice(self) -> int:
        self._count += 1
        return xxhash.xxh64_intdigest(self._count.to_bytes(8, "little"))
