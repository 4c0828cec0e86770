"""Which faults, when: the demo's script. Times are shares of its duration; workers are chosen by place in the list."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Act:
    """One thing done to the fleet. `fault` names the row of the final table; None only cleans up after one."""

    at: float  # share of the duration
    worker: int
    verb: str  # of `holdfast chaos`, or drain, resume
    argument: float | None
    fault: str | None
    says: str


SCRIPT = (
    Act(0.10, 1, "kill", None, "kill -9", "its process is gone, mid-sentence"),
    Act(0.22, 2, "hang", None, "hang", "SIGSTOP: the process is there, and says nothing"),
    Act(0.32, 2, "unhang", None, None, "SIGCONT"),
    Act(0.36, 0, "error", 6, "exception", "the engine raises for its next requests"),
    Act(0.42, 0, "heal", None, None, "the engine works again"),
    Act(0.46, 3, "corrupt", 8, "corruption", "one token in eight is wrong, and nothing says so"),
    Act(0.60, 3, "heal", None, None, "the hardware was replaced"),
    Act(0.64, 1, "blackhole", None, "blackhole", "the network swallows everything without closing"),
    Act(0.74, 1, "heal", None, None, "the network is back"),
    Act(0.80, 0, "drain", None, "drain", "an operator empties it"),
    Act(0.90, 0, "resume", None, None, "and takes it back"),
)
WORKERS, SPARES = 4, 1
