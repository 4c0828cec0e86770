"""The demo's script of faults. Times are shares of its duration; workers are list indexes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Act:
    """One action on the fleet. `fault` names its row in the final table; None: the act only ends an earlier fault."""

    at: float  # share of the duration
    worker: int
    verb: str  # of `holdfast chaos`, or drain, resume
    argument: float | None
    fault: str | None
    says: str


SCRIPT = (
    Act(0.10, 1, "kill", None, "kill -9", "its process is killed during answers"),
    Act(0.22, 2, "hang", None, "hang", "SIGSTOP: the process exists but does not respond"),
    Act(0.32, 2, "unhang", None, None, "SIGCONT"),
    Act(0.36, 0, "error", 6, "exception", "the engine raises an exception for its next requests"),
    Act(0.42, 0, "heal", None, None, "the engine works again"),
    Act(0.46, 3, "corrupt", 8, "corruption", "one token in eight is wrong, without an error"),
    Act(0.60, 3, "heal", None, None, "the hardware was replaced"),
    Act(0.64, 1, "blackhole", None, "blackhole", "the network drops everything without closing"),
    Act(0.74, 1, "heal", None, None, "the network is back"),
    Act(0.80, 0, "drain", None, "drain", "an operator drains it"),
    Act(0.90, 0, "resume", None, None, "and returns it to service"),
)
WORKERS, SPARES = 4, 1
