"""Lists the faults that `holdfast chaos` can inject into a worker, and which of them take an argument.

Imports the standard library only, so that commands start quickly.
"""

from typing import Literal, TypeAlias, get_args

Fault: TypeAlias = Literal[
    "kill",
    "hang",
    "unhang",
    "error",
    "corrupt",
    "drift",
    "sampler",
    "slow",
    "xid",
    "nvlink",
    "blackhole",
    "heal",
]
FAULTS: tuple[Fault, ...] = get_args(Fault)
TAKE_ARGUMENT = ("error", "corrupt", "drift", "slow", "xid", "nvlink")
TAKE_RANK = TAKE_ARGUMENT
HEALING = ("heal", "unhang")
ENDS = ("kill", *HEALING)  # take effect once, so they have no duration
