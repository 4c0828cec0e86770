"""The fleet: wires all machines together, and is the deciders' interface to the runtime.

    fold.py           Fleet, evolve     what one recorded fact changes in the fleet
    settle.py         settle, SettleCache    which decisions are due now, stratum by stratum; cached for frequent callers
    shares.py         Shares            what each worker carries of its model's capacity
    worker.py         Worker            one worker: its machines, its weight
    policy.py         FleetPolicy       all settings

Only these modules know the machines (health, breaker, drain, budget, golden, degradation, incident, awaiting, forgetting,
spares). The machines do not know one another.
"""

from controller.deciders.awaiting import AwaitedWorker
from controller.deciders.fold import Fleet, changed_since, evolve
from controller.deciders.policy import OLDEST, FleetPolicy, dump, load
from controller.deciders.settle import (
    ABSORB_AFTER,
    ABSORB_FACTS_MAX,
    DECIDERS_VERSION,
    SettleCache,
    absorbed,
    absorption_due,
    in_force,
    next_due,
    settle,
    settled,
)
from controller.deciders.shares import Shares
from controller.deciders.worker import Conviction, LastCanary, Worker

__all__ = [
    "ABSORB_AFTER",
    "ABSORB_FACTS_MAX",
    "DECIDERS_VERSION",
    "OLDEST",
    "AwaitedWorker",
    "Conviction",
    "Fleet",
    "FleetPolicy",
    "LastCanary",
    "SettleCache",
    "Shares",
    "Worker",
    "absorbed",
    "absorption_due",
    "changed_since",
    "dump",
    "evolve",
    "in_force",
    "load",
    "next_due",
    "settle",
    "settled",
]
