"""Where a worker is in the round robin of its canaries, and what one probe of it is about."""

from dataclasses import dataclass, field

from controller.deciders.fleet import Worker
from controller.runtime.canary.canary_set import CanarySet
from controller.runtime.canary.facts import Probed
from controller.runtime.canary.goldens import Canary
from controller.runtime.canary.probe import Deadline
from controller.runtime.canary.sampling_check import SamplingTurn
from events.observations import CheckType


@dataclass(slots=True)
class CanaryTurn:
    """Where one instance is in the round robin of its canaries."""

    number: int = 0
    rank: int = 0  # passed so far: the DP ranks are asked one after another, and one that has failed again
    asked: set[str] = field(default_factory=set)  # since it joined
    first_round: bool = False  # not every canary has been asked yet
    recheck: bool = False  # all canaries are asked again at once: its answers are votes on their goldens
    sampling: SamplingTurn = field(default_factory=SamplingTurn)

    def ask_all_again(self) -> None:
        """Ask all canaries again at once."""
        self.recheck, self.asked = True, set()


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe of one worker: everything about it that does not change meanwhile."""

    worker: Worker
    canary_set: CanarySet
    canary: Canary
    check: CheckType
    probed: Probed
    deadline: Deadline
    rank: int = 0  # the DP rank that is asked

    @property
    def name(self) -> str:
        return self.worker.joined.worker
