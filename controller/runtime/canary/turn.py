"""A worker's turn in the round robin of its canaries, and one probe of it."""

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
    """The position of one instance in the round robin of its canaries."""

    number: int = 0
    rank: int = 0  # probes passed so far: selects the DP rank; a failed rank is probed again
    asked: set[str] = field(default_factory=set)  # canaries sent since it joined or the last recheck
    first_round: bool = False  # not every canary has been sent yet
    recheck: bool = False  # all canaries are sent again at once: the answers are votes on their goldens
    sampling: SamplingTurn = field(default_factory=SamplingTurn)

    def ask_all_again(self) -> None:
        """Schedule all canaries again at once."""
        self.recheck, self.asked = True, set()


@dataclass(frozen=True, slots=True)
class Probe:
    """The fixed data of one probe of one worker."""

    worker: Worker
    canary_set: CanarySet
    canary: Canary
    check: CheckType
    probed: Probed
    deadline: Deadline
    rank: int = 0  # the DP rank that is probed

    @property
    def name(self) -> str:
        return self.worker.joined.worker
